"""Operations of the gateway: declared beside their handlers, and asked for by every dialect.

A declaration names the roles that may use an operation, the row that it leaves in the audit trail,
the limit that it counts against, and the argument that names a session. A dialect only encodes:
frames, gRPC and HTTP get roles, limits, rows and refusals from :class:`Operations`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple, TypeVar, cast

from k8e import errors
from k8e.audit import act as audit_act
from k8e.audit.act import Act, AuditCaller
from k8e.audit.trail import Trail
from k8e.auth.rates import Rates
from k8e.model import Principal, Role

ANY = frozenset(Role)
ADMIN = frozenset({Role.ADMIN})
AGENT = frozenset({Role.AGENT})
AGENT_OR_ADMIN = frozenset({Role.AGENT, Role.ADMIN})
DECIDING = frozenset({Role.APPROVER, Role.ADMIN})
PUBLIC: frozenset[Role] = frozenset()
"""Of operations whose callers need not be known; only with :attr:`Limit.NONE`."""
ANYBODY = Principal("anybody", frozenset())
"""A caller that is not known."""

Call = dict[str, Any]
Answer = dict[str, Any]
Handler = Callable[[Principal, Call], Awaitable[Answer]]
F = TypeVar("F", bound=Callable[..., object])


class Limit(Enum):
    """The limit that an operation counts against."""

    CALLS = "the caller's rate of calls"
    STREAMS = "the caller's rate of streams, whose calls are counted one by one"
    NONE = "nothing: the caller is not known, and costs next to nothing"


class NoRow(Enum):
    """Why an operation writes no audit row by itself. Refusals leave rows in every case."""

    READS = "it changes nothing"
    EVENTS = "the events of its session become rows"
    CALLS = "each call that comes through it has a declaration of its own"


class WritesRow(NamedTuple):
    """The row of an operation that succeeded, whose caller left, or that a crash interrupted."""

    action: str
    arguments: tuple[str, ...] = ()
    """Arguments that the row has; ``a.b`` is the value ``b`` in the argument ``a``. Never one that
    may be a secret."""
    answer: tuple[str, ...] = ()
    """Values of the answer that the row has."""
    needs_room: bool = True
    """Whether the operation is refused while no row can be written. False for operations that make
    room or end something."""
    by_handler: bool = False
    """Whether the handler writes the row; then only a crash before it is looked after here."""


class OperationDeclaration(NamedTuple):
    """The declaration of one operation."""

    name: str
    roles: frozenset[Role]
    """The caller needs one of these."""
    audit: WritesRow | NoRow
    limit: Limit = Limit.CALLS
    session: str = "session_id"
    """The argument that names a session, if there is one; ``a.b`` as in :class:`WritesRow`."""

    @property
    def public(self) -> bool:
        """Whether callers that are not known may use it."""
        return not self.roles and self.limit is Limit.NONE

    def session_of(self, call: Call) -> str:
        """The session that a call names; nothing about it is checked."""
        named = _argument(call, self.session)[1]
        return named if isinstance(named, str) else ""


USE_SESSION = OperationDeclaration("using a session", AGENT, NoRow.EVENTS, session="session.id")
"""Operations of guests, which frames relay."""

_DECLARATION = "__operation__"


def operation(
    *,
    roles: frozenset[Role],
    audit: WritesRow | NoRow,
    limit: Limit = Limit.CALLS,
    session: str = "session_id",
) -> Callable[[F], F]:
    """Declare the operation that has the name of the decorated handler."""

    def declare(handler: F) -> F:
        declared = OperationDeclaration(handler.__name__, roles, audit, limit, session)
        setattr(handler, _DECLARATION, declared)
        return handler

    return declare


def declared(*capabilities: type) -> dict[str, OperationDeclaration]:
    """The operations that the methods of these classes declare, by name."""
    found: dict[str, OperationDeclaration] = {}
    for member in (member for kind in capabilities for member in vars(kind).values()):
        item: OperationDeclaration | None = getattr(member, _DECLARATION, None)
        if item is not None and found.setdefault(item.name, item) is not item:
            raise ValueError(f"the operation {item.name} is declared twice")
    return found


class BoundOperation(NamedTuple):
    """An operation and its handler, which a caller was admitted to."""

    operation: OperationDeclaration
    handler: Handler
    trail: Trail | None

    async def run(self, principal: Principal, call: Call) -> Answer:
        """Answer a call, and write its row."""
        return await recorded(
            self.trail, self.operation.audit, call, lambda: self.handler(principal, call)
        )


def check_scope(principal: Principal, name: str, session_id: str) -> None:
    """Refuse a caller with a token what that does not allow; ``name`` is the operation's."""
    scope = principal.scope
    if scope is None:
        return
    if session_id != scope.session_id:
        raise errors.TokenRefused(
            "this token is not for that sandbox", hint=f"it is for {scope.session_id} alone"
        )
    if name not in scope.operations:
        raise errors.TokenRefused(
            f"this token does not allow {name[:80]}",
            hint=f"it allows {', '.join(sorted(scope.operations))}; whoever has the API key can "
            "make one that allows more",
        )


