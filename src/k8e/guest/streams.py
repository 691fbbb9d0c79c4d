"""Numbered, bounded output of programs, and input that waits until a program takes it.

Every byte has a sequence number, counted over stdout and stderr together. A reader that comes back
says which number it wants next. Output that no reader has acknowledged is kept up to ``BUFFER``;
then a ``block`` output stops the program and a ``ring`` output forgets its oldest bytes.
"""

from __future__ import annotations

import errno
import os
from typing import Any, Callable

from k8e.guest.loop import WRITE, Loop
from k8e.guest.wire import CHUNK, CREDIT, CREDIT_BODY, ERR, OUT, SEQ, SHOW

BUFFER = 512 << 10
# A chunk costs memory beyond its bytes; counting that bounds a program that prints byte by byte.
CHUNK_COST = 128
COALESCE = 4096
COMPLAINTS = 2048  # bytes of stderr that are kept to explain a failure
MAX_SHOWN = 64 << 20  # bytes of results of one exec


class ExecOutput:
    """The numbered output of one exec."""

    def __init__(self, ring: bool, limit: int, most: int = 0) -> None:
        self.ring = ring
        self.limit = limit  # bytes kept per stream; 0 means all
        self.most = most  # bytes that may come at all; 0 means any number
        self.on_flood: Callable[[], object] | None = None  # called once when more come
        self.total = 0  # bytes that came, kept or not
        self.complaints = b""  # the newest on stderr
        self.copy: Callable[[int, bytes], object] | None = None  # gets all that is kept
        self.truncated = False
        self.end = 0
        self.finished = False
        self.readers: list[OutputReader] = []
        self._chunks: list[tuple[int, int, bytes]] = []
        self._first = 0  # number of the chunk at index 0
        self.held = 0
        self._acked = 0
        self._counts = {OUT: 0, ERR: 0, SHOW: 0}

    def add(self, kind: int, data: bytes) -> None:
        """Take what the program wrote; beyond the limit it is counted as truncated and dropped."""
        self.total += len(data)
        if kind == ERR:
            self.complaints = (self.complaints + data)[-COMPLAINTS:]
        if self.most and self.total > self.most:
            data = self._cut_flood(data)
        limit = self.limit if kind != SHOW else MAX_SHOWN
        if limit:
            room = limit - self._counts[kind]
            if len(data) > room:
                self.truncated = True
                data = data[: max(0, room)] if kind != SHOW else b""  # a record is whole
        if not data:
            return
        self._counts[kind] += len(data)
        if self.copy is not None:
            self.copy(kind, data)
        last = self._chunks[-1] if self._chunks else None
        if last and last[1] == kind != SHOW and len(last[2]) + len(data) <= COALESCE:
            self._chunks[-1] = (last[0], kind, last[2] + data)
            self.held += len(data)
        else:
            self._chunks.append((self.end, kind, data))
            self.held += len(data) + CHUNK_COST
        self.end += len(data)
        for reader in list(self.readers):
            reader.pump()
        self._trim()

    def _cut_flood(self, data: bytes) -> bytes:
        """The part that still fits; the owner is told that there was more."""
        self.truncated = True
        told, self.on_flood = self.on_flood, None
        if told is not None:
            told()
        return data[: max(0, self.most - self.total + len(data))]

    @property
    def full(self) -> bool:
        """Whether the program must wait for readers."""
        return not self.ring and self.held >= BUFFER and self._keep_from() < self.end

    def finish(self) -> None:
        """Take no more output, and finish readers that have seen everything."""
        self.finished = True
        for reader in list(self.readers):
            reader.pump()

    def acknowledge(self) -> None:
        self._trim()

    def chunk(self, number: int) -> tuple[int, int, bytes] | None:
        """Chunk ``number``, the oldest kept one if that is gone, or None past the end."""
        at = max(0, number - self._first)
        return self._chunks[at] if at < len(self._chunks) else None

    def locate(self, seq: int) -> int:
        """The number of the chunk that holds ``seq``; for the end the newest, which may grow."""
        for at, (start, _, data) in enumerate(self._chunks):
            if seq < start + len(data):
                return self._first + at
        return self._first + max(0, len(self._chunks) - 1)

    @property
    def start(self) -> int:
        """The oldest sequence number still kept."""
        return self._chunks[0][0] if self._chunks else self.end

    def _keep_from(self) -> int:
        if self.readers:
            self._acked = max(self._acked, min(reader.acked for reader in self.readers))
        return self._acked

    def _trim(self) -> None:
        keep = self.end if self.ring else self._keep_from()
        dropped = 0
        for start, _, data in self._chunks:
            if self.held < BUFFER or start + len(data) > keep:
                break
            self.held -= len(data) + CHUNK_COST
            dropped += 1
        if dropped:
            del self._chunks[:dropped]
            self._first += dropped


