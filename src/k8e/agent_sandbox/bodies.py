"""Bodies of requests and answers, in constant memory unless a bound is given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.types import Receive

from k8e.bounded_sockets import SLOW_SECONDS


class TooLarge(Exception):
    """A body has more bytes than it may."""


class Left(Exception):
    """The client has left in the middle of its request."""


async def pieces(receive: Receive) -> AsyncGenerator[bytes]:
    """A request's body as it comes; Left if the client leaves before its end, or sends nothing."""
    while True:
        try:
            async with asyncio.timeout(SLOW_SECONDS):
                message = await receive()
        except TimeoutError:
            raise Left from None
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
