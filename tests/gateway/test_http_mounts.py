"""A dialect in the HTTP app: how many requests it takes, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from k8e import errors
from k8e.gateway import http_mounts
from k8e.gateway.http_mounts import Ended, Message, Mount

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


def begin(mount: Mount, method: str = "POST") -> asyncio.Task[None]:
    return asyncio.create_task(mount.serve({"method": method}, receive, send))


async def settle(dialect: Waiting, number: int) -> None:
    async with asyncio.timeout(5):
        for _ in range(number):
            await dialect.begun.get()


async def test_caller_has_so_many_requests_and_no_more() -> None:
    dialect = Waiting()
    mount = Mount(dialect)
    tasks = [begin(mount) for _ in range(http_mounts.MAX_REQUESTS)]
    await settle(dialect, len(tasks))
    with pytest.raises(errors.LimitExceeded):
        await begin(mount)
    dialect.go.set()
    await asyncio.gather(*tasks)
    await begin(mount)
    await mount.close()
    assert dialect.closed


async def test_answers_get_their_time_and_streams_end_at_once() -> None:
    dialect = Waiting()
    mount = Mount(dialect)
    stream, answer = begin(mount, "GET"), begin(mount)
    await settle(dialect, 2)
    closing = asyncio.create_task(mount.close(grace=20))
    with pytest.raises(Ended):
        await stream
    assert not answer.done()
    dialect.go.set()
    await answer
    await closing
    assert dialect.closed


async def test_answer_that_takes_too_long_is_ended() -> None:
    dialect = Waiting()
    mount = Mount(dialect)
    answer = begin(mount)
    await settle(dialect, 1)
    await mount.close(grace=0.01)
    with pytest.raises(Ended):
        await answer


async def test_broken_dialect_answers_nobody() -> None:
    mount = Mount(Waiting(broken=True))
    with pytest.raises(Ended):
        await begin(mount)
    assert mount.ended
    await mount.close()
