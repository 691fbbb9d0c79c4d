"""Operations on the audit trail, and where its rows come from.

Rows about sessions come from their events, refusals from the edges of the dialects, and the others
from the declarations of operations (:mod:`k8e.gateway.operations`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from k8e import errors
from k8e.audit.rows import ChainLink, Filter
from k8e.audit.trail import Trail
from k8e.gateway.arguments import seconds, text
from k8e.gateway.operations import ADMIN, ANY, NoRow, operation
from k8e.model import Principal, Role

if TYPE_CHECKING:
    from k8e.gateway.service import Gateway

DEFAULT_LIMIT = 500
MAX_LIMIT = 5000
MAX_WAIT = 30.0  # seconds


def attach(gateway: Gateway, trail: Trail) -> None:
    """Let ``trail`` record everything that this gateway does, whichever dialect asks for it."""
    gateway.sessions.events.observers.append(trail.event)
    gateway.sessions.events.gates.append(trail.admit)
    gateway.on_refusal.append(trail.refused)
    gateway.keys.on_delete.append(lambda key: trail.record("key.deleted", name=key.name))
    gateway.operations.trail = trail
    gateway.operations.add(AuditCalls(trail))


class AuditCalls:
    """Operations that show and verify the audit trail."""

    def __init__(self, trail: Trail) -> None:
        self._trail = trail

    @operation(roles=ANY, audit=NoRow.READS)
    async def audit(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        """The newest rows, or with a cursor those after it, for which the call may wait.

        A caller who is not an admin sees its own rows, and those of its sessions.
        """
        limit = call.get("limit") or DEFAULT_LIMIT
        if type(limit) is not int or not 0 < limit <= MAX_LIMIT:
            raise errors.InvalidRequest(f"limit must be a number from 1 to {MAX_LIMIT}")
        wanted = _filter(principal, call)
        if not call.get("forward"):
            page = await self._trail.newest(wanted, limit, principal.name)
        else:
            wait = min(seconds(call, "wait"), MAX_WAIT)
            cursor = text(call, "cursor", optional=True)
            page = await self._trail.following(wanted, cursor, limit, wait, principal.name)
        return {"rows": page.lines, "cursor": page.cursor, "more": page.more}

    @operation(roles=ADMIN, audit=NoRow.READS, session="")
    async def verify_audit(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        """Check that every row is as it was written, and that none is missing."""
        expected = _expected(text(call, "expect", optional=True))
        found = await self._trail.verify(expected, principal.name)
        return {
            "ok": not found.problems,
            "rows": found.rows,
            "first": found.first,
            "head": f"{found.last}:{found.head}",
            "problems": found.problems,
        }


def _filter(principal: Principal, call: dict[str, Any]) -> Filter:
    return Filter(
        session=text(call, "session_id", optional=True),
        principal=text(call, "principal", optional=True),
        since=seconds(call, "since"),
        until=seconds(call, "until"),
        action=text(call, "action", optional=True),
        denied=bool(call.get("denied")),
        of="" if Role.ADMIN in principal.roles else principal.name,
    )


def _expected(head: str) -> ChainLink | None:
    if not head:
        return None
    seq, _, digest = head.partition(":")
    if not seq.isdecimal() or len(digest) != 64:
        raise errors.InvalidRequest(
            "expect must be a head as verify prints it",
            hint="it is a number, a colon and 64 hex digits",
        )
    return ChainLink(int(seq), "", digest)
