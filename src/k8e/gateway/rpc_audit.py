"""The audit trail over gRPC. A method here has the name of its RPC."""

from __future__ import annotations

from k8e._generated import sandbox_pb2 as pb
from k8e.gateway.service import Gateway
from k8e.model import Principal


class AuditRpcs:
    """The RPCs about the audit trail."""

    _gateway: Gateway

    async def GetAudit(
        self, principal: Principal, request: pb.GetAuditRequest
    ) -> pb.GetAuditResponse:
        call = {item.name: getattr(request, item.name) for item in request.DESCRIPTOR.fields}
        return pb.GetAuditResponse(**await self._gateway.call_audit(principal, call))

    async def VerifyAudit(
        self, principal: Principal, request: pb.VerifyAuditRequest
    ) -> pb.VerifyAuditResponse:
        told = await self._gateway.call_verify_audit(principal, {"expect": request.expect})
        return pb.VerifyAuditResponse(**told)
