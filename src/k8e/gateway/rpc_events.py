"""Events in K8E's words. A method here has the name of its RPC."""

from __future__ import annotations

from k8e._generated import sandbox_pb2 as pb
from k8e.gateway.service import Gateway
from k8e.model import Principal


class EventRpcs:
    """The RPC about events."""

    _gateway: Gateway

    async def GetEvents(
        self, principal: Principal, request: pb.GetEventsRequest
    ) -> pb.GetEventsResponse:
        asked = {"session_id": request.session_id, "cursor": request.cursor}
        call = {**asked, "limit": request.limit}
        return pb.GetEventsResponse(**await self._gateway.call_events(principal, call))
