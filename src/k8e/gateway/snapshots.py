"""Operations on snapshots."""

from __future__ import annotations

from typing import Any, cast

from k8e import errors
from k8e.gateway.arguments import text
from k8e.gateway.operations import AGENT, NoRow, WritesRow, operation
from k8e.model import Principal
from k8e.sessions.service import Sessions


class SnapshotCalls:
    """Operations on snapshots. A snapshot is restored by ``create_session``."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    @operation(roles=AGENT, audit=NoRow.EVENTS)
    async def save_snapshot(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        session_id, name = text(call, "session_id"), text(call, "name")
        self._sessions.events.admit()
        saved, warning = await self._sessions.snapshots.save(
            principal, session_id, name, replace=bool(call.get("replace"))
        )
        session = self._sessions.get(principal, session_id)
        told = {"name": name, "size_bytes": saved.size_bytes, "digest": saved.digest}
        self._sessions.events.write(session, "snapshot.saved", **told)
        return {**saved.to_json(), "warning": warning}

    @operation(roles=AGENT, audit=NoRow.READS)
    async def get_snapshot(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        return self._sessions.snapshots.get(principal.name, text(call, "name")).to_json()

    @operation(roles=AGENT, audit=NoRow.READS)
    async def list_snapshots(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        found = self._sessions.snapshots.listing(principal.name)
        return {"snapshots": [item.to_json() for item in found]}

    @operation(roles=AGENT, audit=WritesRow("snapshot.deleted", ("name",), needs_room=False))
    async def delete_snapshot(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        await self._sessions.snapshots.delete(principal.name, text(call, "name"))
        return {}

    @operation(roles=AGENT, audit=WritesRow("snapshot.put", ("name",)))
    async def put_snapshot(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        layers = cast("list[object]", call.get("layers"))
        if not isinstance(layers, list):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise errors.InvalidRequest("layers must be a list of digests")
        digests = [item for item in layers if isinstance(item, str)]
        if len(digests) < len(layers):
            raise errors.InvalidRequest("a layer is a digest, as text")
        name = text(call, "name")
        named = await self._sessions.snapshots.put(principal.name, name, digests)
        return named.to_json()
