"""What is somebody's is nobody else's: tried in every call, with things that are really there."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Generator, Iterator
from typing import Any

import grpc

from k8e import errors
from k8e._generated import sandbox_pb2 as pb
from k8e.client import requests
from k8e.conformance import calling
from k8e.conformance.behaviours import equal, expect, in_a_room
from k8e.conformance.lab.rooms import Room
from k8e.model import Role

_WORDS: dict[str, Any] = {
    "command": "true",
    "path": "x",
    "action": "x",
    "port": 8000,
    "packages": ["x"],
    "hosts": ["none"],
    "signal": pb.TERMINAL_SIGNAL_KILL,
    "rows": 1,
    "cols": 1,
}
"""What calls need besides the thing that they are about, by the names of their fields."""
_NAMES = ("session_id", "parent_session_id", "run_id", "terminal_id")
"""Fields that say whose it is; a call has one of them, or is one of the others."""
_OTHERS = frozenset(
    "CreateSession ListSessions ListApprovals ApproveAction GetAudit SnapshotGet SnapshotList "
    "SnapshotPut Login GetCACert Run ListTemplates GetTemplate ApplyTemplate DeleteTemplate "
    "VerifyAudit PollRun SetSecret ListSecrets DeleteSecret".split()
)
"""Lists and names, which are tried by themselves, and what is the gateway's and no owner's."""
_OPERATIONS = (
    "get_session destroy_session extend_session pause_session resume_session run_subagent events "
    "confirm_action update_allowed_hosts change_allowed_hosts egress expose unexpose list_exposed "
    "save_snapshot"
).split()
_GUESTS = "exec attach signal read write list stat remove execs processes".split()
"""Operations that a guest answers, if the session is the caller's."""


@contextlib.contextmanager
def _belongings(room: Room, there: grpc.Channel) -> Generator[dict[str, str]]:
    """Things of a session's owner, whom the gateway knows by the uid, by the fields for them."""
    client, session_id, name = room.scene.client, room.session_id, f"s-{secrets.token_hex(6)}"
    asked = pb.CreateTerminalRequest(session_id=session_id, argv=["cat"])
    terminal = calling.answer(there, "CreateTerminal", asked).terminal_id
    context = calling.answer(there, "CreateContext", pb.CreateContextRequest(session_id=session_id))
    run = client.start(session_id, ["sleep", "600"])
    client.save_snapshot(session_id, name)
    client.set_secret(name, "of the owner")
    approval = client.confirm_action(session_id, "something", wait=False)
    try:
        yield {
            "session_id": session_id,
            "parent_session_id": session_id,
            "run_id": run.run_id,
            "terminal_id": terminal,
            "context_id": context.context_id,
            "name": name,
            "secret": name,
            "approval_id": approval.approval_id,
        }
        asked = pb.TerminalForegroundRequest(terminal_id=terminal)
        calling.answer(there, "TerminalForeground", asked)
        asked = pb.ListContextsRequest(session_id=session_id)
        contexts = calling.answer(there, "ListContexts", asked).contexts
        expect(context.context_id in [it.context_id for it in contexts], "the context is gone")
        equal(run.poll().status, "running", "the owner's program")
        equal(client.get_approval(approval.approval_id).status, "pending", "the owner's approval")
        equal(client.get_snapshot(name).name, name, "the owner's snapshot")
    finally:
        client.delete_snapshot(name)
        client.delete_secret(name)
        run.kill()
        calling.answer(there, "TerminalDestroy", pb.TerminalDestroyRequest(terminal_id=terminal))


