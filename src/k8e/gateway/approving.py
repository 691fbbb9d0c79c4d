"""The gateway's calls about approvals, for local clients and for gRPC."""

from __future__ import annotations

import asyncio
from typing import Any

from k8e import errors
from k8e.auth.keys import Keys
from k8e.gateway.arguments import seconds, text
from k8e.model import Principal, Role
from k8e.sessions.approvals import Approvals
from k8e.sessions.service import Sessions


class ApprovalCalls:
    """The part of the gateway that answers for approvals."""

    keys: Keys
    sessions: Sessions

    def __init__(self, approvals: Approvals) -> None:
        self.approvals = approvals

    async def call_confirm_action(
        self, principal: Principal, call: dict[str, Any]
    ) -> dict[str, Any]:
        """Register an action, wait for the decision on one, or both."""
        approval_id = text(call, "approval_id", optional=True)
        session_id = text(call, "session_id", optional=bool(approval_id))
        action = text(call, "action", optional=bool(approval_id))
        timeout = seconds(call, "timeout")
        if not approval_id:
            asked = self.approvals.ask(principal, session_id, action, seconds(call, "expires"))
            if not call.get("wait"):
                return asked.to_json()
            approval_id = asked.approval_id
        found = await self.approvals.wait(
            principal, approval_id, seconds=timeout, session_id=session_id, action=action
        )
        return found.to_json()

    async def call_approve_action(
        self, principal: Principal, call: dict[str, Any]
    ) -> dict[str, Any]:
        approved = call.get("approved")
        if not isinstance(approved, bool):
            raise errors.InvalidRequest("approved must be true or false")
        decided = await self.approvals.decide(
            principal,
            text(call, "approval_id"),
            approved=approved,
            reason=text(call, "reason", optional=True),
            secret=text(call, "secret", optional=True),
        )
        return decided.to_json()

    async def call_get_approval(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        return self.approvals.get(principal, text(call, "approval_id")).to_json()

    async def call_list_approvals(
        self, principal: Principal, call: dict[str, Any]
    ) -> dict[str, Any]:
        found = self.approvals.pending(principal, text(call, "session_id", optional=True))
        return {"approvals": [item.to_json() for item in found]}

    async def call_set_approver(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        if Role.ADMIN not in principal.roles:
            raise errors.Denied("choosing the approver needs the admin role")
        current = text(call, "current", optional=True)
        first = not self.approvals.approver.configured
        await self.approvals.approver.configure(text(call, "secret"), current)
        if not first:
            return {"configured": True}
        # Whoever manages keys could make these; from now on that takes the secret. All of them go
        # before anything is waited for: the caller may leave, or be one of them.
        approvers = [key.name for key, _ in self.keys.listing() if Role.APPROVER in key.roles]
        gone = [self.keys.delete(name) for name in approvers]
        evict = self.sessions.evictions.evict
        ending = (evict(key.owner, f"key {key.name} was deleted") for key in gone)
        await asyncio.shield(asyncio.gather(*ending))
        return {"configured": True, "keys_deleted": approvers}

    async def call_approver(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        return {"configured": self.approvals.approver.configured}
