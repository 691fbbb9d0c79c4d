"""Bodies of requests, in constant memory or of a bounded size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.types import Receive

from k8e import errors

T = TypeVar("T")

MAX_ARRIVING = 64 << 20
"""Bytes of bodies in JSON that one caller may be sending, as slowly as it likes."""
STALLED_SECONDS = 300.0
"""How long the next bytes of a body may take."""


class TooLarge(Exception):
    """A body has more bytes than it may."""


class Left(Exception):
    """The client has left before the end of its request, or sends or takes nothing any more."""


async def pieces(receive: Receive) -> AsyncGenerator[bytes]:
    """A request's body as it comes; Left if nothing more does."""
    while True:
        try:
            async with asyncio.timeout(STALLED_SECONDS):
                message = await receive()
        except TimeoutError:
            raise Left from None
        if message["type"] == "http.disconnect":
            raise Left
        if body := message.get("body", b""):
            yield body
        if not message.get("more_body"):
            return


class Arriving:
    """The bodies in JSON that one caller is sending."""

    def __init__(self) -> None:
        self._size = 0

    async def whole(self, receive: Receive, limit: int) -> bytes:
        """A request's body of at most ``limit`` bytes."""
        found = bytearray()
        try:
            async with aclosing(pieces(receive)) as coming:
                async for piece in coming:
                    found += piece
                    self._size += len(piece)
                    if len(found) > limit:
                        raise TooLarge(f"the body has more than {limit} bytes")
                    if self._size > MAX_ARRIVING:
                        raise errors.LimitExceeded(
                            f"requests that bring more than {MAX_ARRIVING >> 20} MiB together are "
                            "still being sent",
                            hint="wait until they are sent; PUT of a file takes any size",
                        )
        finally:
            self._size -= len(found)
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
