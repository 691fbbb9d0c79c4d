"""The queue of a reconciler: what waits in it, and for how long."""

from __future__ import annotations

import asyncio

import pytest

from k8e.controller import queue as queues
from k8e.controller.queue import WorkQueue

pytestmark = pytest.mark.anyio
DAY = 86_400.0


async def _nothing(_: int) -> float | None:
    return None


async def test_what_is_gone_leaves_no_time_behind() -> None:
    queue = WorkQueue("numbers", _nothing)
    for number in range(20_000):
        queue.add_after(number, DAY)
        queue.forget(number)
    assert not queue._due  # pyright: ignore[reportPrivateUsage]
    assert len(queue._later) <= 2 * queues._SPARE  # pyright: ignore[reportPrivateUsage]


async def test_of_what_is_forgotten_and_comes_again_the_later_time_counts() -> None:
    seen: list[str] = []

    async def look(key: str) -> float | None:
        seen.append(key)
        return None

    queue = WorkQueue("words", look)
    queue.add_after("gone", 0.0)
    queue.forget("gone")
    queue.add_after("gone", DAY)
    queue.add_after("here", 0.05)
    await _until_seen(queue, seen, "here")
    assert seen == ["here"]


async def _until_seen(queue: WorkQueue[str], seen: list[str], key: str) -> None:
    working = asyncio.create_task(queue.run(1))
    try:
        async with asyncio.timeout(20):
            while key not in seen:  # noqa: ASYNC110 - the queue has no event for tests
                await asyncio.sleep(0.01)
    finally:
        working.cancel()
        await asyncio.wait({working})
