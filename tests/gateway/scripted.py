"""A server that says what a test wants, behind the gateway's HTTP, without any sandbox."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import cast

from k8e.gateway.ports.access import PortAccess
from k8e.gateway.ports.listener import ClientSocket
from k8e.gateway.ports.proxy import Visit
from k8e.gateway.ports.tunnel import Tunnel

PATIENCE = 60.0
DOOR = PortAccess(b"127.7.8.9:700", b"a2b3c4d5e6f7a2b3c4d5e6f7a2b3c4d5e6f7a2b3", b"key")
HEAD = b"Host: 127.7.8.9:700\r\nX-K8e-Token: " + DOOR.token + b"\r\n"
GET = b"GET / HTTP/1.1\r\n" + HEAD
LAST = b"Connection: close\r\n\r\n"


class Script:
    """What one server says, piece by piece, and what it heard."""

    def __init__(self, *pieces: bytes | Exception, ends: bool = True) -> None:
        self.heard = bytearray()
        self.closed = asyncio.Event()
        self.taken = 0
        """Pieces that somebody has asked for."""
        self.changed = asyncio.Event()
        self._said: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        for piece in pieces:
            self.say(piece)
        if ends:
            self.say(b"")

    def say(self, piece: bytes | Exception) -> None:
        self._said.put_nowait(piece)

    async def until(self, text: bytes) -> None:
        """Wait until the server was sent something."""
        async with asyncio.timeout(PATIENCE):
            while text not in self.heard:
                self.changed.clear()
                await self.changed.wait()

    # What a tunnel does.

    async def __aenter__(self) -> Script:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.closed.set()

    async def send(self, data: bytes) -> None:
        self.heard += data
        self.changed.set()

    async def receive(self) -> bytes:
        piece = await self._said.get()
        self.taken += 1
        if isinstance(piece, Exception):
            raise piece
        return piece

    async def end(self) -> None:
        self.heard += b"<end>"
        self.changed.set()

    def fail(self, error: Exception) -> None:
        self.say(error)


class Client:
    """A connection to the gateway's side."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    async def until(self, text: bytes) -> bytes:
        async with asyncio.timeout(PATIENCE):
            return await self.reader.readuntil(text)

    async def rest(self) -> bytes:
        """Everything to the end; ConnectionResetError where it was cut off."""
        async with asyncio.timeout(PATIENCE):
            return await self.reader.read()


@contextlib.asynccontextmanager
async def visiting(*scripts: Script) -> AsyncGenerator[Client]:
    """A client whose requests are answered by one script after the other."""
    waiting = list(scripts)
    visits: list[asyncio.Task[None]] = []

    def welcome(visitor: ClientSocket) -> None:
        visit = Visit(DOOR, visitor, lambda: cast("Tunnel", waiting.pop(0)), lambda: True)
        visits.append(asyncio.create_task(visit.run()))

    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: ClientSocket(welcome), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    try:
        yield Client(reader, writer)
    finally:
        writer.close()
        server.close()
        if visits:
            await asyncio.wait(visits, timeout=PATIENCE)
            assert all(task.done() for task in visits), "a client that left is served no more"
            for task in visits:
                task.result()


async def answer_to(request: bytes, script: Script) -> bytes:
    """All that a client gets for one request."""
    async with visiting(script) as client:
        client.say(request)
        return await client.rest()
