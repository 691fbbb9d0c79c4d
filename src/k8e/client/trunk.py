"""One connection to the local gateway for many operations at once.

Each operation that is only called, and neither streamed from nor fed, gets a lane: a channel on the
shared connection. Frames of all lanes in one turn of the event loop are sent together, and one
reader serves all. Nothing waits for a slow reader, since callers take answers in at once; streams,
uploads and interactive programs, which may be slow, have connections of their own.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque

from k8e import errors
from k8e.client import local
from k8e.guest import wire

MAX_LANES = 512  # half of what the gateway allows on one connection
MAX_PUT_OFF = 8  # frames; with more of them the gateway may begin
LAST_CHANNEL = 0xFFFFFFFF


class Lane:
    """One operation on a shared connection."""

    __slots__ = ("_ended", "_frames", "_trunk", "_waiter", "channel", "lost", "sent")

    def __init__(self, trunk: Trunk) -> None:
        self.channel = 0
        self.sent = 0
        """The number of its call among all frames that were sent on the connection."""
        self.lost: errors.GatewayUnreachable | None = None
        self._trunk = trunk
        self._frames: deque[tuple[int, bytes]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False

    def begin(self) -> None:
        self._trunk.open(self)

    async def send(self, kind: int, body: bytes | memoryview) -> None:
        self._ended = self._ended or kind == wire.CANCEL
        self._trunk.send(self, kind, body)

    async def receive(self) -> tuple[int, bytes]:
        while not self._frames:
            if self.lost is not None:
                raise self.lost
            self._waiter = self._trunk.loop.create_future()
            await self._waiter
        return self._frames.popleft()

    def is_fresh(self) -> bool:
        return self.lost is None

    async def close(self) -> None:
        """End the operation: the gateway treats it as if its connection had ended."""
        if not self._ended and self.lost is None:
            self._trunk.send(self, wire.CANCEL, b"")
        self.end()

    def end(self) -> None:
        """Stop listening to this operation."""
        self._trunk.forget(self)

    # Called by the trunk.

    def hear(self, kind: int, body: bytes) -> None:
        self._ended = self._ended or kind == wire.ERROR
        self._frames.append((kind, body))
        self._wake()

    def lose(self, because: errors.GatewayUnreachable) -> None:
        self.lost = because
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Trunk:
    """A connection that lanes share, on the event loop that made it."""

    def __init__(self, sock: socket.socket) -> None:
        self.loop = asyncio.get_running_loop()
        self._socket = sock
        self._splitter = wire.Splitter(wire.MAX_REQUEST)
        self._buffer = bytearray(local.SMALL_READ)
        self._lanes: dict[int, Lane] = {}
        self._channel = 0
        self._frames: list[bytes | memoryview] = []  # not sent yet
        self._sent = 0  # how many frames were to be sent
        self._gone = 0  # how many of them the kernel has taken, and may have given to the gateway
        self._spoken = False  # a frame was sent in this turn of the loop
        self._waiting = False  # for the kernel to take more
        self._reset = False  # the kernel reports that the gateway left with something unread
        self._deaf = False  # the gateway reads no more
        self._last = LAST_CHANNEL  # the calls that the gateway has read
        self._open = True
        self._leaving = False
        self.loop.add_reader(sock, self._read)

    @property
    def usable(self) -> bool:
        """Whether one more operation may begin."""
        room = len(self._lanes) < MAX_LANES and self._channel < LAST_CHANNEL
        return room and self._open and not self._deaf

    def open(self, lane: Lane) -> None:
        self._channel += 1
        lane.channel = self._channel
        if self._open:
            self._lanes[lane.channel] = lane
        else:
            lane.lose(local.closed(unread=True))  # between being given and being used

    def forget(self, lane: Lane) -> None:
        self._lanes.pop(lane.channel, None)
        if self._leaving and not self._lanes:
            self._close()

    def leave(self) -> None:
        """Close when the last operation has ended."""
        self._leaving = True
        if not self._lanes:
            self._close()

    # Sending.

    def send(self, lane: Lane, kind: int, body: bytes | memoryview) -> None:
        """Send a frame: the first in a turn of the event loop at once, the others together."""
        if not self._open:
            return
        self._sent += 1
        if kind == wire.CALL:
            lane.sent = self._sent
        self._frames.append(wire.HEADER.pack(len(body), kind, lane.channel) + body)
        if not self._spoken:
            self._spoken = True
            self.loop.call_soon(self._turned)
            self._flush()
        elif len(self._frames) >= MAX_PUT_OFF:
            self._flush()

    def _turned(self) -> None:
        self._spoken = False
        self._flush()

    def _flush(self) -> None:
        if not self._frames or self._waiting or not self._open:
            return
        if len(self._frames) > 1:
            self._frames = [b"".join(self._frames)]
        count = 0
        try:
            if not self._deaf:
                count = self._socket.send(self._frames[0])
        except BlockingIOError:
            pass
        except OSError as error:
            # What the gateway said before it closed is still to be read.
            self._reset = isinstance(error, ConnectionResetError)
            self._deaf = True
        if count == len(self._frames[0]):
            self._frames.clear()
            self._gone = self._sent
        elif self._deaf:
            self._frames.clear()
        else:
            self._frames[0] = memoryview(self._frames[0])[count:]
            if count:
                self._gone = self._sent - 1  # at most: a part of the last one is left
            self._waiting = True
            self.loop.add_writer(self._socket, self._writable)

    def _writable(self) -> None:
        self._waiting = False
        self.loop.remove_writer(self._socket)
        self._flush()

    # Receiving.

    def _read(self) -> None:
        try:
            count = self._socket.recv_into(self._buffer)
            if count:
                self._hear(self._splitter.feed(memoryview(self._buffer)[:count]))
            else:
                self._lose()
        except BlockingIOError:
            pass
        except wire.WireError as error:
            self._lose(f"the gateway sent bytes that are not k8e's protocol: {error}")
        except OSError:
            self._reset = True
            self._lose()

    def _hear(self, frames: list[tuple[int, int, bytes]]) -> None:
        for kind, channel, body in frames:
            lane = self._lanes.get(channel)
            if lane is not None:
                lane.hear(kind, body)
            elif kind == wire.GOODBYE and len(body) == wire.CREDIT_BODY.size:
                self._deaf = True
                self._last = wire.CREDIT_BODY.unpack(body)[0]
            # Otherwise it crossed with the end of the operation.

    # Ending.

    def _lose(self, problem: str = "") -> None:
        lanes = list(self._lanes.values())
        self._close()
        for lane in lanes:
            lane.lose(local.unreachable(problem) if problem else self._explain(lane))

    def _explain(self, lane: Lane) -> errors.GatewayUnreachable:
        """The error of a lost call: unread if it was not sent, or surely not read by the gateway.

        That the gateway left something unread is certain of the last frame alone.
        """
        left = lane.sent > self._gone or lane.channel > self._last
        return local.closed(unread=left or (self._reset and lane.sent == self._gone))

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._lanes.clear()
            if not self.loop.is_closed():
                self.loop.remove_reader(self._socket)
                self.loop.remove_writer(self._socket)
            self._socket.close()

    def abandon(self) -> None:
        """Drop a connection that belongs to the process from which this one was forked."""
        self._open = False
        self._socket.close()


class Trunks:
    """The shared connections of one client: one for each event loop that uses it."""

    def __init__(self) -> None:
        self._trunks: dict[asyncio.AbstractEventLoop, Trunk] = {}
        self._pid = os.getpid()

    def lane(self) -> Lane | None:
        """A lane on the open connection; None if a new connection is needed."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            for trunk in self._trunks.values():
                trunk.abandon()
            self._trunks.clear()
        trunk = self._trunks.get(asyncio.get_running_loop())
        return Lane(trunk) if trunk is not None and trunk.usable else None

    def add(self, sock: socket.socket) -> Lane:
        """Share a new connection from now on; its first lane."""
        for loop in [loop for loop in self._trunks if loop.is_closed()]:
            self._trunks.pop(loop).leave()
        loop = asyncio.get_running_loop()
        if loop in self._trunks:
            self._trunks[loop].leave()
        trunk = self._trunks[loop] = Trunk(sock)
        return Lane(trunk)

    def close(self) -> None:
        """Close every connection; one that is in use closes after its last operation."""
        for trunk in self._trunks.values():
            trunk.leave()
        self._trunks.clear()
