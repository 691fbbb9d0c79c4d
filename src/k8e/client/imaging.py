"""Images in the SDK: fetch, list and remove what root file systems are made of. Both clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from k8e.client import operations, snapshotting
from k8e.client.operations import Operation
from k8e.client.records import Record

T = TypeVar("T")


class Image(Record):
    """An image that the gateway's host has."""

    name: str
    """Its reference as a whole, or ``tar:`` and the path of an archive."""
    digest: str
    """Of its manifest."""
    layers: tuple[str, ...]
    """Digests, the lowest layer first. Layers are shared among images."""
    size: int
    """Of all its files, in bytes."""
    pulled_at: float
    """Unix time."""
    platform: str = ""
    workdir: str = ""


def _image(data: Mapping[str, Any]) -> Image:
    return Image(
        name=str(data["name"]),
        digest=str(data["digest"]),
        layers=tuple(data["layers"]),
        size=int(data["size"]),
        pulled_at=float(data["pulled_at"]),
        platform=str(data["platform"]),
        workdir=str(data["workdir"]),
    )


def pull(reference: str) -> Operation[Image]:
    """Fetch an image: emits Progress, returns it."""
    call = {"op": "pull_image", "reference": reference, "progress": True}
    return _image((yield from snapshotting.watched(call)))


def _list() -> Operation[list[Image]]:
    told = yield from operations.call({"op": "list_images"})
    return [_image(item) for item in told["images"]]


def _clean(call: Mapping[str, Any]) -> Operation[list[str]]:
    return [str(item) for item in (yield from operations.call(call))["removed_layers"]]


class Imaging:
    """Methods of the blocking client. They need the role admin."""

    def _call(self, operation: Operation[T]) -> T:
        raise NotImplementedError

    def pull_image(self, reference: str) -> Image:
        """Fetch an image from its registry, also if one of this name is there: tags move.

        Args:
            reference: ``host[:port]/name[:tag][@digest]``.
        """
        return self._call(pull(reference))

    def list_images(self) -> list[Image]:
        """The images that the gateway's host has, by name."""
        return self._call(_list())

    def remove_image(self, reference: str) -> list[str]:
        """Forget an image; the digests of the layers that are gone, since nothing uses them."""
        return self._call(_clean({"op": "remove_image", "reference": reference}))

    def prune_images(self) -> list[str]:
        """Remove the layers that no image and no sandbox uses; their digests."""
        return self._call(_clean({"op": "prune_images"}))


class AsyncImaging:
    """The same, of the asynchronous client."""

    async def _call(self, operation: Operation[T]) -> T:
        raise NotImplementedError

    async def pull_image(self, reference: str) -> Image:
        return await self._call(pull(reference))

    async def list_images(self) -> list[Image]:
        return await self._call(_list())

    async def remove_image(self, reference: str) -> list[str]:
        return await self._call(_clean({"op": "remove_image", "reference": reference}))

    async def prune_images(self) -> list[str]:
        return await self._call(_clean({"op": "prune_images"}))
