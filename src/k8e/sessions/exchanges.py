"""One operation on a guest as a conversation that can be awaited, frame by frame."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from k8e import errors
from k8e.guest import wire
from k8e.link import FrameSink
from k8e.sessions.operations import Operation
from k8e.sessions.queues import FrameQueue

if TYPE_CHECKING:
    from types import TracebackType

Open = Callable[[dict[str, Any], FrameSink], Awaitable[Operation]]
"""What starts a call on some guest."""


class Frame(NamedTuple):
    """What a guest says in an operation."""

    kind: int
    body: bytes


class Exchange:
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
        """What is raised for an error that the guest told."""
        return error

    async def receive(self) -> Frame:
        """The next frame; an ERROR is raised."""
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
        """Send ``data`` as fast as the guest takes it; what the guest says in the end."""
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
    """How many bytes more a frame lets us send."""
    if frame.kind == wire.CREDIT and len(frame.body) == wire.CREDIT_BODY.size:
        return wire.CREDIT_BODY.unpack(frame.body)[0]
    return 0


def decode(body: bytes) -> dict[str, Any]:
    """A guest's packed dict. The guest is hostile, so anything else is its failure."""
    try:
        return wire.unpack_dict(body)
    except wire.WireError as error:
        raise errors.GuestFailed(f"the guest answered nonsense: {error}") from None
