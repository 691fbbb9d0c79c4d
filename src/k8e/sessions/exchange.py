"""Operations on a guest that can be awaited, and programs that the gateway runs through them.

Credit counts bytes, and a hostile guest sends one in each frame: as objects, a megabyte of these
takes 150. So small frames wait as the bytes that they came as.

The sandbox is hostile: what it sends is bounded by credit, by the taker's own limit and in time.

Dialects that pass frames on use :mod:`k8e.gateway.frames` instead.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from k8e import errors
from k8e.guest import wire
from k8e.link import FrameSink
from k8e.sessions.operations import Operation

if TYPE_CHECKING:
    from types import TracebackType

    from k8e.model import Principal
    from k8e.sessions.service import Sessions


SMALL = 2 << 10  # bytes of a body above which it is kept as an object and not copied
TOGETHER = 64 << 10  # bytes of small frames in one piece

QueuedFrame = tuple[int, int, bytes]


class FrameQueue:
    """Frames in the order of their arrival: kind, channel and body."""

    __slots__ = ("_at", "_items", "size")

    def __init__(self) -> None:
        self._items: deque[QueuedFrame | bytearray] = deque()
        self._at = 0  # in the first item, where that is a piece
        self.size = 0
        """Bytes on the wire of all that wait."""

    def __bool__(self) -> bool:
        return bool(self._items)

    def put(self, kind: int, channel: int, body: bytes) -> None:
        self.size += wire.HEADER_SIZE + len(body)
        if len(body) > SMALL or not self._items:  # a frame that waits alone needs no copy
            self._items.append((kind, channel, body))
            return
        piece = self._items[-1]
        if not isinstance(piece, bytearray) or len(piece) >= TOGETHER:
            piece = bytearray()
            self._items.append(piece)
        piece += wire.HEADER.pack(len(body), kind, channel)
        piece += body

    def take(self) -> QueuedFrame:
        """The next frame; there must be one."""
        first = self._items[0]
        if isinstance(first, bytearray):
            length, kind, channel = wire.HEADER.unpack_from(first, self._at)
            start = self._at + wire.HEADER_SIZE
            self._at = start + length
            frame = (kind, channel, bytes(memoryview(first)[start : self._at]))
            if self._at == len(first):
                self._items.popleft()
                self._at = 0
        else:
            frame = first
            self._items.popleft()
        self.size -= wire.HEADER_SIZE + len(frame[2])
        return frame

    def next_size(self) -> int:
        """Bytes on the wire of the next frame; there must be one."""
        first = self._items[0]
        if isinstance(first, bytearray):
            return wire.HEADER_SIZE + wire.HEADER.unpack_from(first, self._at)[0]
        return wire.HEADER_SIZE + len(first[2])


Open = Callable[[dict[str, Any], FrameSink], Awaitable[Operation]]
"""What starts a call on some guest."""


class Frame(NamedTuple):
    """One frame of a guest in an operation."""

    kind: int
    body: bytes


class GuestExchange:
    """An open operation; leaving the block cancels what is still running.

    The queue needs no bound: a guest sends no more than it was given credit for.
    """

    def __init__(self, opening: Open, call: dict[str, Any]) -> None:
        self._open = opening
        self._call = call
        self._frames = FrameQueue()
        self._some = asyncio.Event()
        self._operation: Operation | None = None

    async def __aenter__(self) -> Self:
        self._operation = await self._open(self._call, self._on_frame)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._operation is not None:
            self._operation.cancel()

    def _on_frame(self, kind: int, body: bytes) -> None:
        self._frames.put(kind, 0, body)
        self._some.set()

    def _failure(self, error: Exception) -> Exception:
        """The exception for an error that the guest reported."""
        return error

    async def receive(self) -> Frame:
        """The next frame; an ERROR is raised as an exception."""
        if not self._frames:
            self._some.clear()
            await self._some.wait()
        kind, _, body = self._frames.take()
        frame = Frame(kind, body)
        if frame.kind == wire.ERROR:
            raise self._failure(errors.from_wire(decode(frame.body)))
        return frame

    async def result(self) -> dict[str, Any]:
        """The next RESULT; credit that comes before it is of no more use."""
        while True:
            kind, body = await self.receive()
            if kind == wire.RESULT:
                return decode(body)
            if kind != wire.CREDIT:
                raise errors.GuestFailed(f"the guest sent a frame of kind {kind}, not a result")

    def consumed(self, count: int) -> None:
        """Let the guest send ``count`` bytes more."""
        if count:
            self.send(wire.CREDIT, wire.CREDIT_BODY.pack(count))

    async def upload(self, data: bytes) -> dict[str, Any]:
        """Send ``data`` as fast as the guest takes it; return the guest's final answer."""
        room = wire.WINDOW
        at = 0
        while at < len(data):
            while room <= 0:
                room += granted(await self.receive())
            part = data[at : at + min(wire.CHUNK, room)]
            self.send(wire.DATA, part)
            at += len(part)
            room -= len(part)
        self.send(wire.END)
        return await self.result()

    def send(self, kind: int, body: bytes = b"") -> None:
        if self._operation is not None:
            self._operation.send(kind, body)


def granted(frame: Frame) -> int:
    """How many more bytes a frame lets us send."""
    if frame.kind == wire.CREDIT and len(frame.body) == wire.CREDIT_BODY.size:
        return wire.CREDIT_BODY.unpack(frame.body)[0]
    return 0


