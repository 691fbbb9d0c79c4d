"""How a port of a sandbox is reached: over its link on one machine, at its pod's address elsewhere.

Both give the same: bytes both ways, bounded, with an end of each side.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from k8e import errors
from k8e.agent_sandbox.answers import Refusal
from k8e.agent_sandbox.client import InsideClient
from k8e.agent_sandbox.target import Target
from k8e.client.async_driver import Connection
from k8e.guest import wire

WINDOW = 256 << 10
"""Bytes from the sandbox that may wait for a slow client."""
DIAL_SECONDS = 10.0
ATTEMPTS = 3
RETRY_SECONDS = 0.2  # before the second attempt; twice that before the third


class PortConnection(Protocol):
    """A connection to a server in a sandbox."""

    async def send(self, data: bytes) -> None: ...
    async def receive(self) -> bytes:
        """The next bytes; none at the end."""
        ...


class Reach(Protocol):
    """A way to the ports of sandboxes."""

    def open(self, target: Target) -> AbstractAsyncContextManager[PortConnection]: ...


class LinkReach:
    """Over the link of the sandbox's guest, on behalf of one caller, whose it must be."""

    def __init__(self, client: InsideClient) -> None:
        self._client = client

    @contextlib.asynccontextmanager
    async def open(self, target: Target) -> AsyncGenerator[PortConnection]:
        connection = await self._client.connect_port(target.sandbox, target.port, WINDOW)
        try:
            yield LinkConnection(connection)
        finally:
            await connection.close()  # which the gateway takes for the end of the operation


class LinkConnection:
    """A connection over a link. One task may send while another receives."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._room = wire.WINDOW
        self._more_room = asyncio.Event()
        self._over = False
        self._sending = asyncio.Lock()  # one frame at a time

    async def _send(self, kind: int, body: bytes | memoryview) -> None:
        async with self._sending:
            await self._connection.send(kind, body)

    async def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self._over:
            if self._room <= 0:
                self._more_room.clear()
                await self._more_room.wait()
                continue
            part = view[: min(self._room, wire.CHUNK)]
            self._room -= len(part)
            await self._send(wire.DATA, part)
            view = view[len(part) :]

    async def receive(self) -> bytes:
        while not self._over:
            kind, body = await self._connection.receive()
            if kind == wire.DATA:
                await self._send(wire.CREDIT, wire.CREDIT_BODY.pack(len(body)))
                return body
            if kind == wire.CREDIT:
                self._room += wire.CREDIT_BODY.unpack(body)[0]
                self._more_room.set()
            elif kind == wire.ERROR:
                self._end()
                raise errors.from_wire(wire.unpack_dict(body))
            elif kind == wire.END:
                self._end()
        return b""

    def _end(self) -> None:
        self._over = True
        self._more_room.set()


Resolve = Callable[[str, str], Awaitable[list[str]]]
"""The addresses of a sandbox's pod, by namespace and name, as its Sandbox object has them."""


class PodReach:
    """At the address of the sandbox's pod."""

    def __init__(self, resolve: Resolve, *, loopback: bool = False) -> None:
        """``loopback`` allows addresses of this machine itself."""
        self._resolve = resolve
        self._loopback = loopback

    @contextlib.asynccontextmanager
    async def open(self, target: Target) -> AsyncGenerator[PortConnection]:
        found = await self._resolve(target.namespace, target.sandbox)
        addresses = [text for text in found if self._is_pod(text)]
        if not addresses:
            raise Refusal(502, f"the sandbox {target.sandbox} has no pod with an address")
        reader, writer = await self._dial(addresses[0], target)
        try:
            yield PodConnection(reader, writer)
        finally:
            writer.transport.abort()

    async def _dial(
        self, address: str, target: Target
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect; a pod that has just become ready may not listen yet."""
        for attempt in range(ATTEMPTS):
            try:
                async with asyncio.timeout(DIAL_SECONDS):
                    return await asyncio.open_connection(address, target.port, limit=WINDOW)
            except OSError:  # a time-out is one, too
                if attempt < ATTEMPTS - 1:
                    await asyncio.sleep(RETRY_SECONDS * 2**attempt)
        raise Refusal(502, f"port {target.port} of the sandbox {target.sandbox} does not answer")

    def _is_pod(self, text: str) -> bool:
        """Whether an address can be a pod's: never one that leads to the router's own machine."""
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        if address.is_loopback:
            return self._loopback
        return not (
            address.is_link_local
            or address.is_multicast
            or address.is_unspecified
            or address.is_reserved
        )


class PodConnection:
    """A connection over TCP."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def receive(self) -> bytes:
        return await self._reader.read(WINDOW)
