"""Sockets of the router's namespace: listeners for what is diverted, and sockets for dialling.

Another thread has to make them, so that some are made ahead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Callable

from k8e.egress import tproxy

log = logging.getLogger(__name__)

SPARE_SOCKETS = 8
CLIENT_BUFFER = 128 * 1024  # its other end is on this machine: more would only cost memory
KEEPALIVE_SECONDS = 120
BACKLOG = 1024
_IPV6_TRANSPARENT = 75  # <linux/in6.h>; Python has no name for it
_RESET = struct.pack("ii", 1, 0)

MakeSocket = Callable[[int, int], socket.socket]


def close(end: socket.socket, *, orderly: bool) -> None:
    """Close a socket; what does not end in an orderly way ends with a reset."""
    if not orderly:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    end.close()


class _NoFamily(OSError):
    """This kernel does not know a family of addresses."""


def tune(end: socket.socket) -> None:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)


class Sockets:
    """What a proxy needs; ``make_socket`` makes a socket of the router's namespace, and blocks."""

    def __init__(self, make_socket: MakeSocket) -> None:
        self._make_socket = make_socket
        self._spare: dict[int, list[socket.socket]] = {}
        self._task: asyncio.Task[None] | None = None
        self._making: set[asyncio.Future[list[socket.socket]]] = set()
        self._closed = False

    def listen(self) -> list[socket.socket]:
        """Blocking: listeners for diverted connections."""
        made: list[socket.socket] = []
        try:
            made.append(self._listen(socket.AF_INET, socket.IPPROTO_IP, socket.IP_TRANSPARENT))
            self._spare[socket.AF_INET] = []
            with contextlib.suppress(_NoFamily):
                level = socket.IPPROTO_IPV6
                made.append(self._listen(socket.AF_INET6, level, _IPV6_TRANSPARENT))
                self._spare[socket.AF_INET6] = []
        except BaseException:
            for listener in made:
                listener.close()
            raise
        return made

    def _listen(self, family: int, level: int, transparent: int) -> socket.socket:
        try:
            listener = self._make_socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise _NoFamily(*error.args) from error
        try:
            if family == socket.AF_INET6:
                listener.setsockopt(level, socket.IPV6_V6ONLY, 1)
            listener.setsockopt(level, transparent, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CLIENT_BUFFER)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CLIENT_BUFFER)
            tune(listener)  # what it accepts inherits this
            listener.setblocking(False)
            listener.bind(("", tproxy.PROXY_PORT))
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener

    async def take(self, family: int) -> socket.socket:
        """A socket for dialling."""
        spare = self._spare.get(family, [])
        self.refill()
        return spare.pop() if spare else (await self._in_thread(family, 1))[0]

    async def _in_thread(self, family: int, count: int) -> list[socket.socket]:
        making = asyncio.get_running_loop().run_in_executor(None, self._make, family, count)
        self._making.add(making)
        making.add_done_callback(self._making.discard)
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            # The thread goes on, or was done just now; nobody wants what it makes.
            if making.done():
                _drop(making)
            else:
                making.add_done_callback(_drop)
            raise

    def _make(self, family: int, count: int) -> list[socket.socket]:
        made: list[socket.socket] = []
        try:
            for _ in range(count):
                made.append(self._make_socket(family, socket.SOCK_STREAM))
                made[-1].setsockopt(socket.SOL_SOCKET, socket.SO_MARK, tproxy.UPSTREAM_MARK)
                made[-1].setblocking(False)
                tune(made[-1])
        except BaseException:
            for item in made:
                item.close()
            raise
        return made

    def refill(self) -> None:
        """Make sockets ahead where they are few; returns at once."""
        low = any(len(spare) <= SPARE_SOCKETS // 2 for spare in self._spare.values())
        if low and not self._closed and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._refill())

    async def _refill(self) -> None:
        for family, spare in self._spare.items():
            try:
                spare += await self._in_thread(family, max(SPARE_SOCKETS - len(spare), 0))
            except Exception:
                if not self._closed:
                    log.exception("the egress proxy cannot make sockets")
                return

    def close(self) -> None:
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        for spare in self._spare.values():
            while spare:
                spare.pop().close()

    async def wait_closed(self) -> None:
        """Wait for what other threads are about to make, and for its end."""
        refilling = () if self._task is None else (self._task,)
        await asyncio.gather(*refilling, *self._making, return_exceptions=True)


def _drop(making: asyncio.Future[list[socket.socket]]) -> None:
    if not making.cancelled() and making.exception() is None:
        for item in making.result():
            item.close()
