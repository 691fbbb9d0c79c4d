"""K8E's older stream by itself: it lives while its client does, and says so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from k8e.mcp import http_legacy, server
from k8e.mcp.client import ToolClient
from k8e.mcp.http_legacy import Streams
from k8e.mcp.server import World

pytestmark = pytest.mark.anyio
PATIENCE = 60


class Reader:
    """A client of one stream."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.heard.put(message)

    async def next(self) -> bytes:
        async with asyncio.timeout(PATIENCE):
            return (await self.heard.get()).get("body", b"")


@pytest.fixture
def streams() -> Streams:
    world = World(client=ToolClient("unix:/nowhere"))
    return Streams(server.build(world, server.with_session), world)


async def test_stream_tells_its_id_and_then_that_it_lives(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_legacy, "PING_SECONDS", 0.01)
    reader = Reader()
    running = asyncio.create_task(streams.stream({"type": "http"}, reader.receive, reader.send))
    assert await reader.next() == b""  # the head
    first = await reader.next()
    assert first.startswith(b"event: session\ndata: ")
    stream_id = first.split()[-1].decode()
    assert stream_id in streams
    assert await reader.next() == b": ping\n\n"
    reader.left.set()
    async with asyncio.timeout(PATIENCE):
        await running
    assert stream_id not in streams


def test_pings_are_as_often_as_k8es() -> None:
    assert http_legacy.PING_SECONDS == 15
