"""Callers of the gateway: authentication, roles, and owners of sessions."""

from __future__ import annotations

import contextlib
import http.client
import secrets
from collections.abc import Generator, Iterator
from typing import Any

import grpc

from k8e import errors
from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from k8e.client import requests
from k8e.conformance.behaviour import BrokenPromise, equal, expect, in_a_room
from k8e.conformance.lab.rooms import Room
from k8e.gateway.operations import ADMIN
from k8e.gateway.rpc.service import RPCS
from k8e.gateway.service import OPERATIONS
from k8e.guest import wire
from k8e.model import Role

SERVICE = pb.DESCRIPTOR.services_by_name["SandboxService"]
CALL_SECONDS = 40.0
OK = "OK"


class Failed(BrokenPromise):
    """A call that did not succeed."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(f"{text} ({status})")
        self.status = status


@contextlib.contextmanager
def open_channel(room: Room) -> Generator[grpc.Channel]:
    """A connection to the gateway without credentials."""
    place = room.scene.place
    place.wait_for_grpc()
    trusted = (place.data / "tls" / "ca.crt").read_bytes()
    with grpc.secure_channel(
        place.environ["K8E_LISTEN"], grpc.ssl_channel_credentials(trusted)
    ) as made:
        yield made


@contextlib.contextmanager
def new_key(room: Room, *roles: str) -> Generator[str]:
    """A key of another caller, with these roles."""
    name = f"somebody-{secrets.token_hex(4)}"
    flags = [word for role in roles for word in ("--role", role)]
    made = room.scene.place.json("sandbox", "api-key", "create", name, *flags)
    try:
        yield made["key"]
    finally:
        room.scene.place.json("sandbox", "api-key", "delete", name)


def shown(secret: str) -> tuple[tuple[str, str], ...]:
    """The headers that carry a key."""
    return (("authorization", f"Bearer {secret}"),)


def call_answer(there: grpc.Channel, name: str, asked: Any, secret: str = "") -> Any:
    """The answer of a call that must succeed; without a key the caller is the gateway's user."""
    stub, metadata = pb_grpc.SandboxServiceStub(there), shown(secret) if secret else ()
    try:
        found = getattr(stub, name)(asked, metadata=metadata, timeout=CALL_SECONDS)
        return list(found) if SERVICE.methods_by_name[name].server_streaming else found
    except grpc.RpcError as error:
        failed: Any = error
        raise Failed(failed.code().name, f"{name}: {failed.details()}") from None


def call_status(there: grpc.Channel, name: str, asked: Any, secret: str) -> str:
    """The status of a call; OK if it succeeds."""
    try:
        call_answer(there, name, asked, secret or " ")  # an empty key is shown too
    except Failed as failed:
        return failed.status
    return OK


def call_operation(there: grpc.Channel, call: dict[str, Any], secret: str) -> str:
    """The code of the error of an operation on the stream ``Run``; OK if it succeeds."""
    stub = pb_grpc.SandboxServiceStub(there)
    asked = iter([pb.RunFrame(kind=wire.CALL, channel=1, body=wire.pack(call))])
    for frame in stub.Run(asked, metadata=shown(secret), timeout=CALL_SECONDS):
        if frame.kind == wire.ERROR:
            return str(wire.unpack_dict(frame.body).get("code"))
        if frame.kind == wire.RESULT:
            return OK
    return "nothing"


WRONG = "k8e-" + "0" * 64
REFUSED = ("UNAUTHENTICATED", "RESOURCE_EXHAUSTED")
"""Ways to be refused: at first, and after many refusals of the same address."""
NO_TOKEN = (401, 429)
"""The same by HTTP."""


@in_a_room("control.wrong-key")
def wrong_key(room: Room) -> None:
    """A wrong key, or one that was deleted, is refused at once, though the caller is local."""
    asked = pb.ListSessionsRequest()
    with open_channel(room) as channel:
        for key in (WRONG, "", "x" * 5000, "k8e-", WRONG[:-1]):
            code = call_status(channel, "ListSessions", asked, key)
            expect(code in REFUSED, f"{key[:70]!r} is answered by {code}")
        with new_key(room) as key:
            equal(call_status(channel, "ListSessions", asked, key), "OK", "a right key")
        code = call_status(channel, "ListSessions", asked, key)
        expect(code in REFUSED, f"a deleted key is answered by {code}")


