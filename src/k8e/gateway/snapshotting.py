"""The gateway's calls about snapshots, for local clients and for gRPC."""

from __future__ import annotations

from typing import Any, cast

from k8e import errors
from k8e.gateway.arguments import text
from k8e.model import Principal
from k8e.sessions.service import Sessions


class SnapshotCalls:
    """The part of the gateway that answers for snapshots. Restoring one is creating a session."""

    sessions: Sessions

    async def call_save_snapshot(
        self, principal: Principal, call: dict[str, Any]
    ) -> dict[str, Any]:
        session_id, name = text(call, "session_id"), text(call, "name")
        self.sessions.events.admit()
        saved, warning = await self.sessions.snapshots.save(
            principal, session_id, name, replace=bool(call.get("replace"))
        )
        session = self.sessions.get(principal, session_id)
        told = {"name": name, "size_bytes": saved.size_bytes, "digest": saved.digest}
        self.sessions.events.write(session, "snapshot.saved", **told)
        return {**saved.to_json(), "warning": warning}

    async def call_get_snapshot(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        return self.sessions.snapshots.get(principal.name, text(call, "name")).to_json()

    async def call_list_snapshots(
        self, principal: Principal, call: dict[str, Any]
    ) -> dict[str, Any]:
        found = self.sessions.snapshots.listing(principal.name)
        return {"snapshots": [item.to_json() for item in found]}

    async def call_delete_snapshot(
        self, principal: Principal, call: dict[str, Any]
    ) -> dict[str, Any]:
        await self.sessions.snapshots.delete(principal.name, text(call, "name"))
        return {}

    async def call_put_snapshot(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        layers = cast("list[object]", call.get("layers"))
        if not isinstance(layers, list):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise errors.InvalidRequest("layers must be a list of digests")
        digests = [item for item in layers if isinstance(item, str)]
        if len(digests) < len(layers):
            raise errors.InvalidRequest("a layer is a digest, as text")
        name = text(call, "name")
        return self.sessions.snapshots.put(principal.name, name, digests).to_json()
