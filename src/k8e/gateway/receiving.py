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
MANY = 64 << 10  # bytes of a message that could have more fields than …
MAX_FIELDS = 20_000
"""… this: to read millions of empty ones would hold everybody up for seconds."""
SECONDS = 120.0  # for a request to come in


def has_too_many(data: bytes) -> bool:
    """Whether a message has more fields than any needs; told without reading what is in them."""
    at, fields = 0, 0
    with contextlib.suppress(IndexError):  # it ends too early, which is not for us to say
        while at < len(data):
            fields += 1
            if fields > MAX_FIELDS:
                return True
            tag, at = _varint(data, at)
            match tag & 7:
                case 0:
                    _, at = _varint(data, at)
                case 1:
                    at += 8
                case 2:
                    size, at = _varint(data, at)
                    at += size
                case 3 | 4:  # groups: what is in them follows
                    pass
                case _:
                    at += 4
    return False


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80 or shift > 63:
            return number, at


def reading(kind: Any) -> Callable[[bytes], Any]:
    """How messages of a kind are read; what is none is the client's mistake, not ours."""

    def read(data: bytes) -> Any:
        if len(data) > MANY and has_too_many(data):
            raise errors.InvalidRequest(
                f"this {kind.DESCRIPTOR.name} has more than {MAX_FIELDS} fields and items",
                hint="send fewer hosts, variables or packages",
            )
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
