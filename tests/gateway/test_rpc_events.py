"""Events over gRPC, as K8E's clients ask for them."""

from __future__ import annotations

import json

import grpc

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from tests.gateway.serving import failing

Stub = pb_grpc.SandboxServiceStub


def ask(stub: Stub, session: str, limit: int = 0) -> pb.GetEventsResponse:
    return stub.GetEvents(pb.GetEventsRequest(session_id=session, limit=limit), timeout=20)


def test_events_are_lines_of_json_with_their_number(stub: Stub, session: str) -> None:
    stub.Exec(pb.ExecRequest(session_id=session, command="exit 9"), timeout=20)
    stub.WriteFile(pb.WriteFileRequest(session_id=session, path="x", content="ü"), timeout=20)
    told = ask(stub, session)
    assert told.returned == len(told.events) >= 4
    assert not told.truncated
    found = [json.loads(line) for line in told.events]
    assert found[0]["kind"] == "session.created"
    start, end, write = found[-3:]
    assert (start["kind"], start["command"]) == ("exec.started", "exit 9")
    assert (end["exec_id"], end["exit_code"]) == (start["exec_id"], 9)
    assert (write["kind"], write["size"]) == ("file.written", 2)
    assert (ask(stub, session, 1).returned, ask(stub, session, 1).truncated) == (1, True)


def test_a_background_run_is_told_by_its_run_id(stub: Stub, session: str) -> None:
    asked = pb.ExecRequest(session_id=session, command="true", background=True)
    run_id = stub.Exec(asked, timeout=20).run_id
    (start,) = (
        item
        for item in map(json.loads, ask(stub, session).events)
        if item["kind"] == "exec.started" and item["background"]
    )
    assert run_id == f"{session}.{start['exec_id']}"


def test_strangers_and_nonsense_are_refused(stub: Stub, session: str) -> None:
    assert failing(lambda: ask(stub, "nobody-s")).status is grpc.StatusCode.NOT_FOUND
    assert failing(lambda: ask(stub, session, -1)).status is grpc.StatusCode.INVALID_ARGUMENT
    assert failing(lambda: ask(stub, "")).status is grpc.StatusCode.INVALID_ARGUMENT
