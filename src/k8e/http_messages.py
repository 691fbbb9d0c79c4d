"""HTTP messages from untrusted peers: h11, with bounds on the work that a message can cause.

h11 bounds the bytes of a head. But to read one of one-letter fields takes a hundred times as long
as one of the same size that a browser sends, and so does a body of chunks that have a byte each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import h11

MAX_FIELDS = 200
"""Lines of a head. Browsers send some twenty."""
MAX_CRUMBS = 1024
"""Pieces of a body that may be small …"""
CRUMB = 16  # … which means fewer bytes than this, on average
TURN = 32
"""Events of one message in a row: one byte each would hold everybody else up."""
CRUMBS = 32 * TURN  # bytes in that many events …
CRUMBS_PAUSE = 0.002  # … after which a side waits this many seconds: they are work for nothing
_SHORTEST = 4 * MAX_FIELDS  # bytes of a head with more fields; shorter ones need no look


class HttpConnection(h11.Connection):
    """One side of a connection, and the messages of the other side."""

    _pieces = _size = 0

    def next_event(self) -> Any:
        """h11's next event; RemoteProtocolError for a message that is only made to cause work."""
        if self.their_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._check_fields()
        event = super().next_event()
        if self.our_role is h11.SERVER:
            self._check_piece(event)
        return event

    def _check_fields(self) -> None:
        head = self.trailing_data[0]
        if len(head) < _SHORTEST:
            return
        ends = [at for end in (b"\n\r\n", b"\n\n") if (at := head.find(end)) >= 0]
        if head.count(b"\n", 0, min(ends, default=len(head))) > MAX_FIELDS:
            raise h11.RemoteProtocolError(f"more than {MAX_FIELDS} header fields", 431)

    def _check_piece(self, event: Any) -> None:
        if isinstance(event, h11.Request):
            self._pieces = self._size = 0
        elif isinstance(event, h11.Data):
            self._pieces += 1
            self._size += len(event.data)
            if self._pieces > MAX_CRUMBS and self._size < CRUMB * self._pieces:
                raise h11.RemoteProtocolError("the body comes in too many small pieces", 400)


class HttpStream(HttpConnection):
    """The same for bodies that are passed on piece by piece."""

    def _check_piece(self, event: Any) -> None:
        pass


async def joined(
    stream: HttpStream, receive: Callable[[], Awaitable[bytes]]
) -> AsyncGenerator[Any]:
    """The events of the other side, with data that came together as one piece of bytes."""
    parts: list[bytes] = []
    turns = 0
    while True:
        event = stream.next_event()
        if isinstance(event, h11.Data):
            parts.append(bytes(event.data))
            turns += 1
            if turns < TURN:
                continue
            await asyncio.sleep(CRUMBS_PAUSE if sum(map(len, parts)) < CRUMBS else 0)
        turns = 0
        if parts:
            yield b"".join(parts)
            parts = []
        if event is h11.NEED_DATA:
            stream.receive_data(await receive())
        elif not isinstance(event, h11.Data):
            yield event
