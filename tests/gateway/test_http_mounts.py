"""A dialect in the HTTP app: how many requests it takes, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from k8e import errors
from k8e.egress.dns_answers import Share
from k8e.gateway.http import mounts as http_mounts
from k8e.gateway.http.mounts import Message, Mount, MountClosed

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(30)]


class Waiting:
    """A dialect whose answers wait for ``go``."""

    def __init__(self, *, broken: bool = False) -> None:
        self.go = asyncio.Event()
        self.begun = asyncio.Queue[None]()
        self.closed = False
        self._broken = broken

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        if self._broken:
            raise RuntimeError("broken")
        yield
        self.closed = True

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun.put_nowait(None)
        await self.go.wait()


async def receive() -> Message:
    raise AssertionError("nobody asks")


async def send(message: Message) -> None:
    raise AssertionError("nobody answers")


def share() -> Share:
    """What a gateway's callers have together."""
    total, each = http_mounts.MAX_ALL_REQUESTS, http_mounts.MAX_REQUESTS
    return Share(total, each, http_mounts.LEAST_REQUESTS)


def begin(mount: Mount, method: str = "POST") -> asyncio.Task[None]:
    return asyncio.create_task(mount.serve({"method": method}, receive, send))


async def settle(dialect: Waiting, number: int) -> None:
    async with asyncio.timeout(5):
        for _ in range(number):
            await dialect.begun.get()


async def test_caller_has_so_many_requests_and_no_more() -> None:
    dialect = Waiting()
    mount = Mount(dialect, share())
    tasks = [begin(mount) for _ in range(http_mounts.MAX_REQUESTS)]
    await settle(dialect, len(tasks))
    with pytest.raises(errors.LimitExceeded):
        await begin(mount)
    dialect.go.set()
    await asyncio.gather(*tasks)
    await begin(mount)
    await mount.close()
    assert dialect.closed


async def test_callers_that_take_all_they_can_leave_requests_to_others() -> None:
    dialect, together = Waiting(), share()
    mounts = [Mount(dialect, together) for _ in range(6)]
    tasks: list[asyncio.Task[None]] = []
    for mount in mounts[:4]:
        for _ in range(http_mounts.MAX_REQUESTS + 1):
            tasks.append(begin(mount))
            await asyncio.sleep(0)
    refused = [task for task in tasks if task.done()]
    assert len(tasks) - len(refused) < http_mounts.MAX_ALL_REQUESTS
    for task in refused:
        with pytest.raises(errors.LimitExceeded):
            await task
    others = [begin(mount) for mount in mounts[4:] for _ in range(http_mounts.LEAST_REQUESTS)]
    await settle(dialect, len(tasks) - len(refused) + len(others))
    dialect.go.set()
    await asyncio.gather(*others, *(task for task in tasks if task not in refused))
    assert together.taken == 0
    for mount in mounts:
        await mount.close()


async def test_answers_get_their_time_and_streams_end_at_once() -> None:
    dialect = Waiting()
    mount = Mount(dialect, share())
    stream, answer = begin(mount, "GET"), begin(mount)
    await settle(dialect, 2)
    closing = asyncio.create_task(mount.close(grace=20))
    with pytest.raises(MountClosed):
        await stream
    assert not answer.done()
    dialect.go.set()
    await answer
    await closing
    assert dialect.closed


async def test_answer_that_takes_too_long_is_ended() -> None:
    dialect = Waiting()
    mount = Mount(dialect, share())
    answer = begin(mount)
    await settle(dialect, 1)
    await mount.close(grace=0.01)
    with pytest.raises(MountClosed):
        await answer


async def test_broken_dialect_answers_nobody() -> None:
    mount = Mount(Waiting(broken=True), share())
    with pytest.raises(MountClosed):
        await begin(mount)
    assert mount.ended
    await mount.close()
