"""Whoever calls learns nothing of others' things, and may do what their roles say: every call.

The calls come from the service's description and from the gateway itself, the rows from
``access.py``; what is in one and not in the other fails here.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from k8e._generated import sandbox_pb2 as pb
from k8e.gateway.service import OPERATIONS
from k8e.guest import wire
from k8e.model import Role
from k8e.sessions import operations
from tests.gateway import access
from tests.gateway.access import Kind, Row, Things
from tests.gateway.devices import REFUSED, WRONG, Metadata, Stub, ask, bearer, new_key
from tests.gateway.serving import Frames, Running, failing

SERVICE = pb.DESCRIPTOR.services_by_name["SandboxService"]
Status = grpc.StatusCode
SECRET = "the owner's action"


class Told(NamedTuple):
    """How a call was answered, the same for gRPC and for frames."""

    failed: bool
    status: str
    """The code of the error; and of gRPC the status."""
    text: str
    """What was said; for an answer, all of it."""


Caller = Callable[[str, dict[str, Any]], Told]


def rpc(stub: Stub, metadata: Metadata, name: str, asked: dict[str, Any]) -> Told:
    """One call by gRPC, to its end."""
    method = SERVICE.methods_by_name[name]
    message = getattr(pb, method.input_type.name)(**asked)
    call = getattr(stub, name)
    told: list[Any] = []
    streams = method.client_streaming, method.server_streaming

    def work() -> object:
        answer = call(iter([message]) if streams[0] else message, metadata=metadata, timeout=30)
        told.extend(answer if streams[1] else [answer])
        raise StopIteration

    try:
        found = failing(work)
    except StopIteration:
        return Told(failed=False, status="", text=repr(told))
    return Told(failed=True, status=f"{found.status.name} {found.code}", text=found.details)


class Frame:
    """A conversation in which each call has a channel of its own."""

    def __init__(self, ask: Callable[[int, bytes], tuple[int, bytes]]) -> None:
        self._ask = ask
        self._channels = itertools.count(1)

    def __call__(self, name: str, asked: dict[str, Any]) -> Told:
        kind, body = self._ask(next(self._channels), wire.pack({"op": name, **asked}))
        told = wire.unpack_dict(body)
        if kind != wire.ERROR:
            return Told(failed=False, status="", text=repr(told))
        hint = told.get("hint") or ""
        return Told(failed=True, status=str(told["code"]), text=f"{told['message']} ({hint})")


def by_run(frames: Frames) -> Frame:
    def ask(channel: int, body: bytes) -> tuple[int, bytes]:
        frames.send(wire.CALL, channel, body)
        while True:
            found = frames.receive()
            if found.channel == channel and found.kind in (wire.RESULT, wire.ERROR):
                return found.kind, found.body

    return Frame(ask)


def by_socket(sock: socket.socket) -> Frame:
    """The gateway's own unix socket, as the local user."""
    splitter = wire.Splitter(wire.MAX_REQUEST)

    def ask(channel: int, body: bytes) -> tuple[int, bytes]:
        sock.sendall(wire.frame(wire.CALL, channel, body))
        while True:
            for kind, of, told in splitter.feed(sock.recv(1 << 16)):
                if of == channel and kind in (wire.RESULT, wire.ERROR):
                    return kind, told

    return Frame(ask)


# Who is there.


@pytest.fixture(scope="module")
def owner(running: Running) -> Metadata:
    return new_key(running, "owner")


