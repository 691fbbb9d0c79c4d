"""The gateway's calls about the warm pool."""

from __future__ import annotations

from typing import Any

from k8e import errors
from k8e.gateway.arguments import text
from k8e.model import Principal
from k8e.sessions.service import Sessions


class PoolCalls:
    """The part of the gateway that shows and sets which sandboxes are ready."""

    sessions: Sessions

    async def call_pool(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        return {"pools": self.sessions.warming.listing()}

    async def call_set_pool(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        pool = await self.sessions.warming.set(
            text(call, "template", optional=True),
            text(call, "runtime", optional=True),
            _number(call, "min"),
            _number(call, "max"),
            wait=bool(call.get("wait")),
        )
        return {"pool": pool}

    async def call_drain_pool(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        return {"drained": self.sessions.warming.drain(text(call, "template", optional=True))}


def _number(call: dict[str, Any], key: str) -> int | None:
    value = call.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise errors.InvalidRequest(f"{key} must be a whole number")
    return value
