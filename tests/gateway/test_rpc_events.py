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
    *_, start = (
        item
        for item in map(json.loads, ask(stub, session).events)
        if item["kind"] == "exec.started" and item["background"]
    )
    assert run_id == f"{session}.{start['exec_id']}"


def test_strangers_and_nonsense_are_refused(stub: Stub, session: str) -> None:
    assert failing(lambda: ask(stub, "nobody-s")).status is grpc.StatusCode.NOT_FOUND
    assert failing(lambda: ask(stub, session, -1)).status is grpc.StatusCode.INVALID_ARGUMENT
    nonsense = pb.GetEventsRequest(cursor="yesterday")
    failed = failing(lambda: stub.GetEvents(nonsense, timeout=20))
    assert failed.status is grpc.StatusCode.INVALID_ARGUMENT


def test_without_a_session_the_caller_s_events_of_all_are_told_in_pages(
    stub: Stub, session: str
) -> None:
    made = stub.CreateSession(pb.CreateSessionRequest(runtime_class="container"), timeout=50)
    stub.Exec(pb.ExecRequest(session_id=session, command="echo 1"), timeout=20)
    stub.Exec(pb.ExecRequest(session_id=made.session_id, command="echo 2"), timeout=20)
    stub.Exec(pb.ExecRequest(session_id=session, command="echo 3"), timeout=20)
    stub.DestroySession(pb.DestroySessionRequest(session_id=made.session_id), timeout=50)
    ours = (session, made.session_id)
    told = stub.GetEvents(pb.GetEventsRequest(limit=10_000), timeout=20)
    assert (told.returned, told.truncated, told.cursor) == (len(told.events), False, "")
    every = [json.loads(line) for line in told.events]
    assert [item["at"] for item in every] == sorted(item["at"] for item in every)
    commands = [item.get("command") for item in every if item["session_id"] in ours]
    assert [text for text in commands if text][-3:] == ["echo 1", "echo 2", "echo 3"]
    assert every[-1]["kind"] == "session.ended"

    pages: list[list[str]] = []
    cursor = ""
    while not pages or cursor:
        asked = pb.GetEventsRequest(limit=3, cursor=cursor)
        page = stub.GetEvents(asked, timeout=20)
        assert page.truncated == bool(page.cursor)
        pages.insert(0, list(page.events))
        cursor = page.cursor
    assert [line for page in pages for line in page] == list(told.events)