@pytest.fixture(scope="module")
def things(running: Running, stub: Stub, owner: Metadata) -> Iterator[Things]:
    """One of everything that somebody can have."""
    call: dict[str, Any] = {"metadata": owner, "timeout": 50}
    session = stub.CreateSession(
        pb.CreateSessionRequest(runtime_class="container"), **call
    ).session_id
    named: dict[str, Any] = {"session_id": session}
    stub.WriteFile(pb.WriteFileRequest(path="kept", content="mine", **named), **call)
    run = stub.Exec(pb.ExecRequest(command="sleep 300", background=True, **named), **call).run_id
    terminal = stub.CreateTerminal(
        pb.CreateTerminalRequest(argv=["cat"], rows=24, cols=80, **named), **call
    ).terminal_id
    context = stub.CreateContext(pb.CreateContextRequest(**named), **call).context_id
    stub.ExposeService(pb.ExposeServiceRequest(port=Things.port, **named), **call)
    stub.SnapshotPut(pb.SnapshotPutRequest(name="treasure", layers=["sha256:mine"]), **call)
    for tenant in ("default", "other"):
        kept = {"name": Things.secret, "value": SECRET, "tenant": tenant}
        ask(running, owner, op="set_secret", **kept)
    asked = ask(running, owner, op="confirm_action", session_id=session, action=SECRET)
    found = Things(
        session, run, terminal, context, asked["approval_id"], "treasure", run.partition(".")[2]
    )
    before = possessions(running, stub, owner, found)
    yield found
    assert possessions(running, stub, owner, found) == before, "somebody changed something"
    stub.DestroySession(pb.DestroySessionRequest(session_id=session), **call)


def possessions(running: Running, stub: Stub, owner: Metadata, of: Things) -> list[object]:
    """What the owner sees of their things."""
    call: dict[str, Any] = {"metadata": owner, "timeout": 50}
    named: dict[str, Any] = {"session_id": of.session}
    listed = stub.ListSessions(pb.ListSessionsRequest(), **call).sessions
    return [
        [(item.session_id, item.phase, list(item.allowed_hosts)) for item in listed],
        ask(running, owner, op="get_session", **named)["session"]["expires_at"],
        stub.ReadFile(pb.ReadFileRequest(path="kept", **named), **call).content,
        sorted(item.path for item in stub.ListFiles(pb.ListFilesRequest(**named), **call).files),
        stub.PollRun(pb.PollRunRequest(run_id=of.run), **call).status,
        stub.TerminalForeground(
            pb.TerminalForegroundRequest(terminal_id=of.terminal), **call
        ).DESCRIPTOR.name,  # it is there
        [
            (item.context_id, item.execution_count)
            for item in stub.ListContexts(pb.ListContextsRequest(**named), **call).contexts
        ],
        [item.url for item in stub.ListExposed(pb.ListExposedRequest(**named), **call).services],
        list(stub.SnapshotGet(pb.SnapshotGetRequest(name=of.snapshot), **call).layers),
        ask(running, owner, op="get_approval", approval_id=of.approval)["status"],
        ask(running, owner, op="list_secrets")["secrets"],
        len(stub.GetProcesses(pb.GetProcessesRequest(**named), **call).processes),
    ]


@pytest.fixture(scope="module")
def keyed(running: Running) -> dict[str, Metadata]:
    """A key for each role, one with all of them, and the local user, who needs none."""
    found = {str(role): new_key(running, f"only-{role}", role) for role in Role}
    return {**found, "all": new_key(running, "all-roles", *Role), "local": ()}


@pytest.fixture(scope="module")
def by_grpc(stub: Stub, keyed: dict[str, Metadata]) -> dict[str, Caller]:
    return {name: functools.partial(rpc, stub, metadata) for name, metadata in keyed.items()}


@pytest.fixture(scope="module")
def by_frames(
    running: Running, channel: grpc.Channel, keyed: dict[str, Metadata]
) -> Iterator[dict[str, Caller]]:
    frames = {name: Frames(channel, keyed[name]) for name in keyed if name != "local"}
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(30)
        sock.connect(str(running.folder / "r/gateway.sock"))
        yield {**{name: by_run(item) for name, item in frames.items()}, "local": by_socket(sock)}
    for item in frames.values():
        item.close()
        item.call.cancel()


ROLES_OF = {"all": set(Role), "local": {"agent", "admin"}}


def may(caller: str, row: Row) -> bool:
    return bool(ROLES_OF.get(caller, {caller}) & set(row.roles.split()))


# The tables.


def test_every_rpc_has_a_row() -> None:
    assert {method.name for method in SERVICE.methods} == set(access.RPCS)


def test_every_operation_of_the_gateway_has_a_row() -> None:
    assert set(OPERATIONS) == set(access.OPERATIONS)


def test_every_operation_of_a_guest_has_a_row() -> None:
    assert set(access.GUEST) == operations.OPERATIONS