def _calls(mine: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Every call that is about something of somebody, aimed at what is ``mine``."""
    for method in calling.SERVICE.methods:
        fields = method.input_type.fields_by_name
        if method.name in _OTHERS:
            continue
        given = {name: value for name, value in _WORDS.items() if name in fields}
        given |= {key: mine[key] for key in (*_NAMES, "context_id") if key in fields}
        expect(any(key in given for key in _NAMES), f"{method.name} is about nothing that is known")
        if "code" in fields and "command" not in given:
            given["code"] = b"1" if fields["code"].type == fields["code"].TYPE_BYTES else "1"
        yield method.name, getattr(pb, method.input_type.name)(**given)


@in_a_room("control.other-owner")
def other_owner(room: Room) -> None:
    """What is another one's is not found, in every call and operation, and is in no list."""
    with (
        calling.channel(room) as there,
        calling.key(room) as key,
        _belongings(room, there) as mine,
    ):
        calls = list(_calls(mine))
        expect(len(calls) > 30, f"only {len(calls)} calls are known")
        calls += [("SnapshotGet", pb.SnapshotGetRequest(name=mine["name"]))]
        seen = {name: calling.status(there, name, asked, key) for name, asked in calls}
        equal({n: c for n, c in seen.items() if c != "NOT_FOUND"}, {}, "other answers")
        taking = pb.CreateSessionRequest(session_id=room.session_id, runtime_class=room.runtime)
        equal(calling.status(there, "CreateSession", taking, key), "ALREADY_EXISTS", "its id")
        _lists(there, key, mine)
        _approving(room, there, mine)
        _operations(there, key, mine)
    expect(room.is_alive(), "the session is gone")


def _lists(there: grpc.Channel, key: str, mine: dict[str, str]) -> None:
    """Nothing of it is listed, whether or not one asks for it by name."""

    def listed(name: str, asked: Any) -> Any:
        return calling.answer(there, name, asked, key)

    sessions = listed("ListSessions", pb.ListSessionsRequest(phase="all")).sessions
    equal([it.session_id for it in sessions], [], "sessions that a stranger sees")
    snapshots = listed("SnapshotList", pb.SnapshotListRequest()).names
    equal(list(snapshots), [], "snapshots that a stranger sees")
    polled = listed("PollRun", pb.PollRunRequest(run_id=mine["run_id"]))
    equal((polled.status, polled.stdout), ("not_found", ""), "another one's run")
    secret = pb.DeleteSecretRequest(name=mine["secret"])
    equal(calling.status(there, "DeleteSecret", secret, key), "NOT_FOUND", "another one's secret")
    known = listed("ListSecrets", pb.ListSecretsRequest()).secrets
    equal([it.name for it in known], [], "secrets that a stranger sees")
    # Of another one's session as of one that is not there.
    for session_id in ("", mine["session_id"], "nowhere"):
        asked = pb.ListApprovalsRequest(session_id=session_id)
        equal(list(listed("ListApprovals", asked).approvals), [], "approvals that a stranger sees")
        rows = listed("GetAudit", pb.GetAuditRequest(session_id=session_id)).rows
        told = [row for row in rows if '"principal":"local"' in row]
        equal(told, [], "rows about others that a stranger sees")


def _approving(room: Room, there: grpc.Channel, mine: dict[str, str]) -> None:
    """One who may not decide is not told whether there is something to decide."""
    with calling.key(room, Role.AGENT) as agent:
        seen = {
            calling.status(there, "ApproveAction", pb.ApproveActionRequest(approval_id=it), agent)
            for it in (mine["approval_id"], "ap-nothing")
        }
    equal(len(seen), 1, f"answers about an approval that is there and one that is not: {seen}")
    expect("OK" not in seen, "a stranger decided")


def _operations(there: grpc.Channel, key: str, mine: dict[str, str]) -> None:
    """The stream that clients use has operations of its own."""
    words = {"lifetime": 9.0, "hosts": ["none"], "add": ["none"], "port": 8000, "action": "x"}
    about = {**words, "name": "mine", "parent": mine["session_id"], **mine}
    seen = {op: calling.operation(there, {**about, "op": op}, key) for op in _OPERATIONS}
    whose = {"session": requests.by_id(mine["session_id"]), "path": "x", "argv": ["true"]}
    exec_id = mine["run_id"].partition(".")[2]
    guests = {
        op: calling.operation(there, {**whose, "id": exec_id, "op": op}, key) for op in _GUESTS
    }
    others = {op: code for op, code in (seen | guests).items() if not code.endswith("_not_found")}
    equal(others, {}, "answers of operations")
    for op in ("get_snapshot", "delete_snapshot"):
        code = calling.operation(there, {"op": op, "name": mine["name"]}, key)
        equal(code, errors.SnapshotNotFound.code, f"{op} of another one's")
