"""The warm pool in the SDK. Both clients' methods, side by side."""

from __future__ import annotations

from typing import Any, TypeVar

from k8e.client import operations
from k8e.client.operations import Operation

T = TypeVar("T")


def _listing() -> Operation[list[dict[str, Any]]]:
    return (yield from operations.call({"op": "pool"}))["pools"]


def _set(
    template: str, runtime: str, least: int | None, most: int | None, wait: bool
) -> Operation[dict[str, Any]]:
    call = {"op": "set_pool", "template": template, "runtime": runtime, "wait": wait}
    sizes = {key: value for key, value in (("min", least), ("max", most)) if value is not None}
    return (yield from operations.call(call | sizes))["pool"]


def _drain(template: str) -> Operation[int]:
    return (yield from operations.call({"op": "drain_pool", "template": template}))["drained"]


class Pooling:
    """Methods of the blocking client."""

    def _call(self, operation: Operation[T]) -> T:
        raise NotImplementedError

    def pool(self) -> list[dict[str, Any]]:
        """Which sandboxes are ready: a dictionary for each template and runtime."""
        return self._call(_listing())

    def set_pool(
        self,
        template: str = "",
        runtime: str = "",
        *,
        min_ready: int | None = None,
        max_ready: int | None = None,
        wait: bool = False,
    ) -> dict[str, Any]:
        """Change how many sandboxes are ready, until the gateway ends.

        Args:
            template: of which template; the default one if empty.
            runtime: on which runtime; the usual one if empty.
            min_ready: how many at least.
            max_ready: how many at most.
            wait: return when ``min_ready`` of them are ready.
        """
        return self._call(_set(template, runtime, min_ready, max_ready, wait))

    def drain_pool(self, template: str = "") -> int:
        """Replace the ready sandboxes of a template, or all; how many they were."""
        return self._call(_drain(template))


class AsyncPooling:
    """The same, of the asynchronous client."""

    async def _call(self, operation: Operation[T]) -> T:
        raise NotImplementedError

    async def pool(self) -> list[dict[str, Any]]:
        return await self._call(_listing())

    async def set_pool(
        self,
        template: str = "",
        runtime: str = "",
        *,
        min_ready: int | None = None,
        max_ready: int | None = None,
        wait: bool = False,
    ) -> dict[str, Any]:
        return await self._call(_set(template, runtime, min_ready, max_ready, wait))

    async def drain_pool(self, template: str = "") -> int:
        return await self._call(_drain(template))