def test_whatever_names_a_thing_has_a_row_that_tries_to_reach_another_s() -> None:
    """A request with a field that can hold somebody's id is no row without one."""
    names = {"session_id", "run_id", "terminal_id", "parent_session_id", "approval_id"}
    chosen = {"CreateSession"}  # the id of a new one, which is refused where it is taken
    for method in SERVICE.methods:
        taken = names & set(method.input_type.fields_by_name)
        tried = {key for row in access.RPCS[method.name] for key in row.ask(_SOME)}
        assert not taken - tried or method.name in chosen, (method.name, taken - tried)


_SOME = Things("s", "s.r", "s.t", "c", "a", "n", "r")


# Strangers.


def check_stranger(caller: str, call: Caller, name: str, row: Row, of: Things) -> None:
    """What a caller who may make this call gets of an owner's things."""
    sees_all = row.sees_all in ROLES_OF.get(caller, {caller})
    if not may(caller, row) or row.kind is Kind.OWN or sees_all:
        return
    told = call(name, row.ask(of))
    if row.kind is Kind.LISTED:
        assert not told.failed, (caller, told)
        assert not [item for item in (*of.names(), SECRET) if item in told.text], (caller, told)
        return
    pretended = of.pretended()
    nobody = call(name, row.ask(pretended))
    assert told.failed is (row.kind is Kind.HIDDEN), (caller, told)
    assert "not_found" in (told.status if told.failed else told.text), (caller, told)
    assert (told.status, of.hide(told.text)) == (nobody.status, pretended.hide(nobody.text)), caller
    assert SECRET not in told.text


@pytest.mark.parametrize("name", access.RPCS)
def test_a_stranger_reaches_nothing_by_rpc(
    by_grpc: dict[str, Caller], things: Things, name: str
) -> None:
    for (caller, call), row in itertools.product(by_grpc.items(), access.RPCS[name]):
        check_stranger(caller, call, name, row, things)


@pytest.mark.parametrize("name", access.OPERATIONS)
def test_a_stranger_reaches_nothing_by_frames(
    by_frames: dict[str, Caller], things: Things, name: str
) -> None:
    for (caller, call), row in itertools.product(by_frames.items(), access.OPERATIONS[name]):
        check_stranger(caller, call, name, row, things)


@pytest.mark.parametrize("name", access.GUEST)
def test_a_stranger_reaches_no_guest(
    by_frames: dict[str, Caller], things: Things, name: str
) -> None:
    for (caller, call), row in itertools.product(by_frames.items(), access.GUEST[name]):
        check_stranger(caller, call, name, row, things)


# Roles.


def check_roles(caller: str, call: Caller, name: str, row: Row, of: Things) -> None:
    """Who lacks the role is refused, and is not even told whether there is such a thing."""
    if may(caller, row) or not row.roles:
        return
    told = call(name, row.ask(of))
    assert told.failed, (caller, told)
    assert told.status in ("denied", "PERMISSION_DENIED denied"), (caller, told)
    assert call(name, row.ask(of.pretended())) == told, caller


@pytest.mark.parametrize("name", access.RPCS)
def test_who_lacks_the_role_is_refused_by_rpc(
    by_grpc: dict[str, Caller], things: Things, name: str
) -> None:
    for (caller, call), row in itertools.product(by_grpc.items(), access.RPCS[name]):
        check_roles(caller, call, name, row, things)


@pytest.mark.parametrize("name", [*access.OPERATIONS, *access.GUEST])
def test_who_lacks_the_role_is_refused_by_frames(
    by_frames: dict[str, Caller], things: Things, name: str
) -> None:
    rows = access.OPERATIONS.get(name) or access.GUEST[name]
    for (caller, call), row in itertools.product(by_frames.items(), rows):
        check_roles(caller, call, name, row, things)


def test_each_role_may_do_what_its_rows_say(by_frames: dict[str, Caller]) -> None:
    """The other half: what is allowed is not refused."""
    harmless = [name for name, rows in access.OPERATIONS.items() if rows[0].kind is Kind.LISTED]
    for name, role in itertools.product(harmless, Role):
        row = access.OPERATIONS[name][0]
        if may(role, row):
            assert by_frames[role](name, row.ask(_SOME)).status != "denied", (name, role)


