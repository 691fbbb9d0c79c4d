"""The life of sessions over gRPC, and what the gateway refuses."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from tests.gateway.serving import RUNTIMES, Frames, failing

Stub = pb_grpc.SandboxServiceStub
Status = grpc.StatusCode
SERVICE = pb.DESCRIPTOR.services_by_name["SandboxService"]


def listed(stub: Stub, phase: str = "") -> dict[str, str]:
    found = stub.ListSessions(pb.ListSessionsRequest(phase=phase), timeout=20).sessions
    return {item.session_id: item.phase for item in found}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_session_is_made_found_listed_and_destroyed(stub: Stub, runtime: str) -> None:
    asked = pb.CreateSessionRequest(
        session_id=f"mine-{runtime}",
        tenant_id="acme",
        runtime_class=runtime,
        env={"B": "2", "A": "1"},
        allowed_hosts=[""],  # what K8E's CLI makes of an empty flag
    )
    made = stub.CreateSession(asked, timeout=50)
    assert (made.session_id, made.pod_ip) == (f"mine-{runtime}", "")
    found = stub.GetSession(pb.GetSessionRequest(session_id=made.session_id), timeout=20)
    assert (found.phase, found.runtime_class, found.tenant_id) == ("Active", runtime, "acme")
    assert list(found.env_keys) == ["A", "B"]
    assert found.expires_at > 1_700_000_000
    assert listed(stub)[made.session_id] == "Active"
    assert made.session_id not in listed(stub, "Ended")

    again = failing(lambda: stub.CreateSession(asked, timeout=50))
    assert again.status is Status.ALREADY_EXISTS

    gone = pb.DestroySessionRequest(session_id=made.session_id)
    assert stub.DestroySession(gone, timeout=50).ok
    assert made.session_id not in listed(stub)
    assert listed(stub, "all")[made.session_id] == "Ended"
    assert listed(stub, "ended")[made.session_id] == "Ended"
    assert failing(lambda: stub.DestroySession(gone, timeout=20)).status is Status.NOT_FOUND
    exec_request = pb.ExecRequest(session_id=made.session_id, command="true")
    failed = failing(lambda: stub.Exec(exec_request, timeout=20))
    assert failed.status is Status.NOT_FOUND
    assert "not found" in failed.details


def test_a_call_without_a_session_gets_the_callers_own(stub: Stub) -> None:
    first = stub.Exec(pb.ExecRequest(command="echo kept > file"), timeout=50)
    assert first.session_id.startswith("sess-")
    assert stub.ReadFile(pb.ReadFileRequest(path="file"), timeout=50).content == "kept\n"
    assert stub.WriteFile(pb.WriteFileRequest(path="other", content="x"), timeout=50).ok
    files = stub.ListFiles(pb.ListFilesRequest(), timeout=50).files
    assert sorted(item.path for item in files) == ["/workspace/file", "/workspace/other"]
    answers = stub.ExecStream(pb.ExecRequest(command="cat file"), timeout=50)
    assert "".join(answer.chunk for answer in answers) == "kept\n"
    stub.DestroySession(pb.DestroySessionRequest(session_id=first.session_id), timeout=50)
    # Destroyed, it is made anew at the next use.
    second = stub.Exec(pb.ExecRequest(command="ls"), timeout=50)
    assert second.session_id != first.session_id
    assert second.stdout == ""
    stub.DestroySession(pb.DestroySessionRequest(session_id=second.session_id), timeout=50)


@pytest.mark.parametrize(
    ("request_fields", "status", "text"),
    [
        ({"runtime_class": "sparc"}, Status.INVALID_ARGUMENT, "unknown runtime"),
        ({"runtime_class": "kata"}, Status.FAILED_PRECONDITION, "not part of this release"),
        ({"session_id": "Not A Name"}, Status.INVALID_ARGUMENT, "not a valid name"),
        ({"tenant_id": "../x"}, Status.INVALID_ARGUMENT, "not a valid name"),
        ({"env": {"A=B": "1"}}, Status.INVALID_ARGUMENT, "malformed"),
        ({"env": {"A": "x" * 4097}}, Status.INVALID_ARGUMENT, "4097 bytes"),
        ({"env": {"A" * 257: "x"}}, Status.INVALID_ARGUMENT, "257 bytes"),
        ({"env": {f"A{n}": "x" * 4000 for n in range(9)}}, Status.INVALID_ARGUMENT, "is larger"),
        ({"env": {f"A{n}": "" for n in range(65)}}, Status.INVALID_ARGUMENT, "65 environment"),
        ({"env": {"A": "x\0"}}, Status.INVALID_ARGUMENT, "malformed"),
        ({"allowed_hosts": ["a b"]}, Status.INVALID_ARGUMENT, "'a b' is not a host name"),
        (
            {"secret_refs": [pb.SecretRef(secret_name="s", key="k", env_var="E")]},
            Status.INVALID_ARGUMENT,
            "does not exist",
        ),
    ],
)
def test_a_session_that_cannot_be_is_refused(
    stub: Stub, request_fields: dict[str, Any], status: grpc.StatusCode, text: str
) -> None:
    before = listed(stub, "all")
    request = pb.CreateSessionRequest(**request_fields)
    failed = failing(lambda: stub.CreateSession(request, timeout=20))
    assert failed.status is status
    assert text in failed.details
    assert listed(stub, "all") == before


@pytest.mark.parametrize(
    ("rpc", "request_fields"),
    [
        ("GetSession", {}),
        ("Exec", {"command": "id"}),
        ("ExecStream", {"command": "id"}),
        ("ReadFile", {"path": "x"}),
        ("WriteFile", {"path": "x"}),
        ("ListFiles", {}),
        ("UpdateAllowedHosts", {}),
        ("GetEgress", {}),
    ],
)
def test_an_unknown_session_is_not_found(
    stub: Stub, rpc: str, request_fields: dict[str, str]
) -> None:
    failed = failing(lambda: call(stub, rpc, session_id="nobodys", **request_fields))
    assert (failed.status, failed.code) == (Status.NOT_FOUND, "session_not_found")
    assert "session nobodys not found" in failed.details


def call(stub: Stub, rpc: str, **fields: str) -> object:
    """Any call that takes one message, by its name; a stream is read to its end."""
    method = SERVICE.methods_by_name[rpc]
    request = getattr(pb, method.input_type.name)(**fields)
    answer = getattr(stub, rpc)(request, timeout=20)
    return list(answer) if method.server_streaming else answer


def test_destroying_nothing_and_listing_an_unknown_phase_are_refused(stub: Stub) -> None:
    failed = failing(lambda: stub.DestroySession(pb.DestroySessionRequest(), timeout=20))
    assert failed.status is Status.INVALID_ARGUMENT
    failed = failing(lambda: listed(stub, "Sleeping"))
    assert failed.status is Status.INVALID_ARGUMENT
    assert "Active" in failed.details


def test_the_health_probe_of_k8e_clients_is_understood(stub: Stub) -> None:
    probe = pb.DestroySessionRequest(session_id="healthcheck-probe-noop")
    failed = failing(lambda: stub.DestroySession(probe, timeout=20))
    assert failed.status is Status.NOT_FOUND
    assert "not found" in failed.details


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_full_disk_is_an_exhausted_resource(
    stub: Stub, channel: grpc.Channel, runtime: str
) -> None:
    with Frames(channel) as frames:
        spec = {"runtime": runtime, "limits": {"disk": 8 << 20}}
        frames.ask(1, op="create_session", spec=spec)
        session = frames.result(1)["session"]["session_id"]
    request = pb.WriteFileRequest(session_id=session, path="big", content="x" * (16 << 20))
    failed = failing(lambda: stub.WriteFile(request, timeout=50))
    assert (failed.status, failed.code) == (Status.RESOURCE_EXHAUSTED, "ENOSPC")
    # Nothing half written stays.
    listing = stub.ListFiles(pb.ListFilesRequest(session_id=session), timeout=20).files
    assert [item.path for item in listing if "big" in item.path] == []
    stub.DestroySession(pb.DestroySessionRequest(session_id=session), timeout=50)


def test_a_sandbox_that_dies_ends_the_calls_on_it(stub: Stub) -> None:
    made = stub.CreateSession(pb.CreateSessionRequest(runtime_class="container"), timeout=50)
    request = pb.ExecRequest(session_id=made.session_id, command="echo up; sleep 300", timeout=600)
    call = stub.ExecStream(request, timeout=50)
    assert next(call).chunk == "up\n"
    stub.DestroySession(pb.DestroySessionRequest(session_id=made.session_id), timeout=50)
    assert failing(lambda: list(call)).status is Status.ABORTED
