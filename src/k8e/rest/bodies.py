"""Bodies of requests, in constant memory or of a bounded size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class TooLarge(Exception):
    """A body has more bytes than it may."""


class Left(Exception):
    """The client has left before the end of its request."""


async def pieces(receive: Receive) -> AsyncGenerator[bytes]:
    """A request's body as it comes."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Left
        if body := message.get("body", b""):
            yield body
        if not message.get("more_body"):
            return


async def whole(receive: Receive, limit: int) -> bytes:
    """A request's body of at most ``limit`` bytes."""
    found = bytearray()
    async for piece in pieces(receive):
        found += piece
        if len(found) > limit:
            raise TooLarge(f"the body has more than {limit} bytes")
    return bytes(found)


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do ``work``, which ends when the client leaves; its request's body must have been read."""
    doing = asyncio.create_task(work)
    leaving = asyncio.create_task(_leave(receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise Left
        return doing.result()
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.wait({doing, leaving})


async def _leave(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
