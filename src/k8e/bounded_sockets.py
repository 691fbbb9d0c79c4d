"""A connection of somebody who is not trusted, with a bounded number of bytes either way."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import cast

UNREAD = 64 << 10
"""Bytes that may wait here before their sender has to."""
UNSENT = 64 << 10
"""Bytes that may wait for the client before whoever sends them has to."""
SLOW_SECONDS = 300.0
"""How long a client may leave bytes that wait for it, or withhold bytes that it must send."""
_RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: do not linger at all


class Gone(Exception):
    """The client has left, or is too slow."""


class BoundedSocket(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        """The client will send no more, or is gone altogether."""
        self._transport: asyncio.Transport | None = None
        self._unread = bytearray()
        self._readable = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._lost = False

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=UNSENT)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        self._readable.set()
        if len(self._unread) >= UNREAD and self._transport is not None:
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        self.left.set()
        self._readable.set()
        return True  # it may still want our answer

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self.left.set()
        self._readable.set()
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # Called by the code that serves the client.

    async def receive(self) -> bytes:
        """Bytes from the client; empty if it will send no more."""
        while not self._unread:
            if self.left.is_set():
                return b""
            self._readable.clear()
            await self._readable.wait()
        data = bytes(self._unread)
        self._unread.clear()
        if self._transport is not None and not self.left.is_set():
            self._transport.resume_reading()
        return data

    async def send(self, data: bytes) -> None:
        """Send bytes, and wait while too many are on their way."""
        if self._lost or self._transport is None:
            raise Gone
        self._transport.write(data)
        if not self._writable.is_set():
            try:
                async with asyncio.timeout(SLOW_SECONDS):
                    await self._writable.wait()
            except TimeoutError:
                raise Gone from None

    def end(self, last: bytes = b"") -> None:
        """Say that no more comes from us, after some last bytes."""
        if self._transport is not None and not self._transport.is_closing():
            if last:
                self._transport.write(last)
            # With TLS there is no half of a connection; one that is gone already is told later.
            with contextlib.suppress(OSError, NotImplementedError):
                self._transport.write_eof()

    def close(self) -> None:
        """Close once the bytes are on their way, or the client does not take them."""
        if self._transport is not None:
            self._transport.close()
            if self._transport.get_write_buffer_size():
                asyncio.get_running_loop().call_later(SLOW_SECONDS, self.abort)

    def abort(self) -> None:
        """Leave at once, so that the client knows that something is missing."""
        if self._transport is not None and not self._lost:
            # Else the kernel would end it in order, which to an old client is the answer's end.
            found: socket.socket = self._transport.get_extra_info("socket")
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._transport.abort()
