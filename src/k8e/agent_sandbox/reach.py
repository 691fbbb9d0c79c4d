"""How a port of a sandbox is reached: over its link on one machine, at its pod's address elsewhere.

Both give the same: bytes both ways, bounded, with an end of each side.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncGenerator, Callable, Sequence
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

    async def end(self) -> None:
        """Tell the server that no more comes."""
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
        link = LinkConnection(connection)
        reading = asyncio.create_task(link.read())
        try:
            yield link
        finally:
            reading.cancel()
            await asyncio.wait({reading})
            await connection.close()  # which the gateway takes for the end of the operation


class LinkConnection:
    """A connection over a link. One task may send while another receives."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._arrived = bytearray()
        self._room = wire.WINDOW
        self._over = False
        self._failure: Exception | None = None
        self._changed = asyncio.Event()
        self._sending = asyncio.Lock()  # one frame at a time

    async def read(self) -> None:
        """Take what comes, until the end: a client that does not read must not stop the credit."""
        try:
            while not self._over:
                self._take(*await self._connection.receive())
                self._changed.set()
        except (errors.K8eError, OSError, wire.WireError) as error:
            self._failure = error
        finally:
            self._over = True
            self._changed.set()

    def _take(self, kind: int, body: bytes) -> None:
        if kind == wire.DATA:
            self._arrived += body  # a window of bytes at most: the gateway sees to that
        elif kind == wire.CREDIT:
            self._room += wire.CREDIT_BODY.unpack(body)[0]
        elif kind == wire.ERROR:
            raise errors.from_wire(wire.unpack_dict(body))
        elif kind == wire.END:
            self._over = True

    async def _send(self, kind: int, body: bytes | memoryview = b"") -> None:
        async with self._sending:
            await self._connection.send(kind, body)

    async def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self._over:
            if self._room <= 0:
                await self._change()
                continue
            part = view[: min(self._room, wire.CHUNK)]
            self._room -= len(part)
            await self._send(wire.DATA, part)
            view = view[len(part) :]

    async def _change(self) -> None:
        """Wait for anything to change; both directions may wait at once."""
        self._changed.clear()
        await self._changed.wait()

    async def end(self) -> None:
        if not self._over:
            await self._send(wire.END)

    async def receive(self) -> bytes:
        while not self._arrived:
            if self._failure is not None:
                raise _as_expected(self._failure)
            if self._over:
                return b""
            await self._change()
        data = bytes(self._arrived)
        self._arrived.clear()
        if not self._over:
            await self._send(wire.CREDIT, wire.CREDIT_BODY.pack(len(data)))
        return data


def _as_expected(error: Exception) -> Exception:
    return errors.GuestFailed(str(error)) if isinstance(error, wire.WireError) else error


Resolve = Callable[[Target], str]
"""The address of a sandbox's pod, as its Sandbox object has it; Refusal if it has none."""
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class PodReach:
    """At the address of the sandbox's pod."""

    def __init__(self, resolve: Resolve, *, networks: Sequence[Network] = ()) -> None:
        """``networks`` are those of pods; by default all but those that are never a pod's."""
        self._resolve = resolve
        self._networks = networks

    @contextlib.asynccontextmanager
    async def open(self, target: Target) -> AsyncGenerator[PortConnection]:
        reader, writer = await self._dial(target)
        try:
            yield PodConnection(reader, writer)
        finally:
            writer.transport.abort()

    async def _dial(self, target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect; a pod that has just become ready may not listen yet, and may be another soon."""
        for attempt in range(ATTEMPTS):
            address = self._checked(target)
            try:
                async with asyncio.timeout(DIAL_SECONDS):
                    return await asyncio.open_connection(address, target.port, limit=WINDOW)
            except OSError:  # a time-out is one, too
                if attempt < ATTEMPTS - 1:
                    await asyncio.sleep(RETRY_SECONDS * 2**attempt)
        raise Refusal(502, f"port {target.port} of the sandbox {target.sandbox} does not answer")

    def _checked(self, target: Target) -> str:
        """The address of the pod, if it can be one."""
        text = self._resolve(target)
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            raise Refusal(502, f"the pod of {target.sandbox} has no proper address") from None
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        allowed = _may_be_a_pod(address)
        if self._networks:
            allowed = any(address in network for network in self._networks)
        if not allowed:
            raise Refusal(502, f"the address of the pod of {target.sandbox} is not one of pods")
        return str(address)


def _may_be_a_pod(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether an address does not lead to the router's own machine, or to nobody."""
    return not (
        address.is_loopback
        or address.is_link_local
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

    async def end(self) -> None:
        if not self._writer.is_closing():
            self._writer.write_eof()
