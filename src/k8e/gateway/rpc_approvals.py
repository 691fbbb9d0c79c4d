"""Approvals in K8E's words. A method here has the name of its RPC."""

from __future__ import annotations

from typing import Any

from k8e._generated import sandbox_pb2 as pb
from k8e.gateway.approving import ApprovalCalls
from k8e.model import Principal


class ApprovalRpcs:
    """The RPCs about approvals."""

    def __init__(self, calls: ApprovalCalls) -> None:
        self._approvals = calls

    async def ConfirmAction(
        self, principal: Principal, request: pb.ConfirmActionRequest
    ) -> pb.ConfirmActionResponse:
        """Register an action and answer at once; with an approval_id, wait for the decision."""
        call = {
            "session_id": request.session_id,
            "action": request.action,
            "approval_id": request.approval_id,
            "timeout": request.timeout,
            "expires": request.expires,
        }
        return _approval(await self._approvals.call_confirm_action(principal, call))

    async def ApproveAction(
        self, principal: Principal, request: pb.ApproveActionRequest
    ) -> pb.ApproveActionResponse:
        call = {
            "approval_id": request.approval_id,
            "approved": request.approved,
            "reason": request.reason,
            "secret": request.secret,
        }
        told = await self._approvals.call_approve_action(principal, call)
        return pb.ApproveActionResponse(ok=True, advisory=told["advisory"])

    async def ListApprovals(
        self, principal: Principal, request: pb.ListApprovalsRequest
    ) -> pb.ListApprovalsResponse:
        call = {"session_id": request.session_id}
        told = await self._approvals.call_list_approvals(principal, call)
        return pb.ListApprovalsResponse(approvals=map(_approval, told["approvals"]))


def _approval(told: dict[str, Any]) -> pb.ConfirmActionResponse:
    return pb.ConfirmActionResponse(
        approval_id=told["approval_id"],
        approved=told["approved"],
        status=told["status"],
        advisory=told["advisory"],
        reason=told["reason"],
        session_id=told["session_id"],
        action=told["action"],
        created_at=int(told["created_at"]),
        expires_at=int(told["expires_at"]),
    )
