"""K8E's registry of snapshots: names for lists of digests. A method here has its RPC's name."""

from __future__ import annotations

from k8e._generated import sandbox_pb2 as pb
from k8e.gateway.snapshotting import SnapshotCalls
from k8e.model import Principal


class SnapshotRpcs:
    """The RPCs about snapshots. Those that were saved here have one layer: their archive."""

    def __init__(self, calls: SnapshotCalls) -> None:
        self._snapshots = calls

    async def SnapshotPut(
        self, principal: Principal, request: pb.SnapshotPutRequest
    ) -> pb.SnapshotPutResponse:
        call = {"name": request.name, "layers": list(request.layers)}
        told = await self._snapshots.call_put_snapshot(principal, call)
        return pb.SnapshotPutResponse(name=told["name"], layers=len(told["layers"]))

    async def SnapshotGet(
        self, principal: Principal, request: pb.SnapshotGetRequest
    ) -> pb.SnapshotGetResponse:
        told = await self._snapshots.call_get_snapshot(principal, {"name": request.name})
        return pb.SnapshotGetResponse(name=told["name"], layers=told["layers"])

    async def SnapshotList(
        self, principal: Principal, request: pb.SnapshotListRequest
    ) -> pb.SnapshotListResponse:
        told = await self._snapshots.call_list_snapshots(principal, {})
        return pb.SnapshotListResponse(names=[item["name"] for item in told["snapshots"]])
