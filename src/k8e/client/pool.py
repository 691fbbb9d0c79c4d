"""The warm pool: sandboxes that are ready for sessions."""

from __future__ import annotations

from typing import Any

from k8e.client import operations
from k8e.client.operations import Operation


def listing() -> Operation[list[dict[str, Any]]]:
    return (yield from operations.call({"op": "pool"}))["pools"]


def set_sizes(
    template: str, runtime: str, least: int | None, most: int | None, wait: bool
) -> Operation[dict[str, Any]]:
    call = {"op": "set_pool", "template": template, "runtime": runtime, "wait": wait}
    sizes = {key: value for key, value in (("min", least), ("max", most)) if value is not None}
    return (yield from operations.call(call | sizes))["pool"]


def drain(template: str) -> Operation[int]:
    return (yield from operations.call({"op": "drain_pool", "template": template}))["drained"]