def decode(body: bytes) -> dict[str, Any]:
    """A guest's packed dict. The guest is hostile, so anything else is its failure."""
    try:
        return wire.unpack_dict(body)
    except wire.WireError as error:
        raise errors.GuestFailed(f"the guest answered nonsense: {error}") from None


GRACE = 15.0  # seconds that a guest has to end a program after its time-out
TAIL = 2000  # bytes of an error text that are kept
ENV = {
    "GZIP": "",
    "LC_ALL": "C.UTF-8",
    "LD_PRELOAD": "",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "TAR_OPTIONS": "",
}
"""So that a session's own variables do not change what these programs do."""


class NotStarted(Exception):
    """A program could not be started in the sandbox. Not an OSError: those are the host's own."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        self.missing = isinstance(error, FileNotFoundError)


class _Exec(GuestExchange):
    def _failure(self, error: Exception) -> Exception:
        return NotStarted(error) if isinstance(error, OSError) else error


Take = Callable[[bytes], Awaitable[None]]
Feed = Callable[[int], Awaitable[bytes]]
"""Gives at most so many bytes; nothing at the end."""


@dataclass(frozen=True)
class ProgramEnd:
    """How a program ended."""

    code: int
    timed_out: bool
    denials: tuple[str, ...]
    """What the session's egress policy refused meanwhile, as ``name:port``."""


async def _drop(data: bytes) -> None:
    """Discard output."""


async def run(
    opening: Open,
    argv: Sequence[str],
    *,
    seconds: float,
    env: Mapping[str, str] | None = None,
    cwd: str = "",
    feed: Feed | None = None,
    take: Take = _drop,
    hear: Take = _drop,
) -> ProgramEnd:
    """Run a program to its end.

    Args:
        opening: what starts it.
        argv: the program and its arguments; no shell is involved.
        seconds: the time after which it is killed.
        env: variables beside those of the session.
        cwd: where it starts; relative to the workspace.
        feed: gives its standard input.
        take: gets its standard output.
        hear: gets its standard error.

    Raises:
        NotStarted: it could not be started.
        GuestFailed: the guest does not answer, or with nonsense.
    """
    call: dict[str, Any] = {
        "op": "exec",
        "argv": list(argv),
        "env": {**ENV, **(env or {})},
        "cwd": cwd,
        "timeout": seconds,
        "stdin": feed is not None,
        "kill_on_disconnect": True,
        "own": True,  # it is not in the session's transcript
        "most_output": 1 << 62,  # output that we asked for is no flood
        "kill_on_loss": True,  # only a gateway that has died could ever read it
    }
    try:
        async with asyncio.timeout(seconds + GRACE), _Exec(opening, call) as running:
            await running.result()
            return await _talk(running, feed, {wire.OUT: take, wire.ERR: hear})
    except TimeoutError:
        raise errors.GuestFailed(f"the guest did not end {argv[0]} in time") from None


async def _talk(running: GuestExchange, feed: Feed | None, takers: dict[int, Take]) -> ProgramEnd:
    room = wire.WINDOW
    while True:
        while feed is not None and room > 0:
            data = await feed(min(room, wire.CHUNK))
            if data:
                running.send(wire.STDIN, data)
                room -= len(data)
            else:
                running.send(wire.STDIN_END)
                feed = None
        frame = await running.receive()
        if frame.kind in takers:
            data = frame.body[wire.SEQ.size :]
            await takers[frame.kind](data)
            running.consumed(len(data))
        elif frame.kind == wire.EXIT:
            return _ended(frame.body)
        else:
            room += granted(frame)


def _ended(body: bytes) -> ProgramEnd:
    told = decode(body)
    code = told.get("code")
    if not isinstance(code, int) or not 0 <= code < 1 << 16:
        raise errors.GuestFailed("the guest reported no exit code")
    denials = [_denied(item) for item in told.get("denials") or ()]  # the gateway's own words
    return ProgramEnd(code, told.get("status") == "timed_out", tuple(dict.fromkeys(denials)))


def _denied(denial: dict[str, Any]) -> str:
    host = str(denial.get("name") or denial.get("address"))
    # Name look-ups have the resolver's port, which means nothing to the user.
    return host if denial.get("protocol") == "dns" else f"{host}:{denial.get('port')}"


class Tail:
    """The last output of a program."""

    def __init__(self) -> None:
        self._data = b""

    async def hear(self, data: bytes) -> None:
        self.add(data)

    def add(self, data: bytes) -> None:
        self._data = (self._data + data)[-TAIL:]

    def text(self) -> str:
        """The text on one line, without characters that a terminal would act on."""
        lines = self._data.decode("utf-8", "replace").splitlines()
        joined = "; ".join(line.strip() for line in lines if line.strip())
        return "".join(char if char.isprintable() else "\ufffd" for char in joined)


class GuestOSError(Exception):
    """A system call failed inside the sandbox. Never one of ours: clients get no paths of ours."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        self.errno = error.errno or 0


class SessionCall(GuestExchange):
    """An open operation on a session; leaving the block cancels what is still running."""

    def __init__(
        self, sessions: Sessions, principal: Principal, session_id: str, call: dict[str, Any]
    ) -> None:
        super().__init__(partial(sessions.open, principal, session_id), call)

    def _failure(self, error: Exception) -> Exception:
        return GuestOSError(error) if isinstance(error, OSError) else error
