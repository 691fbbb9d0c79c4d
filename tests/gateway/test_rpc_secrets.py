"""Secrets over gRPC, as K8E's clients refer to them, in real sandboxes of both runtimes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from tests.gateway.devices import ask, new_key
from tests.gateway.serving import RUNTIMES, Running, failing

Stub = pb_grpc.SandboxServiceStub
VALUE = "ghp-never-shown-again"
REF = pb.SecretRef(secret_name="github", key="token", env_var="GITHUB_TOKEN")


@pytest.fixture(autouse=True)
def kept(stub: Stub) -> Iterator[None]:
    request = pb.SetSecretRequest(name="github", key="token", value=VALUE)
    told = stub.SetSecret(request, timeout=20)
    assert (told.secret.name, told.secret.key, told.secret.tenant_id) == (
        "github",
        "token",
        "default",
    )
    assert VALUE not in str(told)
    yield
    for item in stub.ListSecrets(pb.ListSecretsRequest(), timeout=20).secrets:
        place = {"tenant_id": item.tenant_id, "name": item.name, "key": item.key}
        stub.DeleteSecret(pb.DeleteSecretRequest(**place), timeout=20)


def create(stub: Stub, runtime: str = "container", **fields: Any) -> str:
    request = pb.CreateSessionRequest(runtime_class=runtime, secret_refs=[REF], **fields)
    return stub.CreateSession(request, timeout=50).session_id


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_secret_is_a_variable_of_every_program_and_nothing_else_tells_it(
    running: Running, stub: Stub, runtime: str
) -> None:
    session = create(stub, runtime, env={"A": "1"})
    try:
        told = stub.GetSession(pb.GetSessionRequest(session_id=session), timeout=20)
        assert (list(told.env_keys), list(told.secret_env_vars)) == (["A"], ["GITHUB_TOKEN"])
        command = 'echo "$A $GITHUB_TOKEN" and $GITHUB_TOKEN >&2; echo "$GITHUB_TOKEN"'
        done = stub.Exec(pb.ExecRequest(session_id=session, command=command), timeout=20)
        assert done.stdout == f"{VALUE}\n", "what a program prints is its caller's"
        code = pb.ExecRequest(
            session_id=session, code=b"import os; print(os.environ['GITHUB_TOKEN'])", language="py"
        )
        assert stub.Exec(code, timeout=20).stdout == f"{VALUE}\n", "a warm interpreter has it too"

        log = stub.GetTranscript(pb.GetTranscriptRequest(session_id=session), timeout=20)
        assert VALUE not in log.output
        assert sorted(log.output.splitlines())[:3] == [
            "*" * len(VALUE),
            "*" * len(VALUE),
            f"1 {'*' * len(VALUE)} and {'*' * len(VALUE)}",
        ]
        events = stub.GetEvents(pb.GetEventsRequest(session_id=session), timeout=20)
        assert VALUE not in str(events)
    finally:
        stub.DestroySession(pb.DestroySessionRequest(session_id=session), timeout=50)
    rows = ask(running, op="audit", limit=5000)["rows"]
    assert VALUE not in str(rows)
    assert "secret.set" in [json.loads(row)["action"] for row in rows]
    for path in running.folder.rglob("*"):
        if path.is_file() and path.suffix != ".img":
            try:
                assert VALUE.encode() not in path.read_bytes(), path
            except OSError:  # sockets and namespaces
                continue


def test_nothing_shows_a_value_again(running: Running, stub: Stub) -> None:
    told = stub.ListSecrets(pb.ListSecretsRequest(), timeout=20)
    assert [(item.name, item.key) for item in told.secrets] == [("github", "token")]
    assert VALUE not in str(told)
    assert VALUE not in str(ask(running, op="list_secrets"))


def test_secrets_of_another_caller_or_tenant_do_not_exist(running: Running, stub: Stub) -> None:
    other = new_key(running, "another")
    try:
        for call in (
            lambda: stub.CreateSession(
                pb.CreateSessionRequest(runtime_class="container", secret_refs=[REF]),
                metadata=other,
                timeout=50,
            ),
            lambda: create(stub, tenant_id="team-b"),
        ):
            failed = failing(call)
            assert failed.status is grpc.StatusCode.INVALID_ARGUMENT
            assert "does not exist" in failed.details
        mine = pb.DeleteSecretRequest(name="github")
        failed = failing(lambda: stub.DeleteSecret(mine, metadata=other, timeout=20))
        assert failed.status is grpc.StatusCode.NOT_FOUND
        assert stub.ListSecrets(pb.ListSecretsRequest(), metadata=other, timeout=20).secrets == []
    finally:
        ask(running, op="delete_api_key", name="another")


@pytest.mark.parametrize(
    "refs",
    [
        [pb.SecretRef(secret_name="github", key="token")],
        [pb.SecretRef(key="token", env_var="A")],
        [pb.SecretRef(secret_name="github", env_var="A")],
        [REF, REF],
        [pb.SecretRef(secret_name="github", key="token", env_var=f"A{n}") for n in range(33)],
        [pb.SecretRef(secret_name="github", key="none", env_var="A")],
    ],
)
def test_references_that_cannot_be_are_refused_before_anything_is_made(
    stub: Stub, refs: list[pb.SecretRef]
) -> None:
    before = len(stub.ListSessions(pb.ListSessionsRequest(phase="all"), timeout=20).sessions)
    request = pb.CreateSessionRequest(runtime_class="container", secret_refs=refs)
    failed = failing(lambda: stub.CreateSession(request, timeout=50))
    assert failed.status is grpc.StatusCode.INVALID_ARGUMENT
    after = len(stub.ListSessions(pb.ListSessionsRequest(phase="all"), timeout=20).sessions)
    assert after == before


def test_a_deleted_secret_is_gone_for_new_sessions(stub: Stub) -> None:
    told = stub.DeleteSecret(pb.DeleteSecretRequest(name="github", key="token"), timeout=20)
    assert told.deleted == 1
    assert failing(lambda: create(stub)).status is grpc.StatusCode.INVALID_ARGUMENT
