"""Bodies of requests and answers, in constant memory unless a bound is given."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from starlette.types import Receive


class TooLarge(Exception):
    """A body has more bytes than it may."""


class Left(Exception):
    """The client has left in the middle of its request."""


async def pieces(receive: Receive) -> AsyncGenerator[bytes]:
    """A request's body as it comes; Left if the client leaves before its end."""
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