@in_a_room("control.http")
def http_endpoint(room: Room) -> None:
    """The gateway's HTTP endpoint refuses a missing token, foreign pages and foreign names."""
    address = str(room.scene.place.json("status")["http"])
    host, _, port = address.removeprefix("http://").partition(":")

    def ask(path: str, **headers: str) -> int:
        connection = http.client.HTTPConnection(host, int(port), timeout=CALL_SECONDS)
        try:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request("GET", path, headers=given)
            return connection.getresponse().status
        finally:
            connection.close()

    with new_key(room) as key:
        for path in ("/healthz", "/metrics", "/mcp", "/", "/nothing"):
            expect(ask(path) in NO_TOKEN, f"{path} is answered without a token")
            code = ask(path, Authorization=f"Bearer {WRONG}")
            expect(code in NO_TOKEN, f"{path} with a wrong key is answered by {code}")
        good = {"Authorization": f"Bearer {key}"}
        equal(ask("/healthz", **good), 200, "a right key")
        equal(ask("/metrics", **good), 403, "metrics for an agent")
        equal(ask("/healthz", Host="rebound.example", **good), 421, "a rebound name")
        for name, value in (("Origin", "https://evil.example"), ("Sec-Fetch-Site", "cross-site")):
            equal(ask("/healthz", **{name: value}, **good), 403, f"a page with {name}: {value}")
    expect(ask("/healthz", **good) in NO_TOKEN, "a deleted key is let in")


@in_a_room("control.roles")
def roles(room: Room) -> None:
    """An agent's key neither manages the gateway nor decides on approvals, its own included."""
    client = room.scene.client
    asked = client.confirm_action(room.session_id, "delete everything", wait=False)
    decision = pb.ApproveActionRequest(approval_id=asked.approval_id, approved=True)
    with open_channel(room) as channel, new_key(room, "agent") as key:
        code = call_status(channel, "ApproveAction", decision, key)
        expect(code in ("PERMISSION_DENIED", "NOT_FOUND"), f"an agent decides: {code}")
        _no_management(channel, key)
    equal(client.get_approval(asked.approval_id).status, "pending", "the approval")
    with open_channel(room) as channel, new_key(room, "approver") as key:
        equal(call_status(channel, "ApproveAction", decision, key), "OK", "an approver's word")
        asked_run = pb.ExecRequest(session_id=room.session_id, command="true")
        expect(call_status(channel, "Exec", asked_run, key) != "OK", "an approver runs programs")
        _no_management(channel, key)
    expect(room.is_alive(), "the gateway or the session is gone")


def _no_management(channel: grpc.Channel, key: str) -> None:
    """Every call and operation that only an admin may use is denied to this key."""
    methods = [name for name, item in RPCS.items() if item.declared(OPERATIONS).roles == ADMIN]
    expect(len(methods) >= 3, f"only {methods} are calls of admins")
    for name in methods:
        asked = getattr(pb, SERVICE.methods_by_name[name].input_type.name)()
        equal(call_status(channel, name, asked, key), "PERMISSION_DENIED", f"{name} by an agent")
    operations = [name for name, item in OPERATIONS.items() if item.roles == ADMIN]
    expect({"create_api_key", "stop", "pull_image"} <= set(operations), f"admins' are {operations}")
    for name in operations:
        code = call_operation(channel, {"op": name, "name": "x", "roles": ["admin"]}, key)
        equal(code, errors.Denied.code, f"{name} by one who is no admin")