@pytest.mark.parametrize("name", access.RPCS)
def test_who_is_nobody_gets_nothing(stub: Stub, things: Things, name: str) -> None:
    told = rpc(stub, bearer(WRONG), name, access.RPCS[name][0].ask(things))
    if not access.RPCS[name][0].roles:
        assert not told.failed
        return
    assert told.failed
    assert told.status.partition(" ")[0] in [item.name for item in REFUSED]
    assert not [item for item in things.names() if item in told.text]


def test_a_key_of_the_same_name_does_not_get_what_the_one_before_had(
    running: Running, stub: Stub
) -> None:
    first = new_key(running, "reused")
    call: dict[str, Any] = {"metadata": first, "timeout": 50}
    made = stub.CreateSession(pb.CreateSessionRequest(runtime_class="container"), **call)
    stub.SnapshotPut(pb.SnapshotPutRequest(name="old", layers=["x"]), **call)
    stub.SetSecret(pb.SetSecretRequest(name="old", value="x"), **call)
    gone = ask(running, op="delete_api_key", name="reused")
    assert gone == {"name": "reused", "ok": True, "sessions_ended": 1}
    second = new_key(running, "reused")
    assert not ask(running, second, op="list_sessions", ended=True)["sessions"]
    assert not ask(running, second, op="list_snapshots")["snapshots"]
    assert not ask(running, second, op="list_secrets")["secrets"]
    assert rpc(stub, second, "GetSession", {"session_id": made.session_id}).failed
    events = running.folder / "d/events"
    assert "reused" not in json.dumps([str(path) for path in Path(events).rglob("*")])
    ask(running, op="delete_api_key", name="reused")


def test_a_rotated_key_keeps_its_sessions_and_its_old_secret_is_worth_nothing(
    running: Running, stub: Stub
) -> None:
    first = new_key(running, "rotating")
    made = stub.CreateSession(
        pb.CreateSessionRequest(runtime_class="container"), metadata=first, timeout=50
    )
    told = ask(running, op="rotate_api_key", name="rotating", ttl="2h")
    refused = rpc(stub, first, "ListSessions", {}).status.partition(" ")[0]
    assert refused in [item.name for item in REFUSED]
    second = bearer(told["key"])
    listed = stub.ListSessions(pb.ListSessionsRequest(), metadata=second, timeout=30).sessions
    assert [item.session_id for item in listed] == [made.session_id]
    ask(running, op="delete_api_key", name="rotating")


def test_a_key_has_no_more_sessions_and_calls_than_it_may(running: Running, stub: Stub) -> None:
    made = ask(running, op="create_api_key", name="small", max_sessions=1, rate=0.01)
    assert (made["max_sessions"], made["rate"]) == (1, 0.01)
    metadata = bearer(made["key"])
    told = rpc(stub, metadata, "CreateSession", {"runtime_class": "container"})
    assert not told.failed, told
    told = rpc(stub, metadata, "ListSessions", {})
    assert told.status == "RESOURCE_EXHAUSTED limit_exceeded"
    assert "0.01 calls a second" in told.text
    ask(running, op="delete_api_key", name="small")
    made = ask(running, op="create_api_key", name="small", max_sessions=1)
    metadata = bearer(made["key"])
    parent = stub.CreateSession(
        pb.CreateSessionRequest(runtime_class="container"), metadata=metadata, timeout=50
    ).session_id
    for name, asked in (
        ("CreateSession", {"runtime_class": "container"}),
        ("RunSubAgent", {"parent_session_id": parent}),
    ):
        told = rpc(stub, metadata, name, asked)
        assert told.status == "RESOURCE_EXHAUSTED limit_exceeded", told
        assert "--max-sessions" in told.text
    assert ask(running, op="delete_api_key", name="small")["sessions_ended"] == 1


def test_streams_of_calls_are_not_opened_without_end(running: Running, stub: Stub) -> None:
    made = ask(running, op="create_api_key", name="hasty", rate=0.01)

    def open_one() -> None:
        list(stub.Run(iter(()), metadata=bearer(made["key"]), timeout=30))

    with contextlib.suppress(grpc.RpcError):  # who says nothing may be told so
        open_one()
    assert failing(open_one).status is grpc.StatusCode.RESOURCE_EXHAUSTED
    ask(running, op="delete_api_key", name="hasty")
