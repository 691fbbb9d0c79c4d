"""The gateway's call about events, for local clients and for gRPC."""

from __future__ import annotations

from typing import Any

from k8e import errors
from k8e.gateway.arguments import text
from k8e.model import Principal
from k8e.sessions.service import Sessions


class EventCalls:
    """The part of the gateway that tells what happened in sessions."""

    sessions: Sessions

    async def call_events(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        """The newest events of a session, also of one that has ended not long ago.

        Without a session those of all that the caller has, and with a cursor the ones before.
        """
        limit = call.get("limit") or 0
        if type(limit) is not int or limit < 0:
            raise errors.InvalidRequest("limit must be a number from 0 up")
        if not text(call, "session_id", optional=True):
            cursor = text(call, "cursor", optional=True)
            page = await self.sessions.all_events(principal, limit, cursor)
            told = {"events": page.lines, "returned": len(page.lines), "cursor": page.cursor}
            return {**told, "truncated": bool(page.cursor)}
        session = self.sessions.get(principal, text(call, "session_id"))
        lines, truncated = await self.sessions.events.read(session, limit)
        return {"events": lines, "truncated": truncated, "returned": len(lines)}
