"""One operation on a session's guest, for dialects that answer when it is over.

Dialects that pass frames on use :mod:`k8e.gateway.conversation` instead.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

from k8e import errors
from k8e.guest import wire

if TYPE_CHECKING:
    from types import TracebackType

    from k8e.model import Principal
    from k8e.sessions.operations import Operation
    from k8e.sessions.service import Sessions


class Frame(NamedTuple):
    """What a guest says in an operation."""

    kind: int
    body: bytes


class GuestOSError(Exception):
    """A system call failed inside the sandbox. Never one of ours: our paths concern no client."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        self.errno = error.errno or 0


class Call:
    """An open operation; leaving the block cancels what is still running.

    The queue needs no bound: a guest sends no more than it was given credit for.
    """

    def __init__(
        self, sessions: Sessions, principal: Principal, session_id: str, call: dict[str, Any]
    ) -> None:
        self._sessions = sessions
        self._principal = principal
        self._session_id = session_id
        self._call = call
        self._frames: asyncio.Queue[Frame] = asyncio.Queue()
        self._operation: Operation | None = None

    async def __aenter__(self) -> Call:
        self._operation = await self._sessions.open(
            self._principal, self._session_id, self._call, self._on_frame
        )
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
        self._frames.put_nowait(Frame(kind, body))

    async def receive(self) -> Frame:
        """The next frame; an ERROR is raised."""
        frame = await self._frames.get()
        if frame.kind == wire.ERROR:
            error = errors.from_wire(decode(frame.body))
            raise GuestOSError(error) if isinstance(error, OSError) else error
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
            self._send(wire.CREDIT, wire.CREDIT_BODY.pack(count))

    async def upload(self, data: bytes) -> dict[str, Any]:
        """Send ``data`` as fast as the guest takes it; what the guest says in the end."""
        room = wire.WINDOW
        at = 0
        while at < len(data):
            while room <= 0:
                kind, body = await self.receive()
                if kind == wire.CREDIT and len(body) == wire.CREDIT_BODY.size:
                    room += wire.CREDIT_BODY.unpack(body)[0]
            part = data[at : at + min(wire.CHUNK, room)]
            self._send(wire.DATA, part)
            at += len(part)
            room -= len(part)
        self._send(wire.END)
        return await self.result()

    def _send(self, kind: int, body: bytes = b"") -> None:
        if self._operation is not None:
            self._operation.send(kind, body)


def decode(body: bytes) -> dict[str, Any]:
    """A guest's packed dict. The guest is hostile, so anything else is its failure."""
    try:
        return wire.unpack_dict(body)
    except wire.WireError as error:
        raise errors.GuestFailed(f"the guest answered nonsense: {error}") from None
