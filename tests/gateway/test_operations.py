"""Every route of every dialect declares its roles, audit row, limit and session."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable
from typing import Any, cast

import grpc
import pytest

from k8e import errors
from k8e._generated import sandbox_pb2 as pb
from k8e.audit import act
from k8e.audit.act import AuditCaller
from k8e.auth.rates import Rates
from k8e.errors import K8eError
from k8e.gateway import operations, refusals
from k8e.gateway.http.app import JWKS, ROUTES, HttpRoute, route_of
from k8e.gateway.http.mounts import DOCUMENTS, MOUNTS
from k8e.gateway.identity import UnknownPeer
from k8e.gateway.operations import (
    ADMIN,
    AGENT,
    ANY,
    USE_SESSION,
    Limit,
    NoRow,
    OperationDeclaration,
    Operations,
    WritesRow,
    operation,
)
from k8e.gateway.rpc import method
from k8e.gateway.rpc.errors import describe
from k8e.gateway.rpc.service import RPCS
from k8e.gateway.service import OPERATIONS
from k8e.model import Principal, Role
from k8e.rest.routes import ROUTES as REST_ROUTES
from k8e.sessions.exchange import GuestOSError
from k8e.sessions.operations import OPERATIONS as OF_GUESTS

SERVICE = pb.DESCRIPTOR.services_by_name["SandboxService"]
NAMES_SESSION = {"session_id", "parent_session_id", "run_id", "terminal_id"}
CALLER = AuditCaller("key:me", "key")
KINDS = [
    kind
    for kind in (errors.K8eError, *errors.K8eError.__subclasses__())
    if kind.__module__ == errors.__name__  # the others are of one program, and on no wire
]

ROUTES_OF_ALL = {
    "frames to a guest": USE_SESSION,
    **{f"frames {name}": item for name, item in OPERATIONS.items()},
    **{f"grpc {name}": item.declared(OPERATIONS) for name, item in RPCS.items()},
    **{f"http {name}": item.operation for name, item in ROUTES.items()},
    **{
        f"rest {route.name}: {name}": USE_SESSION if name in OF_GUESTS else OPERATIONS[name]
        for route in REST_ROUTES
        for name in route.calls
    },
}
"""Each way to ask for something, with the declaration that holds for it."""
PUBLIC_ROUTES = {
    "grpc GetCACert",
    "frames token_keys",
    f"http {JWKS}",
    *(f"http {path}" for path in DOCUMENTS),
}


@pytest.mark.parametrize("route", ROUTES_OF_ALL)
def test_every_route_declares_roles_row_and_limit(route: str) -> None:
    found = ROUTES_OF_ALL[route]
    assert found.roles <= set(Role)
    assert isinstance(found.audit, WritesRow | NoRow)
    assert isinstance(found.limit, Limit)
    if route in PUBLIC_ROUTES:
        assert found.public
    else:
        assert found.roles
        assert found.limit is not Limit.NONE


def test_no_dialect_has_a_route_that_is_not_declared() -> None:
    assert set(RPCS) == set(SERVICE.methods_by_name)
    assert set(ROUTES) == {"/healthz", "/metrics", JWKS, *DOCUMENTS, *MOUNTS}
    assert {path for path, route in ROUTES.items() if route.mount} == set(MOUNTS)


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/healthz", "/healthz"),
        ("/healthz/", "/healthz"),
        ("/healthz/x", ""),
        ("/things", "/things"),
        ("/things/a/b", "/things"),
        ("/things/own", "/things/own"),
        ("/things/own/c", "/things/own"),
        ("/thingsbelow", ""),
        ("/", ""),
        ("", ""),
        ("//things/a", ""),
    ],
)
def test_a_path_belongs_to_one_route(
    path: str, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("/things", "/things/own"):
        monkeypatch.setitem(ROUTES, name, HttpRoute(USE_SESSION, mount=True, below=True))
    assert route_of(path) == route


def test_an_rpc_that_manages_the_gateway_encodes_one_of_its_operations() -> None:
    encoded = {item.operation for item in RPCS.values() if not item.own}
    assert encoded <= set(OPERATIONS)
    guests = {name for name, item in RPCS.items() if item.own}
    managing = {"Login", "GetCACert", "Run"}
    assert {RPCS[name].declared(OPERATIONS).roles for name in guests - managing} == {AGENT}


@pytest.mark.parametrize("name", RPCS)
def test_every_rpc_says_which_field_names_its_session(name: str) -> None:
    fields = set(SERVICE.methods_by_name[name].input_type.fields_by_name)
    assert len(fields & NAMES_SESSION) <= 1
    assert fields & NAMES_SESSION <= {RPCS[name].session}


def test_a_row_takes_no_argument_that_may_be_a_secret() -> None:
    rows = [item.audit for item in ROUTES_OF_ALL.values() if isinstance(item.audit, WritesRow)]
    assert rows
    taken = {name for row in rows for name in (*row.arguments, *row.answer)}
    assert not taken & {"secret", "value", "key.value", "csr", "env", "e2b_key", "current"}


# Statuses.


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_has_one_status_for_all_wires(kind: type[K8eError]) -> None:
    found = refusals.describe(kind("what happened", hint="what to do"))
    assert found.text == "what happened (what to do)"
    assert found.status == (kind.code, kind.grpc_status, kind.http_status)
    assert describe(kind("x")).status is grpc.StatusCode[kind.grpc_status]
    assert 400 <= found.status.http < 600


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UnknownPeer("who"), ("unauthenticated", "UNAUTHENTICATED", 401)),
        (GuestOSError(OSError(errno.ENOENT, "gone")), ("ENOENT", "NOT_FOUND", 404)),
        (GuestOSError(OSError(errno.ENOSPC, "full")), ("ENOSPC", "RESOURCE_EXHAUSTED", 429)),
        (GuestOSError(OSError(errno.EXDEV, "far")), ("EXDEV", "FAILED_PRECONDITION", 409)),
        (GuestOSError(OSError(9999, "odd")), ("EIO", "FAILED_PRECONDITION", 409)),
        (ZeroDivisionError("/srv/private"), ("internal", "INTERNAL", 500)),
    ],
    ids=["stranger", "missing", "full", "other", "unknown", "bug"],
)
def test_other_failures_have_one_status_too(error: Exception, status: tuple[str, str, int]) -> None:
    found = refusals.describe(error)
    assert found.status == status
    assert "private" not in found.text


# Dispatch.


class Trail:
    """Takes the place of the audit trail, and has no room if it is told so."""

    def __init__(self, *, full: bool = False) -> None:
        self.rows: list[tuple[str, dict[str, Any]]] = []
        self._full = full

    def admit(self) -> None:
        if self._full:
            raise errors.LimitExceeded("disk is full")

    def during(self, action: str, **detail: Any) -> Any:
        return contextlib.nullcontext()

    def record(self, action: str, **detail: Any) -> None:
        self.rows.append((action, detail))


class Capability:
    """Operations of all kinds."""

    def __init__(self) -> None:
        self.acts: list[act.Act | None] = []
        self.go_on = asyncio.Event()

    @operation(roles=AGENT, audit=WritesRow("thing.made", ("of.name",), ("digest",)))
    async def make(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        self.acts.append(act.current())
        return {"digest": "d", "key": "secret"}

    @operation(roles=ADMIN, audit=WritesRow("thing.ended", ("name",), needs_room=False))
    async def end(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        await self.go_on.wait()
        return {}

    @operation(roles=ANY, audit=NoRow.READS, session="spec.session_id")
    async def look(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        self.acts.append(act.current())
        return {}


def made(rate: float = 0, *, full: bool = False) -> tuple[Operations, Capability, Trail]:
    found, capability, trail = (
        Operations(Rates(rate), Rates(rate, 10)),
        Capability(),
        Trail(full=full),
    )
    found.add(capability)
    found.trail = cast("Any", trail)
    return found, capability, trail


def principal(*roles: Role) -> Principal:
    return Principal("key:me", frozenset(roles))


async def test_a_call_is_checked_attributed_and_written_down() -> None:
    found, capability, trail = made()
    call = {"of": {"name": "x", "value": "secret"}, "session_id": "s-1"}
    answer = await found.dispatch(CALLER, principal(Role.AGENT), "make", call)
    assert answer == {"digest": "d", "key": "secret"}
    assert trail.rows == [("thing.made", {"name": "x", "digest": "d"})]
    assert capability.acts == [act.Act(CALLER, "make", "s-1")]
    await found.dispatch(CALLER, principal(Role.AGENT), "look", {"spec": {"session_id": "s-2"}})
    assert capability.acts[-1] == act.Act(CALLER, "look", "s-2")
    assert len(trail.rows) == 1


@pytest.mark.parametrize("call", [{}, {"spec": None}, {"spec": 3}, {"spec": {"session_id": 3}}])
async def test_a_call_that_names_no_session_is_about_none(call: dict[str, Any]) -> None:
    found, capability, _ = made()
    await found.dispatch(CALLER, principal(Role.AGENT), "look", call)
    assert capability.acts == [act.Act(CALLER, "look", "")]


async def test_who_lacks_the_role_is_refused_before_the_handler_runs() -> None:
    found, capability, trail = made()
    with pytest.raises(errors.Denied, match="make needs the role agent; key:me has not got it"):
        await found.dispatch(CALLER, principal(Role.ADMIN), "make", {})
    with pytest.raises(errors.InvalidRequest, match="unknown operation 'fly'"):
        await found.dispatch(CALLER, principal(*Role), "fly", {})
    nobody = OperationDeclaration("x", frozenset(), NoRow.READS)
    with pytest.raises(errors.Denied, match="that nobody has"):
        found.admit(principal(*Role), nobody)
    assert (capability.acts, trail.rows) == ([], [])


@pytest.mark.parametrize("name", ["make", "fly"])
async def test_calls_count_whatever_becomes_of_them(name: str) -> None:
    found, _, _ = made(1)
    for _ in range(2):
        with pytest.raises((errors.Denied, errors.InvalidRequest)):
            await found.dispatch(CALLER, principal(Role.ADMIN), name, {})
    with pytest.raises(errors.LimitExceeded, match="more than 1 calls a second"):
        await found.dispatch(CALLER, principal(Role.ADMIN), name, {})


async def test_without_room_for_rows_only_what_ends_something_goes_on() -> None:
    found, capability, trail = made(full=True)
    capability.go_on.set()
    with pytest.raises(errors.LimitExceeded, match="full"):
        await found.dispatch(CALLER, principal(Role.AGENT), "make", {})
    assert capability.acts == []
    await found.dispatch(CALLER, principal(Role.ADMIN), "end", {"name": "x"})
    assert trail.rows == [("thing.ended", {"name": "x"})]


async def test_a_caller_that_leaves_has_its_row_all_the_same() -> None:
    found, _, trail = made()
    task = asyncio.create_task(found.dispatch(CALLER, principal(Role.ADMIN), "end", {"name": "x"}))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert trail.rows == [("thing.ended", {"name": "x", "left": True})]


def test_an_operation_has_one_handler() -> None:
    found, _, _ = made()
    with pytest.raises(ValueError, match="declared twice"):
        found.add(Capability())
    for declared in (operations.declared, method.declared):
        count: Callable[..., dict[str, Any]] = declared
        assert count(int) == {}


async def test_an_rpc_can_ask_for_its_own_operation_only() -> None:
    found, _, trail = made()
    rpc = method.RpcDeclaration("MakeThing", "make", None, "session_id")
    caller = method.RpcCaller(principal(Role.AGENT), found, rpc)
    assert (await caller.ask({"of": {"name": "x"}}))["digest"] == "d"
    assert trail.rows == [("thing.made", {"name": "x", "digest": "d"})]

    async def work() -> dict[str, Any]:
        return {}

    with pytest.raises(TypeError, match="MakeThing has an operation"):
        await caller.record({}, work)
    own = OperationDeclaration("Login", ANY, WritesRow("key.login", ("device",)))
    alone = method.RpcCaller(principal(), found, method.RpcDeclaration("Login", "", own, ""))
    with pytest.raises(errors.InvalidRequest, match="unknown operation"):
        await alone.ask({})
    await alone.record({"device": "d"}, work)
    assert trail.rows[-1] == ("key.login", {"device": "d"})
