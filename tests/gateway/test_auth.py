"""Who may call from elsewhere: keys over the real wire, on every kind of call."""

from __future__ import annotations

import sqlite3
import time
from typing import Any

import grpc
import pytest

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from k8e.guest import wire
from tests.gateway.devices import REFUSED, WRONG, Metadata, Stub, ask, bearer, every_kind, new_key
from tests.gateway.serving import Frames, Running, failing

SERVICE = pb.DESCRIPTOR.services_by_name["SandboxService"]
Status = grpc.StatusCode


# Keys.


def test_a_key_uses_sessions_of_its_own(
    running: Running, stub: Stub, agent: Metadata, session_of: dict[str, str]
) -> None:
    mine = pb.ExecRequest(session_id=session_of["agent"], command="echo hi")
    assert stub.Exec(mine, metadata=agent, timeout=50).stdout == "hi\n"
    assert "".join(i.chunk for i in stub.ExecStream(mine, metadata=agent, timeout=50)) == "hi\n"
    told = ask(running, agent, op="status")
    assert (told["caller"], told["roles"]) == ("key:agent", ["agent"])
    x_api_key = (("x-api-key", agent[0][1].removeprefix("Bearer ")),)
    assert ask(running, x_api_key, op="status")["caller"] == "key:agent"
    listed = stub.ListSessions(pb.ListSessionsRequest(phase="all"), metadata=agent, timeout=50)
    assert [item.session_id for item in listed.sessions] == [session_of["agent"]]


@pytest.mark.parametrize(
    "metadata",
    [
        bearer(WRONG),
        bearer(""),
        (("authorization", "Basic cm9vdDpyb290"),),
        (("authorization", WRONG),),
        (("x-api-key", WRONG),),
        (("x-api-key", ""),),
    ],
    ids=["unknown", "empty", "basic", "bare", "x-api-key", "empty-x"],
)
def test_a_wrong_key_is_refused_though_the_uid_would_do(
    running: Running, metadata: Metadata
) -> None:
    with running.channel() as channel:
        for failed in every_kind(channel, metadata):
            assert failed.status in REFUSED
            assert failed.code in ("unauthenticated", "limit_exceeded")
            assert WRONG not in failed.details


def test_a_right_key_works_after_a_flood_of_wrong_ones(running: Running, agent: Metadata) -> None:
    with running.channel() as channel:
        stub = pb_grpc.SandboxServiceStub(channel)
        asked = pb.ListSessionsRequest()
        told = [
            failing(lambda: stub.ListSessions(asked, metadata=bearer(WRONG), timeout=30)).status
            for _ in range(25)
        ]
        assert told[-1] is Status.RESOURCE_EXHAUSTED
        stub.ListSessions(asked, metadata=agent, timeout=30)
        stub.ListSessions(asked, timeout=30)
    assert running.log.read_text().count("this API key is not known here") <= 40


def test_contradicting_keys_are_refused(
    running: Running, stub: Stub, agent: Metadata, other: Metadata
) -> None:
    failed = failing(
        lambda: stub.ListSessions(pb.ListSessionsRequest(), metadata=agent + other, timeout=30)
    )
    assert failed.status in REFUSED


def test_a_deleted_key_is_refused_at_once_and_its_open_calls_end(running: Running) -> None:
    metadata = new_key(running, "shortlived")
    with running.channel() as channel, Frames(channel, metadata) as frames:
        stub = pb_grpc.SandboxServiceStub(channel)
        made = stub.CreateSession(
            pb.CreateSessionRequest(runtime_class="container"), metadata=metadata, timeout=50
        )
        waiting = pb.ExecRequest(session_id=made.session_id, command="echo on; sleep 300")
        stream = stub.ExecStream(waiting, metadata=metadata, timeout=50)
        assert next(stream).chunk == "on\n"
        frames.ask(1, op="status")
        assert frames.result(1)["caller"] == "key:shortlived"
        ask(running, op="delete_api_key", name="shortlived")
        assert failing(lambda: next(stream)).status is Status.UNAUTHENTICATED
        assert failing(frames.receive).status is Status.UNAUTHENTICATED
        for failed in every_kind(channel, metadata):
            assert failed.status in REFUSED
    again = new_key(running, "shortlived")
    ask(running, again, op="destroy_session", session_id=made.session_id)


def test_an_expired_key_is_refused(running: Running) -> None:
    made = new_key(running, "expiring", ttl="1h")
    with sqlite3.connect(running.folder / "d/keys.db") as database:
        database.execute("UPDATE keys SET expires_at=? WHERE name='expiring'", (time.time() - 1,))
    database.close()
    with running.channel() as channel:
        for failed in every_kind(channel, made):
            assert failed.status in REFUSED
    ask(running, op="delete_api_key", name="expiring")


# Whose sessions.


def _takes_a_session() -> list[str]:
    return [
        method.name
        for method in SERVICE.methods
        if not method.client_streaming
        # They choose an id, or filter by one.
        and method.name not in ("CreateSession", "ListApprovals", "GetAudit")
        and {"session_id", "run_id", "parent_session_id"} & set(method.input_type.fields_by_name)
    ]


FIELDS: dict[str, dict[str, Any]] = {
    "Exec": {"command": "true"},
    "ExecStream": {"command": "true"},
    "WriteFile": {"path": "x", "content": "x"},
    "ReadFile": {"path": "x"},
    "PipInstall": {"packages": ["x"]},
    "ConfirmAction": {"action": "x"},
    "UpdateAllowedHosts": {"hosts": ["none"]},
    "ExposeService": {"port": 8000},
    "UnexposeService": {"port": 8000},
    "RemoveContext": {"context_id": "x"},
    "RestartContext": {"context_id": "x"},
    "InterruptContext": {"context_id": "x"},
    "ExecuteCode": {"context_id": "x", "code": b"1"},
}