@in_a_room("control.approvals")
def approvals(room: Room) -> None:
    """An approval is for one action of one session, once; the text shown is what was asked."""
    client, action = room.scene.client, "delete \u202e/workspace\x1b[1A"
    asked = client.confirm_action(room.session_id, action, wait=False)
    equal(client.get_approval(asked.approval_id).action, action, "the text that is shown")
    client.approve_action(asked.approval_id)
    with room.beside() as other:
        for session_id, text in ((room.session_id, "anything"), (other.session_id, action)):
            try:
                client.confirm_action(session_id, text, approval_id=asked.approval_id)
            except errors.K8eError:
                continue
            raise BrokenPromise(f"a yes to {action!r} was one to {text!r} in {session_id}")
    used = client.confirm_action(room.session_id, action, approval_id=asked.approval_id)
    expect(used.approved, "what was approved is refused")
    try:
        client.confirm_action(room.session_id, action, approval_id=asked.approval_id)
    except errors.Conflict:
        return
    raise BrokenPromise("an approval was used twice")


@in_a_room("control.idempotent-create")
def idempotent_create(room: Room) -> None:
    """Creating twice under one request id gives one session only if everything is the same."""
    client, request = room.scene.client, f"once-{secrets.token_hex(6)}"
    first = client.create_session(room.runtime, ["web.test"], request_id=request)
    try:
        again = client.create_session(room.runtime, ["web.test"], request_id=request)
        equal(again, first, "the second session")
        others: list[dict[str, Any]] = [
            {"lifetime": 5.0},
            {"env": {"A": "1"}},
            {"limits": {"memory": "64M"}},
        ]
        for change in others:
            _conflict(room, ["web.test"], request, **change)
        _conflict(room, ["open"], request)
    finally:
        client.destroy_session(first)


def _conflict(room: Room, words: list[str], request: str, **change: Any) -> None:
    try:
        room.scene.client.create_session(room.runtime, words, request_id=request, **change)
    except errors.Conflict:
        return
    raise BrokenPromise(f"another session than the one asked for was returned: {words} {change}")


@in_a_room("control.terminal-escapes")
def terminal_escapes(room: Room) -> None:
    """What a sandbox names or says reaches a terminal by no command as an escape sequence."""
    script = (
        "import os\n"
        "for name in ('a\\x1b]0;t\\x07', 'b\\x9b2J', 'c\\u202etxt', 'd\\x7f\\r\\n', 'e\\x85'):\n"
        "    open('/workspace/evil/' + name, 'w').close()"
    )
    client, place = room.scene.client, room.scene.place
    client.exec(room.session_id, ["mkdir", "-p", "/workspace/evil"])
    equal(client.exec(room.session_id, ["python3", "-c", script]).exit_code, 0, "making names")
    run = client.start(room.session_id, ["sh", "-c", "sleep 60 # \x1b[2J \x9b1m \x7f"])
    commands = (
        ("list", room.session_id),
        ("read", room.session_id, "evil/no\x1b[2J\x9b1m"),
        ("ps", room.session_id),
        ("events", room.session_id),
    )
    for command in commands:
        done = place.cli("sandbox", *command)
        text = (done.stdout + done.stderr).decode("utf-8", "replace")
        acting = sorted({char for char in text if not char.isprintable()} - set("\n\t"))
        equal(acting, [], f"characters that act on a terminal, by k8e sandbox {command[0]}")
    run.kill()
    client.exec(room.session_id, ["rm", "-rf", "/workspace/evil"])


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
"""Calls for lists and names, which have tests of their own, and calls without an owner."""
_OPERATIONS = (
    "get_session destroy_session extend_session pause_session resume_session run_subagent events "
    "confirm_action update_allowed_hosts change_allowed_hosts egress expose unexpose list_exposed "
    "save_snapshot"
).split()
_GUESTS = "exec attach signal read write list stat remove execs processes".split()
"""Operations that a guest answers, if the session is the caller's."""


