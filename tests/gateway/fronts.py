"""The TLS end of the endpoint in this process, with an echo where gRPC would be."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from k8e.gateway import identity, tls
from k8e.gateway.rpc import front


class Echo(asyncio.Protocol):
    """What gRPC is elsewhere."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class Serving(NamedTuple):
    """A front that listens."""

    certificates: tls.Certificates
    endpoint: identity.TcpEnd
    front: front.TlsFront


@asynccontextmanager
async def serving(folder: Path) -> AsyncGenerator[Serving]:
    certificates = tls.Certificates(folder)
    await certificates.load()
    loop = asyncio.get_running_loop()
    inner = await loop.create_unix_server(Echo, folder / "inner")
    listening = front.TlsFront(folder / "inner", certificates)
    try:
        endpoint = await listening.listen(identity.endpoint("127.0.0.1", 0))
        yield Serving(certificates, endpoint, listening)
    finally:
        listening.close()
        inner.close()


class Client:
    """A connection that trusts one CA and nothing else."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def dial(
        cls,
        endpoint: identity.TcpEnd,
        ca: bytes,
        device: tuple[Path, Path] | None = None,
        name: str = "localhost",
    ) -> Client:
        trusted = ssl.create_default_context(cadata=ca.decode())
        trusted.check_hostname = name == "localhost"
        if device is not None:
            trusted.load_cert_chain(*device)
        address = (str(endpoint.address), endpoint.port)
        made = await asyncio.open_connection(*address, ssl=trusted, server_hostname=name)
        return cls(*made)

    @property
    def shown(self) -> str:
        return self._writer.get_extra_info("peercert")["serialNumber"]

    async def says(self, text: bytes) -> bytes:
        self._writer.write(text)
        async with asyncio.timeout(10):
            return await self._reader.readexactly(len(text))

    async def ends(self) -> None:
        """Wait until the other side has had enough."""
        async with asyncio.timeout(10):
            try:
                assert await self._reader.read() == b""
            except ConnectionError:
                return

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()