class Operations:
    """All operations that a gateway answers."""

    def __init__(self, calls: Rates, streams: Rates) -> None:
        self._rates = {Limit.CALLS: calls, Limit.STREAMS: streams}
        self._bound: dict[str, tuple[OperationDeclaration, Handler]] = {}
        self.trail: Trail | None = None
        """Where rows are written, once there is one."""

    def add(self, capability: object) -> None:
        """Answer the operations that the methods of an object declare."""
        for name, item in declared(type(capability)).items():
            if name in self._bound:
                raise ValueError(f"the operation {name} is declared twice")
            self._bound[name] = item, getattr(capability, name)

    def find(self, name: str) -> BoundOperation:
        """The operation of that name, before anything is checked."""
        found = self._bound.get(name)
        if found is None:
            raise errors.InvalidRequest(f"unknown operation {name[:80]!r}")
        return BoundOperation(*found, self.trail)

    def admit(self, principal: Principal, item: OperationDeclaration, shown: str = "") -> None:
        """Refuse a caller that calls too often or has not the role.

        ``shown`` is how the dialect calls the operation. The rate comes first, because a refusal
        for the role leaves a row in the audit trail each time.
        """
        rates = self._rates.get(item.limit)
        if rates is not None:
            rates.take(principal)
        if not item.roles & principal.roles and not item.public:
            wanted = " or ".join(sorted(item.roles)) or "that nobody has"
            raise errors.Denied(
                f"{shown or item.name} needs the role {wanted}; {principal.shown} has not got it",
                hint="k8e sandbox api-key create NAME --role ROLE makes a key that has",
            )

    def begin(
        self,
        caller: AuditCaller,
        principal: Principal,
        name: str,
        call: Call,
        *,
        request: str = "",
    ) -> BoundOperation:
        """Check all that can be checked before an operation runs, on behalf of its caller."""
        item = self._bound.get(name)
        session = item[0].session_of(call) if item is not None else ""
        audit_act.begin(Act(caller, name, session, request))
        check_scope(principal, name, session)
        if item is None:
            self._rates[Limit.CALLS].take(principal)
        found = self.find(name)
        self.admit(principal, found.operation)
        return found

    async def dispatch(
        self, caller: AuditCaller, principal: Principal, name: str, call: Call
    ) -> Answer:
        """Answer one call of a dialect, from its checks to its row."""
        return await self.begin(caller, principal, name, call).run(principal, call)


async def recorded(
    trail: Trail | None,
    audit: WritesRow | NoRow,
    call: Call,
    work: Callable[[], Awaitable[Answer]],
) -> Answer:
    """The answer of ``work``, with the audit row that was declared for it."""
    if trail is None or isinstance(audit, NoRow):
        return await work()
    if audit.needs_room:
        trail.admit()
    detail = dict(_argument(call, name) for name in audit.arguments)
    with trail.during(audit.action, **detail):
        if audit.by_handler:
            return await work()
        try:
            answer = await work()
        except asyncio.CancelledError:  # perhaps it is done, in part or as a whole
            trail.record(audit.action, **detail, left=True)
            raise
        detail |= {name: answer.get(name) for name in audit.answer}
        trail.record(audit.action, **detail)
    return answer


def _argument(call: Mapping[str, Any], name: str) -> tuple[str, Any]:
    """The last part of an argument's name, and its value."""
    outer, _, inner = name.rpartition(".")
    place: Any = call.get(outer) if outer else call
    return inner, cast("dict[str, Any]", place).get(inner) if isinstance(place, dict) else None
