"""Exposed ports in K8E's words. A method here has the name of its RPC."""

from __future__ import annotations

from k8e._generated import sandbox_pb2 as pb
from k8e.gateway.exposing import ExposureCalls
from k8e.model import Principal


class ExposureRpcs:
    """The RPCs about exposed ports."""

    def __init__(self, calls: ExposureCalls) -> None:
        self._exposures = calls

    async def ExposeService(
        self, principal: Principal, request: pb.ExposeServiceRequest
    ) -> pb.ExposeServiceResponse:
        call = {"session_id": request.session_id, "port": request.port, "host": request.host}
        told = await self._exposures.call_expose(principal, call)
        return pb.ExposeServiceResponse(url=told["url"])

    async def UnexposeService(
        self, principal: Principal, request: pb.UnexposeServiceRequest
    ) -> pb.UnexposeServiceResponse:
        call = {"session_id": request.session_id, "port": request.port}
        await self._exposures.call_unexpose(principal, call)
        return pb.UnexposeServiceResponse(ok=True)

    async def ListExposed(
        self, principal: Principal, request: pb.ListExposedRequest
    ) -> pb.ListExposedResponse:
        told = await self._exposures.call_list_exposed(
            principal, {"session_id": request.session_id}
        )
        services = [
            pb.ExposedService(
                port=item["port"],
                url=item["url"],
                host=item["host"],
                started_at=int(item["started_at"]),
            )
            for item in told["services"]
        ]
        return pb.ListExposedResponse(services=services)
