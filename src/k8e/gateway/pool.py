"""Operations on the warm pool."""

from __future__ import annotations

from typing import Any

from k8e import errors
from k8e.gateway.arguments import text
from k8e.gateway.operations import ADMIN, NoRow, WritesRow, operation
from k8e.model import Principal
from k8e.sessions.service import Sessions


class PoolCalls:
    """Operations that show and set how many sandboxes wait in the warm pool."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    @operation(roles=ADMIN, audit=NoRow.READS)
    async def pool(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        return {"pools": self._sessions.warming.listing()}

    @operation(roles=ADMIN, audit=WritesRow("pool.set", ("template", "runtime", "min", "max")))
    async def set_pool(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        pool = await self._sessions.warming.set(
            text(call, "template", optional=True),
            text(call, "runtime", optional=True),
            _number(call, "min"),
            _number(call, "max"),
            wait=bool(call.get("wait")),
        )
        return {"pool": pool}

    @operation(roles=ADMIN, audit=WritesRow("pool.drained", ("template",), needs_room=False))
    async def drain_pool(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        return {"drained": self._sessions.warming.drain(text(call, "template", optional=True))}


def _number(call: dict[str, Any], key: str) -> int | None:
    value = call.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise errors.InvalidRequest(f"{key} must be a whole number")
    return value
