"""Operations on images, all of them for administrators."""

from __future__ import annotations

import asyncio
from contextvars import copy_context
from typing import Any

from k8e import errors
from k8e.gateway.arguments import text
from k8e.gateway.operations import ADMIN, NoRow, WritesRow, operation
from k8e.model import Principal, Rootfs
from k8e.runtimes.base import Machine
from k8e.sessions import tasks
from k8e.sessions.service import Sessions


class ImageCalls:
    """Operations that fetch, list and remove images."""

    def __init__(self, host: Machine, sessions: Sessions) -> None:
        self._host = host
        self._sessions = sessions

    @operation(roles=ADMIN, audit=WritesRow("image.pulled", ("reference",), ("digest",)))
    async def pull_image(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        context = copy_context()  # it has the listener for progress

        def tell(done: int, total: int) -> None:
            context.run(tasks.progress, done, total)

        pulled = await self._host.images.pull(text(call, "reference"), tell)
        # Sandboxes in the pool may have been made from the image that had this name before.
        self._sessions.pool.replace(lambda recipe: self._is(recipe.rootfs, pulled.name))
        return pulled.to_json()

    def _is(self, rootfs: Rootfs, name: str) -> bool:
        if rootfs.kind != "image":
            return False
        try:
            return str(self._host.images.parse(rootfs.source)) == name
        except errors.K8eError:
            return False

    @operation(roles=ADMIN, audit=NoRow.READS)
    async def list_images(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        return {"images": [image.to_json() for image in await self._host.images.listing()]}

    @operation(roles=ADMIN, audit=WritesRow("image.removed", ("reference",), needs_room=False))
    async def remove_image(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        await self._host.images.remove(text(call, "reference"))
        return {"removed_layers": await asyncio.to_thread(self._host.prune_images)}

    @operation(roles=ADMIN, audit=WritesRow("image.pruned", needs_room=False))
    async def prune_images(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        return {"removed_layers": await asyncio.to_thread(self._host.prune_images)}
