"""K8E's published Python SDK works unchanged, as far as it can be told from the wire."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from tests.gateway.devices import ask, new_key
from tests.gateway.k8e_client import K8EClient, Result
from tests.gateway.serving import RUNTIMES, Running, failing


@pytest.fixture
def environment(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K8E_SANDBOX_CERT", str(running.ca))
    monkeypatch.setenv("K8E_SANDBOX_ENDPOINT", running.address)


@pytest.fixture
def client(environment: None) -> Iterator[K8EClient]:
    with K8EClient() as client:
        yield client


def test_run_makes_a_session_at_first_and_keeps_it(client: K8EClient) -> None:
    assert client.run("echo hi; echo no >&2; echo 1 > kept; exit 5") == Result("hi\n", "no\n", 5)
    assert client.run("print(open('kept').read())", "python") == Result("1\n\n", "", 0)
    assert client.run("cat kept").stdout == "1\n"


def test_close_destroys_the_session(environment: None, stub: pb_grpc.SandboxServiceStub) -> None:
    with K8EClient() as client:
        client.run("true")
        session = client.default_session
    found = stub.GetSession(pb.GetSessionRequest(session_id=session), timeout=20)
    assert found.phase == "Ended"


def test_close_keeps_the_session_of_a_tenant(
    environment: None, stub: pb_grpc.SandboxServiceStub
) -> None:
    with K8EClient(tenant_id="team-a") as client:
        client.run("true")
        session = client.default_session
    found = stub.GetSession(pb.GetSessionRequest(session_id=session), timeout=20)
    assert (found.phase, found.tenant_id) == ("Active", "team-a")
    stub.DestroySession(pb.DestroySessionRequest(session_id=session), timeout=50)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_session_of_its_own_with_files_and_a_stream(client: K8EClient, runtime: str) -> None:
    session = client.create_session(runtime)
    try:
        client.write_file(session, "/workspace/src/main.py", "print('one')\nprint('two')\n")
        assert client.read_file(session, "/workspace/src/main.py").startswith("print('one')")
        assert client.list_files(session) == ["/workspace/src/main.py"]
        chunks = client.exec_stream(session, "python3 src/main.py; echo three >&2")
        assert "".join(chunks) == "one\ntwo\nthree\n"
        assert client.exec(session, "sleep 300", timeout=1).exit_code == 143
    finally:
        client.destroy_session(session)


def test_a_file_above_grpcs_default_size_is_the_clients_limit(client: K8EClient) -> None:
    session = client.create_session("container")
    client.exec(session, "head -c 5M /dev/zero > large")
    failed = failing(lambda: client.read_file(session, "large"))
    client.destroy_session(session)
    assert failed.status is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_the_gateway_is_healthy_and_a_dead_port_is_not(
    client: K8EClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.is_healthy()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
    monkeypatch.setenv("K8E_SANDBOX_ENDPOINT", address)
    with K8EClient() as other:
        assert not other.is_healthy()


def test_a_client_that_does_not_trust_our_ca_never_sends_a_call(
    environment: None, running: Running
) -> None:
    with grpc.secure_channel(running.address, grpc.ssl_channel_credentials()) as channel:
        stub = pb_grpc.SandboxServiceStub(channel)
        failed = failing(lambda: stub.ListSessions(pb.ListSessionsRequest(), timeout=20))
    assert failed.status is grpc.StatusCode.UNAVAILABLE


def test_there_is_no_endpoint_without_tls(running: Running) -> None:
    with grpc.insecure_channel(running.address) as channel:
        stub = pb_grpc.SandboxServiceStub(channel)
        failed = failing(lambda: stub.ListSessions(pb.ListSessionsRequest(), timeout=20))
    assert failed.status is grpc.StatusCode.UNAVAILABLE


# What K8E's newest clients ask for.


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_typescript_runs_as_k8e_s_newest_client_runs_it(client: K8EClient, runtime: str) -> None:
    session = client.create_session(runtime)
    try:
        code = "enum Answer { Is = 42 }\nconst n: number = Answer.Is\nconsole.log(n)\n"
        client.write_file(session, "/workspace/_k8e_run.ts", code)
        command = "TMPDIR=/workspace tsx /workspace/_k8e_run.ts"
        assert client.exec(session, command) == Result("42\n", "", 0)
    finally:
        client.destroy_session(session)


def test_the_types_of_files_are_k8e_s_words(
    client: K8EClient, stub: pb_grpc.SandboxServiceStub
) -> None:
    session = client.create_session("container")
    client.exec(session, "mkdir sub; echo x > sub/file; ln -s sub link; mkfifo pipe")
    found = stub.ListFiles(pb.ListFilesRequest(session_id=session), timeout=20).files
    client.destroy_session(session)
    assert {item.path.removeprefix("/workspace/"): item.type for item in found} == {
        "sub/file": "file",
        "link": "symlink",
        "pipe": "other",
    }


def test_a_chosen_id_is_free_for_every_caller_when_its_session_has_ended(
    running: Running, stub: pb_grpc.SandboxServiceStub
) -> None:
    other = new_key(running, "next-owner")
    asked = pb.CreateSessionRequest(session_id="agent-1", runtime_class="container")
    gone = pb.DestroySessionRequest(session_id="agent-1")
    mine: dict[str, Any] = {"timeout": 50}
    theirs: dict[str, Any] = {"timeout": 50, "metadata": other}
    try:
        for _ in range(2):
            stub.CreateSession(asked, **mine)
            stub.Exec(pb.ExecRequest(session_id="agent-1", command="echo mine"), **mine)
            refused = failing(lambda: stub.CreateSession(asked, **theirs))
            assert refused.status is grpc.StatusCode.ALREADY_EXISTS
            stub.DestroySession(gone, **mine)
            stub.CreateSession(asked, **theirs)
            told = stub.GetEvents(pb.GetEventsRequest(session_id="agent-1"), **theirs)
            assert "mine" not in str(told.events)
            log = stub.GetTranscript(pb.GetTranscriptRequest(session_id="agent-1"), **theirs)
            assert log.output == ""
            told = stub.GetEvents(pb.GetEventsRequest(session_id="agent-1"), **mine)
            assert "echo mine" in str(told.events)
            refused = failing(
                lambda: stub.Exec(pb.ExecRequest(session_id="agent-1", command="id"), **mine)
            )
            assert refused.status is grpc.StatusCode.NOT_FOUND
            stub.DestroySession(gone, **theirs)
    finally:
        ask(running, op="delete_api_key", name="next-owner")
