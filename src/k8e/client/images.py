"""Images: root file systems from registries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k8e.client import operations, snapshots
from k8e.client.operations import Operation
from k8e.client.records import Record


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
    return _image((yield from snapshots.watched(call)))


def listing() -> Operation[list[Image]]:
    told = yield from operations.call({"op": "list_images"})
    return [_image(item) for item in told["images"]]


def removed_layers(call: Mapping[str, Any]) -> Operation[list[str]]:
    return [str(item) for item in (yield from operations.call(call))["removed_layers"]]