@contextlib.contextmanager
def _belongings(room: Room, there: grpc.Channel) -> Generator[dict[str, str]]:
    """Objects of one owner, known to the gateway by the uid, by the fields that name them."""
    client, session_id, name = room.scene.client, room.session_id, f"s-{secrets.token_hex(6)}"
    asked = pb.CreateTerminalRequest(session_id=session_id, argv=["cat"])
    terminal = call_answer(there, "CreateTerminal", asked).terminal_id
    context = call_answer(there, "CreateContext", pb.CreateContextRequest(session_id=session_id))
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
        call_answer(there, "TerminalForeground", asked)
        asked = pb.ListContextsRequest(session_id=session_id)
        contexts = call_answer(there, "ListContexts", asked).contexts
        expect(context.context_id in [it.context_id for it in contexts], "the context is gone")
        equal(run.poll().status, "running", "the owner's program")
        equal(client.get_approval(approval.approval_id).status, "pending", "the owner's approval")
        equal(client.get_snapshot(name).name, name, "the owner's snapshot")
    finally:
        client.delete_snapshot(name)
        client.delete_secret(name)
        run.kill()
        call_answer(there, "TerminalDestroy", pb.TerminalDestroyRequest(terminal_id=terminal))


def _calls(mine: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Every call that names an owner's object, aimed at the object of ``mine``."""
    for method in SERVICE.methods:
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
    """Objects of another owner are not found by any call or operation, and are in no list."""
    with (
        open_channel(room) as there,
        new_key(room) as key,
        _belongings(room, there) as mine,
    ):
        calls = list(_calls(mine))
        expect(len(calls) > 30, f"only {len(calls)} calls are known")
        calls += [("SnapshotGet", pb.SnapshotGetRequest(name=mine["name"]))]
        seen = {name: call_status(there, name, asked, key) for name, asked in calls}
        equal({n: c for n, c in seen.items() if c != "NOT_FOUND"}, {}, "other answers")
        taking = pb.CreateSessionRequest(session_id=room.session_id, runtime_class=room.runtime)
        equal(call_status(there, "CreateSession", taking, key), "ALREADY_EXISTS", "its id")
        _lists(there, key, mine)
        _approving(room, there, mine)
        _operations(there, key, mine)
    expect(room.is_alive(), "the session is gone")


def _lists(there: grpc.Channel, key: str, mine: dict[str, str]) -> None:
    """Check that lists show none of it, whether or not the request names it."""

    def listed(name: str, asked: Any) -> Any:
        return call_answer(there, name, asked, key)

    sessions = listed("ListSessions", pb.ListSessionsRequest(phase="all")).sessions
    equal([it.session_id for it in sessions], [], "sessions that a stranger sees")
    snapshots = listed("SnapshotList", pb.SnapshotListRequest()).names
    equal(list(snapshots), [], "snapshots that a stranger sees")
    polled = listed("PollRun", pb.PollRunRequest(run_id=mine["run_id"]))
    equal((polled.status, polled.stdout), ("not_found", ""), "another one's run")
    secret = pb.DeleteSecretRequest(name=mine["secret"])
    equal(call_status(there, "DeleteSecret", secret, key), "NOT_FOUND", "another one's secret")
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
    """A caller who may not decide cannot learn whether there is anything to decide."""
    with new_key(room, Role.AGENT) as agent:
        seen = {
            call_status(there, "ApproveAction", pb.ApproveActionRequest(approval_id=it), agent)
            for it in (mine["approval_id"], "ap-nothing")
        }
    equal(len(seen), 1, f"answers about an approval that is there and one that is not: {seen}")
    expect("OK" not in seen, "a stranger decided")


def _operations(there: grpc.Channel, key: str, mine: dict[str, str]) -> None:
    """Check the operations of the stream that clients use."""
    words = {"lifetime": 9.0, "hosts": ["none"], "add": ["none"], "port": 8000, "action": "x"}
    about = {**words, "name": "mine", "parent": mine["session_id"], **mine}
    seen = {op: call_operation(there, {**about, "op": op}, key) for op in _OPERATIONS}
    whose = {"session": requests.by_id(mine["session_id"]), "path": "x", "argv": ["true"]}
    exec_id = mine["run_id"].partition(".")[2]
    guests = {op: call_operation(there, {**whose, "id": exec_id, "op": op}, key) for op in _GUESTS}
    others = {op: code for op, code in (seen | guests).items() if not code.endswith("_not_found")}
    equal(others, {}, "answers of operations")
    for op in ("get_snapshot", "delete_snapshot"):
        code = call_operation(there, {"op": op, "name": mine["name"]}, key)
        equal(code, errors.SnapshotNotFound.code, f"{op} of another one's")
