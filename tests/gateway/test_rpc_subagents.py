"""Sub-agents and pauses over gRPC, as K8E's clients ask for them."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from tests.gateway import serving
from tests.gateway.serving import failing

Stub = pb_grpc.SandboxServiceStub
Status = grpc.StatusCode


@pytest.fixture(params=serving.RUNTIMES)
def parent(stub: Stub, request: pytest.FixtureRequest) -> Iterator[str]:
    asked = pb.CreateSessionRequest(runtime_class=request.param, tenant_id="family")
    session_id = stub.CreateSession(asked, timeout=30).session_id
    yield session_id
    stub.DestroySession(pb.DestroySessionRequest(session_id=session_id), timeout=30)


def run_subagent(stub: Stub, parent: str, **fields: str) -> str:
    request = pb.RunSubAgentRequest(parent_session_id=parent, **fields)
    return stub.RunSubAgent(request, timeout=30).session_id


def get(stub: Stub, session_id: str) -> pb.GetSessionResponse:
    return stub.GetSession(pb.GetSessionRequest(session_id=session_id), timeout=20)


def run(stub: Stub, session_id: str, command: str) -> pb.ExecResponse:
    return stub.Exec(pb.ExecRequest(session_id=session_id, command=command), timeout=30)


def test_a_subagent_executes_in_the_workspace_of_its_parent(stub: Stub, parent: str) -> None:
    stub.WriteFile(pb.WriteFileRequest(session_id=parent, path="file", content="x"), timeout=20)
    child = run_subagent(stub, parent, agent_type="a", workspace_path="/workspace/sub")
    told = run(stub, child, "pwd; cat ../file")
    assert (told.stdout, told.exit_code) == ("/workspace/sub\nx", 0)
    found = get(stub, child)
    assert (found.parent_id, found.tenant_id, found.phase) == (parent, "family", "Active")
    assert found.allowed_hosts == get(stub, parent).allowed_hosts
    assert found.runtime_class == get(stub, parent).runtime_class


def test_what_cannot_be_has_the_status_that_k8e_s_clients_expect(stub: Stub, parent: str) -> None:
    told = failing(lambda: run_subagent(stub, "nothing"))
    assert (told.status, told.code) == (Status.NOT_FOUND, "session_not_found")
    assert "not found" in told.details
    child = run_subagent(stub, parent)
    told = failing(lambda: run_subagent(stub, child))
    assert (told.status, told.code) == (Status.PERMISSION_DENIED, "denied")
    told = failing(lambda: run_subagent(stub, parent, workspace_path="/workspace/../etc"))
    assert (told.status, told.code) == (Status.INVALID_ARGUMENT, "invalid_request")
    assert failing(lambda: run_subagent(stub, "")).status is Status.INVALID_ARGUMENT


def test_a_session_is_paused_and_resumed_with_its_subagents(stub: Stub, parent: str) -> None:
    child = run_subagent(stub, parent)
    paused = pb.PauseSessionRequest(session_id=parent)
    assert stub.PauseSession(paused, timeout=30).ok
    assert {get(stub, name).phase for name in (parent, child)} == {"Paused"}
    for name in (parent, child):
        told = failing(lambda name=name: run(stub, name, "true"))
        assert (told.status, told.code) == (Status.FAILED_PRECONDITION, "session_paused")
        assert "k8e sandbox resume" in told.details
    listed = stub.ListSessions(pb.ListSessionsRequest(phase="Paused"), timeout=20).sessions
    assert {parent, child} <= {item.session_id for item in listed}
    assert {item.phase for item in listed} == {"Paused"}
    listed = stub.ListSessions(pb.ListSessionsRequest(), timeout=20).sessions
    assert not {parent, child} & {item.session_id for item in listed}
    assert stub.ResumeSession(pb.ResumeSessionRequest(session_id=parent), timeout=30).ok
    assert run(stub, child, "echo alive").stdout == "alive\n"


def test_pausing_nothing_is_not_found(stub: Stub) -> None:
    told = failing(lambda: stub.PauseSession(pb.PauseSessionRequest(session_id="x"), timeout=20))
    assert told.status is Status.NOT_FOUND
    told = failing(lambda: stub.ResumeSession(pb.ResumeSessionRequest(session_id="x"), timeout=20))
    assert told.status is Status.NOT_FOUND
