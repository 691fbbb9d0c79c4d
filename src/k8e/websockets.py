"""The bytes of a WebSocket between its client and a server, neither of which is trusted.

What they say to each other is theirs, and passes as it is: messages, pings, close codes. Only where
one of them is cut off does the client get a close code of ours, between two frames of the server's,
so that it knows why and need not wait for a time-out of its own.
"""

from __future__ import annotations

import asyncio
import struct
import time
from typing import Protocol

from k8e import errors
from k8e.bounded_sockets import BoundedSocket, Gone

IDLE_SECONDS = 3600.0
"""A WebSocket on which nothing moves for this long is given up."""
LINGER_SECONDS = 2.0
"""How long one side may go on when the other has ended."""
GOING_AWAY, BROKEN = 1001, 1011
_CLOSE, _FINAL, _MASKED = 0x8, 0x80, 0x80
_MAX_HEAD = 14
_MAX_HEADS = 1024  # frames in one piece of bytes; more are only there to make work


class ServerLost(Exception):
    """The connection to the server has ended in another way than it should."""


class ServerSide(Protocol):
    """A connection to a server."""

    async def send(self, data: bytes) -> None: ...
    async def receive(self) -> bytes:
        """The next bytes; none at the end of its side."""
        ...

    async def end(self) -> None:
        """Tell the server that no more comes."""
        ...


class Frames:
    """Where the frames of one side end: only there may another one come between them."""

    def __init__(self) -> None:
        self._head = b""
        self._rest = 0
        self._lost = False
        self.closed = False
        """It has sent a close frame."""

    def feed(self, data: bytes) -> None:
        at = heads = 0
        while at < len(data) and not self._lost:
            if self._rest:
                step = min(self._rest, len(data) - at)
                self._rest -= step
                at += step
                continue
            heads += 1
            seen = self._head + data[at : at + _MAX_HEAD - len(self._head)]
            size, self._rest = _measure(seen)
            if heads > _MAX_HEADS:
                self._lost = True
            elif not size:
                self._head = seen
                return
            else:
                at += size - len(self._head)
                self._head = b""
                self.closed = self.closed or seen[0] & 0x0F == _CLOSE

    @property
    def may_close(self) -> bool:
        """Whether a close frame of ours would be understood now."""
        return not (self._lost or self.closed or self._rest or self._head)


def _measure(head: bytes) -> tuple[int, int]:
    """The size of a frame's head and that of what follows it; nothing if the head goes on."""
    if len(head) < 2:
        return 0, 0
    length = head[1] & ~_MASKED
    more = {126: 2, 127: 8}.get(length, 0)
    size = 2 + more + (4 if head[1] & _MASKED else 0)
    if len(head) < size:
        return 0, 0
    return size, int.from_bytes(head[2 : 2 + more]) if more else length


def close_frame(code: int, reason: str) -> bytes:
    """A close frame as servers send it, with a reason of at most 123 bytes."""
    body = struct.pack("!H", code) + reason.encode()[:123]
    return bytes((_FINAL | _CLOSE, len(body))) + body


async def relay(
    client: BoundedSocket,
    server: ServerSide,
    *,
    client_said: bytes = b"",
    server_said: bytes = b"",
) -> None:
    """Bytes both ways until both sides have ended; then the client's connection is closed.

    What each of them has said already comes first: ``client_said`` came with the client's request,
    ``server_said`` with the server's answer.
    """
    frames, pulse = Frames(), _Pulse()
    to_server = asyncio.create_task(_to_server(client, server, client_said, pulse))
    to_client = asyncio.create_task(_to_client(server, client, server_said, frames, pulse))
    ways = {to_server, to_client}
    farewell = (GOING_AWAY, "the connection was ended by what lies between")
    try:
        while not (to_server.done() or to_client.done()):
            rest = IDLE_SECONDS - pulse.age()
            if rest <= 0:
                farewell = (GOING_AWAY, f"nothing happened for {IDLE_SECONDS:g} seconds")
                return
            await asyncio.wait(ways, timeout=rest, return_when=asyncio.FIRST_COMPLETED)
        if not _has_failed(to_client):  # else nobody is left to wait for
            await asyncio.wait(ways, timeout=LINGER_SECONDS)
        if _has_failed(to_client):
            farewell = (BROKEN, "the connection to the server was lost")
    finally:
        for way in ways:
            way.cancel()
        await asyncio.wait(ways)
        _part(client, frames, *farewell)
        _raise_unexpected(ways)


def _part(client: BoundedSocket, frames: Frames, code: int, reason: str) -> None:
    """Close the client's connection: in order, if it can be told, or has been told, why."""
    if frames.may_close:
        client.end(close_frame(code, reason))
        client.close()
    elif frames.closed:
        client.close()
    else:
        client.abort()


def _has_failed(way: asyncio.Task[None]) -> bool:
    return way.done() and way.exception() is not None


def _raise_unexpected(ways: set[asyncio.Task[None]]) -> None:
    for way in ways:
        error = None if way.cancelled() else way.exception()
        if error is not None and not isinstance(error, _EXPECTED):
            raise error


class _Pulse:
    """When something last moved."""

    def __init__(self) -> None:
        self.beat()

    def beat(self) -> None:
        self._last = time.monotonic()

    def age(self) -> float:
        return time.monotonic() - self._last


_EXPECTED = (Gone, ServerLost, errors.K8eError, OSError)


async def _to_server(client: BoundedSocket, server: ServerSide, said: bytes, pulse: _Pulse) -> None:
    data = said
    while data or (data := await client.receive()):
        pulse.beat()
        await server.send(data)
        data = b""
    await server.end()


async def _to_client(
    server: ServerSide, client: BoundedSocket, said: bytes, frames: Frames, pulse: _Pulse
) -> None:
    data = said
    while data or (data := await server.receive()):
        pulse.beat()
        frames.feed(data)
        await client.send(data)
        data = b""
    if frames.may_close:
        raise ServerLost("it closed the connection without a word")
    client.end()
