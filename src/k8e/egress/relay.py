"""Moves bytes between two sockets inside the kernel, by splice: they never become Python's.

All relays share one epoll, which the event loop watches. It is edge-triggered, so each socket is
registered once and nothing is armed or disarmed while bytes flow. A pipe is borrowed for as long as
bytes are in it: an idle connection costs two descriptors.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import fcntl
import os
import select
import socket
import time

from k8e.egress.sniff import Chunked, UnreadableRequest

PIPE_SIZE = 512 * 1024
SPARE_PIPES = 16
COPY_SIZE = 16 * 1024
MOVES = 2  # pipes full that one direction may move before others have their turn
MAX_DISCARDED = 1 << 20  # bytes behind a request that are read and thrown away
GRACE_SECONDS = 5.0

_SPLICE = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK
_WATCHED = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
_BROKEN = select.EPOLLERR | select.EPOLLHUP
_AT_ONCE = 4  # events that are taken from the kernel
TURN_SECONDS = 0.002  # for all relays together, before the loop's other work gets its turn
MAX_LINES = 64  # of a body in chunks that are read at once; it is lines that take time, not bytes
LEAST_COPY = 256

Pipe = tuple[int, int]
Until = int | Chunked | None


class Relays:
    """The resources that all relays of a proxy share."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.trash = bytearray(COPY_SIZE)
        self._epoll = select.epoll()
        self._ends: dict[int, tuple[Relay, _Way, _Way]] = {}
        self._pipes: list[Pipe] = []
        self._waiting: collections.deque[tuple[Relay, _Way]] = collections.deque()
        """Directions that had their share and have more to move."""
        self._going_on = False
        self.loop.add_reader(self._epoll.fileno(), self._on_events)

    def close(self) -> None:
        """Stop; the remaining relays move nothing any more."""
        self.loop.remove_reader(self._epoll.fileno())
        for relay in {id(relay): relay for relay, _, _ in self._ends.values()}.values():
            relay.stop()
        self._waiting.clear()
        self._epoll.close()
        while self._pipes:
            self.drop_pipe(self._pipes.pop())

    def watch(self, end: int, relay: Relay, leaving: _Way, arriving: _Way) -> None:
        self._ends[end] = (relay, leaving, arriving)
        self._epoll.register(end, _WATCHED)

    def forget(self, end: int) -> None:
        if self._ends.pop(end, None) is not None:
            self._epoll.unregister(end)

    def later(self, relay: Relay, way: _Way) -> None:
        """Continue with a direction after those that wait, and after the loop's other work."""
        self._waiting.append((relay, way))
        if not self._going_on:
            self._going_on = True
            self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        until = time.monotonic() + TURN_SECONDS
        try:
            while self._waiting and time.monotonic() < until:
                relay, way = self._waiting.popleft()
                relay.go_on(way)
        finally:
            self._going_on = bool(self._waiting)
            if self._going_on:
                self.loop.call_soon(self._go_on)

    def _on_events(self) -> None:
        until = time.monotonic() + TURN_SECONDS
        while found := self._epoll.poll(0, _AT_ONCE):
            for end, events in found:
                self._on_event(end, events)
            if len(found) < _AT_ONCE or self._epoll.closed or time.monotonic() > until:
                break  # what is left is reported again

    def _on_event(self, end: int, events: int) -> None:
        found = self._ends.get(end)
        if found is None:  # ended by an event before this one
            return
        relay, leaving, arriving = found
        if not relay.dialled:
            relay.check_dialled(broken=bool(events & _BROKEN))
            return
        if events & ~select.EPOLLOUT:
            relay.advance(leaving)
        if events & (select.EPOLLOUT | _BROKEN) and arriving.blocked:
            relay.advance(arriving)
        if events & select.EPOLLERR and leaving.finished:
            relay.fail()  # nothing is read from this end any more, so nothing else would notice

    def pipe(self) -> Pipe:
        if self._pipes:
            return self._pipes.pop()
        made = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a user's pipes may be limited; smaller ones do
            fcntl.fcntl(made[1], fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        return made

    def keep_pipe(self, pipe: Pipe) -> None:
        """Take back an empty pipe."""
        if len(self._pipes) < SPARE_PIPES:
            self._pipes.append(pipe)
        else:
            self.drop_pipe(pipe)

    def drop_pipe(self, pipe: Pipe) -> None:
        os.close(pipe[0])
        os.close(pipe[1])


class _Way:
    """One direction. ``first`` goes ahead of what is read; ``until`` says where reading ends."""

    def __init__(
        self, relays: Relays, source: socket.socket, target: socket.socket, first: bytes
    ) -> None:
        self.until: Until = None
        self.finished = False
        self.blocked = False
        self.scheduled = False
        self.moved = 0
        self.discarded = 0
        self._relays = relays
        self._source = source
        self._target = target
        self._first = memoryview(first)
        self._pipe: Pipe | None = None
        self._held = 0
        self.at_end = False
        self.unread = b""
        """What was received of the source before, and is to be read first."""
        self._copy_size = LEAST_COPY

    def release(self) -> None:
        self.finished = True
        if self._pipe is not None:
            self._relays.drop_pipe(self._pipe)
            self._pipe = None

    def flush(self) -> bool:
        """Write what was read; False if it cannot be written now or there is nothing to write."""
        self.blocked = True
        try:
            while self._first:
                self._first = self._first[self._target.send(self._first) :]
            while self._held and self._pipe is not None:
                count = os.splice(self._pipe[0], self._target.fileno(), self._held, flags=_SPLICE)
                self._held -= count
                self.moved += count
            if self.at_end and not self.finished:
                self.finished = True
                self._target.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            return False
        self.blocked = False
        if self._pipe is not None:
            self._relays.keep_pipe(self._pipe)
            self._pipe = None
        return not self.finished

    def fill(self) -> bool:
        """Read bytes, or the end; False if there is nothing to read now."""
        try:
            count = self._discard() if self._is_over() else self._read()
        except BlockingIOError:
            return False
        self.at_end = not count
        return True

    def _is_over(self) -> bool:
        return self.until == 0 or (isinstance(self.until, Chunked) and self.until.done)

    def _read(self) -> int:
        if isinstance(self.until, Chunked):
            return self._copy(self.until)
        size = PIPE_SIZE if self.until is None else min(PIPE_SIZE, self.until)
        pipe = self._relays.pipe()
        try:
            self._held = os.splice(self._source.fileno(), pipe[1], size, flags=_SPLICE)
        finally:
            if self._held:
                self._pipe = pipe
            else:
                self._relays.keep_pipe(pipe)
        if self.until is not None:
            self.until -= self._held
        return self._held

    def _copy(self, chunks: Chunked) -> int:
        """Follow a chunked body, whose end only its bytes show."""
        size, lines = self._copy_size, chunks.lines
        data, self.unread = self.unread[:size], self.unread[size:]
        data = data or self._source.recv(size)
        used = chunks.feed(data)
        few = chunks.lines - lines <= MAX_LINES
        self._copy_size = min(2 * size, COPY_SIZE) if few else max(size // 2, LEAST_COPY)
        self._first = memoryview(data)[:used]
        self.discarded += len(data) - used
        if chunks.done:
            self.discarded += len(self.unread)
            self.unread = b""
        return len(data)

    def _discard(self) -> int:
        count = self._source.recv_into(self._relays.trash)
        self.discarded += count
        return count


class Relay:
    """Connects a client and a server until both are done, either breaks off, or it is stopped.

    ``sent`` and ``got`` are what goes to the server and to the client first. With ``until``, the
    client's bytes go to the server only up to there: a length, or the end of a body in chunks, of
    which ``unread`` has been received already. The server may still be being dialled.
    """

    def __init__(
        self,
        relays: Relays,
        ends: tuple[socket.socket, socket.socket],
        sent: bytes = b"",
        got: bytes = b"",
        until: Until = None,
        unread: bytes = b"",
    ) -> None:
        client, server = ends
        self.done: asyncio.Future[bool] = relays.loop.create_future()
        """Whether both sides ended in an orderly way."""
        self._relays = relays
        self._ends = client.fileno(), server.fileno()
        self._up = _Way(relays, client, server, sent)
        self._up.until, self._up.unread = until, unread
        self._down = _Way(relays, server, client, got)
        self._ways = self._up, self._down
        self._limited = until is not None
        self._timer: asyncio.TimerHandle | None = None
        self._server = server
        self.dialled = False
        self.error: OSError | UnreadableRequest | None = None
        """The first that came up."""

    def start(self, dial_seconds: float, discarded: int = 0) -> None:
        """Begin; ``discarded`` of the client's bytes were beyond ``until`` already."""
        self._up.discarded = discarded
        self._timer = self._relays.loop.call_later(dial_seconds, self._give_up_dialling)
        self._relays.watch(self._ends[0], self, self._up, self._down)
        self._relays.watch(self._ends[1], self, self._down, self._up)
        self.check_dialled()

    def check_dialled(self, *, broken: bool = False) -> None:
        """Begin to move bytes if the server was reached; ``broken`` says that an end is dead."""
        number = self._server.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number or broken:
            self.error = OSError(number, os.strerror(number)) if number else None
            self.fail()
            return
        try:
            self._server.getpeername()
        except OSError:
            return  # not yet
        self.dialled = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for way in self._ways:
            self.advance(way)

    def _give_up_dialling(self) -> None:
        self.error = TimeoutError("it does not answer")
        self.fail()

    def advance(self, way: _Way) -> None:
        """Move what can be moved in one direction, up to a fair share."""
        if self.done.done() or way.finished or way.scheduled:
            return
        for _ in range(MOVES):
            try:
                if not way.flush():
                    break
            except OSError as error:
                # The other direction may still hold an answer; it finds the end by itself.
                way.release()
                self.error = self.error or error
                break
            try:
                if not way.fill():
                    break
            except (OSError, UnreadableRequest) as error:
                self.error = self.error or error
                self.fail()
                return
            if way.at_end and self.error is not None:
                # The writer was told of the reset, so the reader sees only an end.
                self.fail()
                return
        else:
            way.scheduled = True
            self._relays.later(self, way)
        self._check()

    def go_on(self, way: _Way) -> None:
        """Continue a direction that had used up its share."""
        way.scheduled = False
        self.advance(way)

    def _check(self) -> None:
        """End the relay if both sides are done."""
        if all(way.finished for way in self._ways):
            self._end(self.error is None)
        elif self._up.discarded > MAX_DISCARDED:
            self.fail()
        elif self._limited and self._timer is None and (self._up.discarded or self._down.finished):
            # One request was let through. A client that asks for more gets no answer, and one
            # that has got its answer has nothing to wait for.
            self._wait()

    def _wait(self) -> None:
        moved = self._down.moved
        self._timer = self._relays.loop.call_later(GRACE_SECONDS, self._give_up, moved)

    def _give_up(self, moved: int) -> None:
        if self._down.moved == moved and not self._down.blocked:
            self._end(True)  # what was written is still delivered
        else:
            self._wait()

    def fail(self) -> None:
        """Break off both sides."""
        self._end(False)

    def _end(self, orderly: bool) -> None:
        if not self.done.done():
            self.done.set_result(orderly)
        self.stop()

    def stop(self) -> None:
        """Release the sockets; their owner closes them."""
        self.done.cancel()
        if self._timer is not None:
            self._timer.cancel()
        for end in self._ends:
            self._relays.forget(end)
        for way in self._ways:
            way.release()
