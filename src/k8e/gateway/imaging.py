"""The gateway's calls about images, for local clients and for gRPC. All are the operator's."""

from __future__ import annotations

import asyncio
from contextvars import copy_context
from typing import Any

from k8e import errors
from k8e.gateway.arguments import text
from k8e.model import Principal, Rootfs
from k8e.runtimes.host import Host
from k8e.sessions import reporting
from k8e.sessions.service import Sessions


class ImageCalls:
    """The part of the gateway that fetches images and removes them."""

    host: Host
    sessions: Sessions

    async def call_pull_image(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        context = copy_context()  # with whoever wants to hear of it

        def tell(done: int, total: int) -> None:
            context.run(reporting.progress, done, total)

        pulled = await self.host.images.pull(text(call, "reference"), tell)
        # What waits in the pool may have been made of what the name meant before.
        self.sessions.pool.replace(lambda recipe: self._is(recipe.rootfs, pulled.name))
        return pulled.to_json()

    def _is(self, rootfs: Rootfs, name: str) -> bool:
        if rootfs.kind != "image":
            return False
        try:
            return str(self.host.images.parse(rootfs.source)) == name
        except errors.K8eError:
            return False

    async def call_list_images(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        return {"images": [image.to_json() for image in await self.host.images.listing()]}

    async def call_remove_image(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        await self.host.images.remove(text(call, "reference"))
        return {"removed_layers": await asyncio.to_thread(self.host.roots.prune)}

    async def call_prune_images(self, principal: Principal, call: dict[str, Any]) -> dict[str, Any]:
        return {"removed_layers": await asyncio.to_thread(self.host.roots.prune)}
