"""RPCs of ``sandbox.v1``, declared beside their handlers. Most encode an operation of the gateway.

An RPC that names an operation has its roles, row and limit, and can ask for no other operation. The
others (programs, files, terminals and contexts, which guests answer) declare these themselves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from k8e.gateway.operations import (
    Answer,
    Call,
    F,
    Limit,
    NoRow,
    OperationDeclaration,
    Operations,
    WritesRow,
    recorded,
)
from k8e.model import Principal

_DECLARATION = "__rpc__"


class RpcDeclaration(NamedTuple):
    """The declaration of one RPC."""

    name: str
    operation: str
    """The operation of the gateway that it encodes; empty if it has none."""
    own: OperationDeclaration | None
    """The declaration of an RPC without an operation."""
    session: str
    """The field of the request that names a session, or begins with its id and a dot."""

    def declared(self, operations: dict[str, OperationDeclaration]) -> OperationDeclaration:
        """The operation whose roles, row and limit apply to this RPC."""
        return self.own or operations[self.operation]

    def session_of(self, request: Any) -> str:
        """The session that a request names; unchecked."""
        return str(getattr(request, self.session, "")).partition(".")[0]


class RpcCaller:
    """The caller of one RPC, and the only operation that the RPC may ask for."""

    def __init__(self, principal: Principal, operations: Operations, rpc: RpcDeclaration) -> None:
        self.principal = principal
        self._operations = operations
        self._rpc = rpc

    async def ask(self, call: Call) -> Answer:
        """The answer of the operation that the RPC encodes."""
        return await self._operations.find(self._rpc.operation).run(self.principal, call)

    async def record(self, call: Call, work: Callable[[], Awaitable[Answer]]) -> Answer:
        """The answer of an RPC without an operation, with the row that it declares."""
        if self._rpc.own is None:
            raise TypeError(f"{self._rpc.name} has an operation, which writes its row")
        return await recorded(self._operations.trail, self._rpc.own.audit, call, work)


def encodes(operation: str, *, session: str = "session_id") -> Callable[[F], F]:
    """Declare that the decorated RPC encodes an operation of the gateway."""

    def declare(handler: F) -> F:
        declaration = RpcDeclaration(handler.__name__, operation, None, session)
        setattr(handler, _DECLARATION, declaration)
        return handler

    return declare


def rpc(
    *,
    roles: frozenset[Any],
    audit: WritesRow | NoRow,
    limit: Limit = Limit.CALLS,
    session: str = "session_id",
) -> Callable[[F], F]:
    """Declare an RPC that has no operation of the gateway."""

    def declare(handler: F) -> F:
        own = OperationDeclaration(handler.__name__, roles, audit, limit, session)
        setattr(handler, _DECLARATION, RpcDeclaration(handler.__name__, "", own, session))
        return handler

    return declare


def declared(*services: type) -> dict[str, RpcDeclaration]:
    """The RPCs that the methods of these classes declare, by name."""
    found: dict[str, RpcDeclaration] = {}
    for member in (member for kind in services for member in vars(kind).values()):
        item: RpcDeclaration | None = getattr(member, _DECLARATION, None)
        if item is not None and found.setdefault(item.name, item) is not item:
            raise ValueError(f"the RPC {item.name} is declared twice")
    return found
