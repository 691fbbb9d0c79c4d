"""A connection to a server in a sandbox, as the gateway uses it: bytes both ways, bounded."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from types import TracebackType
from typing import Any

from k8e import errors
from k8e.guest import wire
from k8e.model import Principal
from k8e.sessions.exchange import SMALL, decode
from k8e.sessions.operations import Operation
from k8e.sessions.service import Sessions
from k8e.websockets import ServerLost

TUNNEL_WINDOW = 256 << 10
"""Bytes from the sandbox that may wait for a slow client."""
IDLE_SECONDS = 3600.0
"""A connection on which nothing moves for this long is given up."""


class BrokenTunnel(ServerLost):
    """A connection ended in another way than it should; the message says how."""


class Tunnel:
    """One connection; leaving the block closes it.

    It may be written to at once: the guest keeps what comes before the connection is there.
    """

    def __init__(
        self, sessions: Sessions, principal: Principal, session_id: str, call: dict[str, Any]
    ) -> None:
        """``call`` has the host and port to connect to."""
        self._sessions = sessions
        self._principal = principal
        self._session_id = session_id
        self._call = {"op": "connect", "window": TUNNEL_WINDOW, **call}
        self._operation: Operation | None = None
        self._arrived: deque[bytes | bytearray] = deque()
        self._ended = False
        self._failure: Exception | None = None
        self._room = wire.WINDOW
        self._changed = asyncio.Event()
        self._last = time.monotonic()

    async def __aenter__(self) -> Tunnel:
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
        self._last = time.monotonic()
        if kind == wire.DATA:
            self._keep(body)
        elif kind == wire.CREDIT:
            self._room += wire.CREDIT_BODY.unpack(body)[0]
        elif kind == wire.END:
            self._ended = True
        elif kind == wire.ERROR:
            self.fail(_explain(body))
        elif self._operation is not None and self._operation.done and not self._ended:
            self.fail(BrokenTunnel("the connection ended in the middle"))
        self._changed.set()

    def _keep(self, body: bytes) -> None:
        """Single bytes are joined: as objects they take forty times as much memory."""
        last = self._arrived[-1] if self._arrived else b""
        if isinstance(last, bytearray) and len(last) < TUNNEL_WINDOW // 4:
            last += body
        elif last and len(body) < SMALL:
            self._arrived.append(bytearray(body))
        else:
            self._arrived.append(body)

    def fail(self, error: Exception) -> None:
        """End what waits for this connection with ``error``; the first one counts."""
        self._failure = self._failure or error
        self._changed.set()

    async def receive(self) -> bytes:
        """The next bytes from the sandbox; none at the end of its side."""
        while not self._arrived:
            if self._failure is not None:
                raise self._failure
            if self._ended:
                return b""
            await self._wait()
        if len(self._arrived) == 1:
            data = bytes(self._arrived.popleft())
        else:
            data = b"".join(self._arrived)
            self._arrived.clear()
        if self._operation is not None:
            self._operation.send(wire.CREDIT, wire.CREDIT_BODY.pack(len(data)))
        return data

    async def send(self, data: bytes) -> None:
        """Send bytes to the sandbox, as fast as its server takes them."""
        view = memoryview(data)
        while view and self._operation is not None and not self._operation.done:
            if self._failure is not None:
                raise self._failure
            if self._room <= 0:
                await self._wait()
                continue
            part = view[: min(self._room, wire.CHUNK)]
            self._room -= len(part)
            self._last = time.monotonic()
            self._operation.send(wire.DATA, bytes(part))
            view = view[len(part) :]

    async def end(self) -> None:
        """Tell the server that no more comes."""
        if self._operation is not None:
            self._operation.send(wire.END)

    async def _wait(self) -> None:
        """Until something changes; both directions may wait at once."""
        self._changed.clear()
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            if time.monotonic() - self._last >= IDLE_SECONDS:
                self.fail(BrokenTunnel(f"nothing happened for {IDLE_SECONDS:g} seconds"))


def _explain(body: bytes) -> Exception:
    """The text of an ERROR frame; its sender may be hostile."""
    try:
        return errors.from_wire(decode(body))
    except errors.K8eError as error:
        return error
