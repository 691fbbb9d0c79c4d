"""The one request of a call, read after its caller is known, and bounded for each caller.

gRPC would read a message of any allowed size before it asks us who sends it. So every call is taken
as a stream, whose first message we read when we want it. Large messages take one of few places that
each caller has: a thousand of them at once would be the gateway's whole memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any
from weakref import WeakValueDictionary

from google.protobuf.message import DecodeError

from k8e import errors
from k8e.model import Principal

PLACES = 8
"""Requests of one caller that are read, or are large and being worked on, at once."""
LARGE = 1 << 20  # bytes of a request that keeps its place until its call has ended
SECONDS = 120.0  # for a request to come in


def reading(kind: Any) -> Callable[[bytes], Any]:
    """How messages of a kind are read; what is none is the client's mistake, not ours."""

    def read(data: bytes) -> Any:
        try:
            return kind.FromString(data)
        except DecodeError:
            raise errors.InvalidRequest(f"this is no {kind.DESCRIPTOR.name}") from None

    return read


class Receiver:
    """Reads requests."""

    def __init__(self) -> None:
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def request(
        self, principal: Principal, messages: AsyncIterator[Any]
    ) -> AsyncGenerator[Any]:
        """The request of a call that sends one."""
        places = self._places.get(principal.name)
        if places is None:
            places = self._places[principal.name] = asyncio.Semaphore(PLACES)
        await places.acquire()
        held = True
        try:
            request = await _first(messages)
            if request.ByteSize() < LARGE:
                places.release()
                held = False
            yield request
        finally:
            if held:
                places.release()


async def _first(messages: AsyncIterator[Any]) -> Any:
    try:
        async with asyncio.timeout(SECONDS):
            async for message in messages:
                return message
    except TimeoutError:
        raise errors.TimedOut(f"the request did not come in within {SECONDS:g} s") from None
    raise errors.InvalidRequest("the call has no request")