@pytest.mark.parametrize("rpc", _takes_a_session())
@pytest.mark.parametrize("caller", ["local", "agent"])
def test_another_one_s_session_is_not_found(
    running: Running,
    stub: Stub,
    agent: Metadata,
    session_of: dict[str, str],
    rpc: str,
    caller: str,
) -> None:
    method = SERVICE.methods_by_name[rpc]
    fields = dict(FIELDS.get(rpc, {}))
    names = set(method.input_type.fields_by_name)
    for owner in {"local", "agent", "other"} - {caller}:
        if "run_id" in names:
            fields["run_id"] = f"{session_of[owner]}.abc"
        else:
            key = "session_id" if "session_id" in names else "parent_session_id"
            fields[key] = session_of[owner]
        asked = getattr(pb, method.input_type.name)(**fields)
        metadata = agent if caller == "agent" else ()

        def call(asked: Any = asked, metadata: Metadata = metadata) -> object:
            answer = getattr(stub, rpc)(asked, metadata=metadata, timeout=30)
            return list(answer) if method.server_streaming else answer

        failed = failing(call)
        if failed.status is not Status.UNIMPLEMENTED:
            assert (failed.status, failed.code) == (Status.NOT_FOUND, "session_not_found"), rpc


def test_another_one_s_session_is_not_found_by_frames(
    running: Running, agent: Metadata, session_of: dict[str, str]
) -> None:
    theirs = session_of["other"]
    calls: list[dict[str, Any]] = [
        {"op": name, "session_id": theirs, "lifetime": 5.0, "hosts": [], "action": "x"}
        for name in (
            "get_session destroy_session extend_session update_allowed_hosts egress confirm_action"
        ).split()
    ]
    calls += [
        {"op": "exec", "session": {"id": theirs}, "argv": ["true"]},
        {"op": "read", "session": {"id": theirs}, "path": "x"},
    ]
    with running.channel() as channel, Frames(channel, agent) as frames:
        for number, call in enumerate(calls):
            frames.ask(number, **call)
            frame = frames.receive()
            assert frame.kind == wire.ERROR, call
            assert wire.unpack_dict(frame.body)["code"] == "session_not_found", call


def test_the_same_session_id_cannot_be_taken_over(
    stub: Stub, agent: Metadata, session_of: dict[str, str]
) -> None:
    asked = pb.CreateSessionRequest(session_id=session_of["other"], runtime_class="container")
    failed = failing(lambda: stub.CreateSession(asked, metadata=agent, timeout=50))
    assert failed.status is Status.ALREADY_EXISTS


# Roles.


@pytest.mark.parametrize(
    "op",
    ["stop", "metrics", "create_api_key", "list_api_keys", "delete_api_key", "set_approver"],
)
@pytest.mark.parametrize("role", ["agent", "approver"])
def test_only_an_admin_manages_the_gateway(running: Running, op: str, role: str) -> None:
    metadata = new_key(running, "unprivileged", role)
    try:
        with running.channel() as channel, Frames(channel, metadata) as frames:
            frames.ask(1, op=op, name="mine", secret="a secret of mine")
            frame = frames.receive()
            assert frame.kind == wire.ERROR
            assert wire.unpack_dict(frame.body)["code"] == "denied"
    finally:
        ask(running, op="delete_api_key", name="unprivileged")


def test_an_admin_s_key_manages_keys(running: Running) -> None:
    admin = new_key(running, "chief", "admin")
    made = ask(running, admin, op="create_api_key", name="made", ttl="never")
    assert (made["name"], made["expires_at"], made["ttl_days"]) == ("made", 0, 0)
    assert made["e2b_key"] == "e2b_" + made["key"]
    listed = ask(running, admin, op="list_api_keys")["keys"]
    assert not [item for item in listed if "key" in item or "hash" in item]
    ask(running, admin, op="delete_api_key", name="made")
    assert "k8e_" in ask(running, admin, op="metrics")["text"]
    with running.channel() as channel:
        stub = pb_grpc.SandboxServiceStub(channel)
        failed = failing(
            lambda: stub.CreateSession(pb.CreateSessionRequest(), metadata=admin, timeout=30)
        )
    assert failed.status is Status.PERMISSION_DENIED, "an admin is no agent"


def test_an_approver_decides_for_an_agent_that_cannot(
    running: Running, stub: Stub, agent: Metadata, session_of: dict[str, str]
) -> None:
    asked = ask(
        running, agent, op="confirm_action", session_id=session_of["agent"], action="delete it"
    )
    decision = pb.ApproveActionRequest(approval_id=asked["approval_id"], approved=True)
    failed = failing(lambda: stub.ApproveAction(decision, metadata=agent, timeout=30))
    assert failed.status is Status.PERMISSION_DENIED
    failed = failing(lambda: stub.ApproveAction(decision, timeout=30))
    assert failed.status is Status.NOT_FOUND, "the local user is somebody else"
    boss = new_key(running, "boss", "approver")
    (waiting,) = stub.ListApprovals(pb.ListApprovalsRequest(), metadata=boss, timeout=30).approvals
    assert waiting.action == "delete it"
    decided = stub.ApproveAction(decision, metadata=boss, timeout=30)
    assert decided.advisory, "whoever manages keys could have made this one"
    again = pb.ConfirmActionRequest(
        session_id=session_of["agent"], action="delete it", approval_id=asked["approval_id"]
    )
    assert stub.ConfirmAction(again, metadata=agent, timeout=30).approved