class OutputReader:
    """One reader's position in an output: sends while it has credit, then the end."""

    def __init__(self, output: ExecOutput, channel: Any, *, start: int, credit: int) -> None:
        self.output = output
        self.acked = self.next = max(start, output.start)
        self.lost = start < output.start
        self._channel = channel
        self._credit = credit
        self._chunk = output.locate(self.next)
        self.on_end: Callable[[], object] | None = None

    def credit(self, count: int) -> None:
        self._credit += count
        self.acked = min(self.next, self.acked + count)
        self.output.acknowledge()
        self.pump()

    def pump(self) -> None:
        output = self.output
        while self._credit > 0:
            chunk = output.chunk(self._chunk)
            if chunk is None:
                break
            start, kind, data = chunk
            if start > self.next:  # the ring went round
                self.lost = True
                self.next = self.acked = start
                self._chunk = output.locate(start)
            offset = self.next - start
            part = data[offset : offset + min(self._credit, CHUNK)]
            if part:
                self._channel.send(kind, SEQ.pack(self.next) + part)
                self.next += len(part)
                self._credit -= len(part)
            if self.next < start + len(data):
                continue
            if output.chunk(self._chunk + 1) is None and not output.finished:
                break  # the newest chunk may still grow
            self._chunk += 1
        if output.finished and self.next >= output.end and self.on_end is not None:
            ended, self.on_end = self.on_end, None
            output.readers.remove(self)
            ended()


TIOCSWINSZ = 0x5414
TIOCGPTN = 0x80045430


class Input:
    """The input of one program; without a descriptor (``fd``), it is discarded."""

    def __init__(self, loop: Loop) -> None:
        self.fd = -1
        self._loop = loop
        self._pending: list[tuple[bytes, Any]] = []  # with the channel that each came from

    @property
    def held(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return sum(len(data) for data, _ in self._pending)

    def feed(self, data: bytes, channel: Any) -> None:
        if self.fd < 0:
            self._give_credit(channel, len(data))
        elif data:  # nothing pending but the end is empty
            self._pending.append((data, channel))
            self._write(0)

    def end(self, last: bytes) -> None:
        """End after ``last``, the bytes that a terminal takes for the end; a pipe has none."""
        if self.fd >= 0:
            self._pending.append((last, None))
            self._write(0)

    def _give_credit(self, channel: Any, count: int) -> None:
        """Let the client send as many bytes again as were taken."""
        if count and channel is not None:
            channel.send(CREDIT, CREDIT_BODY.pack(count))

    def _write(self, _: int) -> None:
        while self._pending:
            data, channel = self._pending[0]
            try:
                count = os.write(self.fd, data) if data else 0
            except BlockingIOError:
                self._loop.watch(self.fd, WRITE, self._write)
                return
            except OSError:  # the program closed its stdin: swallow the rest
                count = len(data)
            self._give_credit(channel, count)
            if count < len(data):
                self._pending[0] = (data[count:], channel)
                continue
            del self._pending[0]
            if not data:
                self.close()
                return
        self._loop.unwatch(self.fd)

    def close(self) -> None:
        if self.fd >= 0:
            self._loop.unwatch(self.fd)
            os.close(self.fd)
            self.fd = -1
        for data, channel in self._pending:
            self._give_credit(channel, len(data))
        self._pending.clear()


def open_terminal() -> tuple[int, int]:
    """Both ends of a new terminal."""
    try:
        return os.openpty()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        # The kernel's error for too many terminals reads like that of a full disk.
        text = "the sandbox has as many terminals as it may have; end some of them"
        raise OSError(errno.EMFILE, text) from None


def set_terminal_size(fd: int, rows: int, cols: int) -> None:
    from fcntl import ioctl
    from struct import pack as pack_struct

    ioctl(fd, TIOCSWINSZ, pack_struct("HHHH", rows, cols, 0, 0))


def terminal_name(master: int) -> str:
    """The path of a terminal's other end; ``ttyname`` would look it up in ``/proc/self``."""
    from fcntl import ioctl
    from struct import unpack as unpack_struct

    number = unpack_struct("i", ioctl(master, TIOCGPTN, b"\0\0\0\0"))[0]
    return f"/dev/pts/{number}"
