"""Operations on approvals."""

from __future__ import annotations

import asyncio
from typing import Any

from k8e import errors
from k8e.auth.keys import Keys
from k8e.gateway.arguments import seconds, text
from k8e.gateway.operations import ADMIN, AGENT, ANY, DECIDING, NoRow, WritesRow, operation
from k8e.model import Principal, Role
from k8e.sessions.approvals import Approvals
from k8e.sessions.service import Sessions


class ApprovalCalls:
    """Operations that ask for approvals and decide on them."""

    def __init__(self, approvals: Approvals, keys: Keys, sessions: Sessions) -> None:
        self._approvals = approvals
        self._keys = keys
        self._sessions = sessions

    @operation(roles=AGENT, audit=NoRow.EVENTS)
    async def confirm_action(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        """Register an action, wait for the decision on one, or both."""
        approval_id = text(call, "approval_id", optional=True)
        session_id = text(call, "session_id", optional=bool(approval_id))
        action = text(call, "action", optional=bool(approval_id))
        timeout = seconds(call, "timeout")
        if not approval_id:
            asked = await self._approvals.ask(
                principal, session_id, action, seconds(call, "expires")
            )
            if not call.get("wait"):
                return asked.to_json()
            approval_id = asked.approval_id
        found = await self._approvals.wait(
            principal, approval_id, seconds=timeout, session_id=session_id, action=action
        )
        return found.to_json()

    @operation(roles=DECIDING, audit=NoRow.EVENTS)
    async def approve_action(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        approved = call.get("approved")
        if not isinstance(approved, bool):
            raise errors.InvalidRequest("approved must be true or false")
        decided = await self._approvals.decide(
            principal,
            text(call, "approval_id"),
            approved=approved,
            reason=text(call, "reason", optional=True),
            secret=text(call, "secret", optional=True),
        )
        return decided.to_json()

    @operation(roles=ANY, audit=NoRow.READS)
    async def get_approval(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        found = await self._approvals.get(principal, text(call, "approval_id"))
        return found.to_json()

    @operation(roles=ANY, audit=NoRow.READS)
    async def list_approvals(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        found = await self._approvals.pending(principal, text(call, "session_id", optional=True))
        return {"approvals": [item.to_json() for item in found]}

    @operation(roles=ADMIN, audit=WritesRow("approver.set", answer=("keys_deleted",)))
    async def set_approver(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        current = text(call, "current", optional=True)
        first = not await self._approvals.approver.configured()
        await self._approvals.approver.configure(text(call, "secret"), current)
        if not first:
            return {"configured": True}
        # Until now every admin could make keys of approvers; from now on that takes the secret. All
        # of these keys go before anything is awaited: the caller may leave, or have one of them.
        approvers = [key.name for key, _ in self._keys.listing() if Role.APPROVER in key.roles]
        await asyncio.shield(asyncio.gather(*map(self._delete, approvers)))
        return {"configured": True, "keys_deleted": approvers}

    async def _delete(self, name: str) -> None:
        gone = await self._keys.delete(name)
        await self._sessions.evictions.evict(gone.owner, f"key {gone.name} was deleted")

    @operation(roles=ANY, audit=NoRow.READS)
    async def approver(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        return {"configured": await self._approvals.approver.configured()}
