"""The gateway's calls about the audit trail, and what of its other calls is written into it.

What happens in sessions comes from their events, refusals from the edges; here is the rest: calls
that change something of the gateway's own.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

from k8e import errors
from k8e.audit.rows import Filter, Link
from k8e.audit.trail import Trail
from k8e.gateway.arguments import seconds, text
from k8e.model import Principal, Role

if TYPE_CHECKING:
    from k8e.gateway.keeping import Issued
    from k8e.gateway.service import Gateway

DEFAULT_LIMIT = 500
MAX_LIMIT = 5000
MAX_WAIT = 30.0  # seconds

Handler = Callable[[Principal, dict[str, Any]], Awaitable[dict[str, Any]]]

_RECORDED: dict[str, tuple[str, tuple[str, ...]]] = {
    "create_api_key": ("key.created", ("name",)),
    "rotate_api_key": ("key.rotated", ("name",)),
    "set_approver": ("approver.set", ()),
    "apply_template": ("template.applied", ("template.name",)),
    "delete_template": ("template.deleted", ("name",)),
    "set_pool": ("pool.set", ("template", "runtime", "min", "max")),
    "drain_pool": ("pool.drained", ("template",)),
    "pull_image": ("image.pulled", ("reference",)),
    "remove_image": ("image.removed", ("reference",)),
    "prune_images": ("image.pruned", ()),
    "put_snapshot": ("snapshot.put", ("name",)),
    "delete_snapshot": ("snapshot.deleted", ("name",)),
    "set_secret": ("secret.set", ("tenant", "name", "key")),
    "delete_secret": ("secret.deleted", ("tenant", "name", "key")),
    "stop": ("gateway.stop", ("destroy",)),
}
"""Calls that leave a row when they have succeeded, or when nobody waits for their end, or when the
gateway was killed before it: its action, and which arguments it keeps. Never one that may be a
secret."""
_SAFER = frozenset(
    ("delete_template", "drain_pool", "remove_image", "prune_images", "delete_snapshot", "stop")
)
"""Calls that are answered though no row can be written: they make room, or end something."""
_ANSWERED = {
    "create_api_key": ("roles", "expires_at"),
    "set_approver": ("keys_deleted",),
    "apply_template": ("name", "digest"),
    "pull_image": ("digest",),
}
"""What of an answer is kept."""


def attach(gateway: Gateway, trail: Trail) -> None:
    """Let ``trail`` see everything that this gateway does, whichever dialect asks for it."""
    gateway.audit = trail
    gateway.sessions.events.observers.append(trail.event)
    gateway.sessions.events.gates.append(trail.admit)
    gateway.on_refusal.append(trail.refused)
    gateway.keys.on_delete.append(lambda key: trail.record("key.deleted", name=key.name))
    for op, (action, names) in _RECORDED.items():
        handler = _recorded(trail, action, names, _ANSWERED.get(op, ()), gated=op not in _SAFER)
        setattr(gateway, f"call_{op}", handler(getattr(gateway, f"call_{op}")))
    issue = gateway.issue

    @functools.wraps(issue)
    async def issue_recorded(principal: Principal, csr: str, device: str) -> Issued:
        trail.admit()
        with trail.during("key.login", device=device):
            issued = await issue(principal, csr, device)
            trail.record("key.login", device=device, days=issued.days)
        return issued

    gateway.issue = issue_recorded
    delete = gateway.call_delete_api_key

    @functools.wraps(delete)
    async def delete_recorded(principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        with trail.during("key.deleted", name=call.get("name")):
            return await delete(principal, call)  # its row comes from the keys

    gateway.call_delete_api_key = delete_recorded


def _recorded(
    trail: Trail,
    action: str,
    names: tuple[str, ...],
    answered: tuple[str, ...],
    *,
    gated: bool = True,
) -> Callable[[Handler], Handler]:
    def wrap(handler: Handler) -> Handler:
        @functools.wraps(handler)
        async def handle(principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
            if gated:
                trail.admit()
            detail = dict(_argument(call, name) for name in names)
            with trail.during(action, **detail):
                try:
                    told = await handler(principal, call)
                except asyncio.CancelledError:  # perhaps it is done, in part or as a whole
                    trail.record(action, **detail, left=True)
                    raise
                detail |= {name: told.get(name) for name in answered}
                trail.record(action, **detail)
            return told

        return handle

    return wrap


def _argument(call: dict[str, Any], name: str) -> tuple[str, Any]:
    """An argument by its name; ``a.b`` is what the argument ``a`` has as ``b``."""
    outer, _, inner = name.rpartition(".")
    place: Any = call.get(outer) if outer else call
    return inner, cast("dict[str, Any]", place).get(inner) if isinstance(place, dict) else None


class AuditCalls:
    """The part of the gateway that shows what was written down."""

    audit: Trail

    async def call_audit(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        """Rows: the newest, or with a cursor those after it, for which it may wait.

        Who is no admin sees rows of its own, and of its sessions.
        """
        limit = call.get("limit") or DEFAULT_LIMIT
        if type(limit) is not int or not 0 < limit <= MAX_LIMIT:
            raise errors.InvalidRequest(f"limit must be a number from 1 to {MAX_LIMIT}")
        wanted = _filter(principal, call)
        if not call.get("forward"):
            page = await self.audit.newest(wanted, limit, principal.name)
        else:
            wait = min(seconds(call, "wait"), MAX_WAIT)
            cursor = text(call, "cursor", optional=True)
            page = await self.audit.following(wanted, cursor, limit, wait, principal.name)
        return {"rows": page.lines, "cursor": page.cursor, "more": page.more}

    async def call_verify_audit(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        """Whether every row is as it was written, and none is missing."""
        if Role.ADMIN not in principal.roles:
            raise errors.Denied("verifying the audit trail needs the admin role")
        expected = _expected(text(call, "expect", optional=True))
        found = await self.audit.verify(expected, principal.name)
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


def _expected(head: str) -> Link | None:
    if not head:
        return None
    seq, _, digest = head.partition(":")
    if not seq.isdecimal() or len(digest) != 64:
        raise errors.InvalidRequest(
            "expect must be a head as verify prints it",
            hint="it is a number, a colon and 64 hex digits",
        )
    return Link(int(seq), "", digest)
