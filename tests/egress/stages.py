"""Network namespaces that stand for sandboxes, on a small internet of the test's own."""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import dns.message
import dns.query
import dns.rcode

from k8e.egress import namespaces, policy
from k8e.egress.router import DNS_ADDRESS
from k8e.egress.service import Egress
from k8e.runtimes.mounts import mounts_below
from tests.egress.internet import Internet

WEB, OTHER, PRIVATE = "93.184.216.34", "93.184.216.35", "10.9.9.9"
WEB6 = "2606:4700::5"


@dataclass
class Sandbox:
    """A network namespace that stands for a sandbox: what is in it can try things."""

    namespace: Path

    async def connect(self, host: str, port: int = 443) -> str:
        """The greeting of a server, or the error's name."""
        return await asyncio.to_thread(namespaces.run_apart, lambda: self._connect(host, port))

    def _connect(self, host: str, port: int) -> str:
        self._enter()
        try:
            with socket.create_connection((host, port), timeout=5) as connection:
                return connection.recv(100).decode().strip()
        except OSError as error:
            return type(error).__name__

    async def open(self, host: str, port: int = 443) -> socket.socket:
        def inside() -> socket.socket:
            self._enter()
            connection = socket.create_connection((host, port), timeout=5)
            connection.recv(100)
            return connection

        return await asyncio.to_thread(namespaces.run_apart, inside)

    async def resolve(self, name: str, kind: str = "A") -> list[str] | str:
        """The addresses of a name, or the code of the refusal."""

        def inside() -> list[str] | str:
            self._enter()
            query = dns.message.make_query(name, kind)
            try:
                answer = dns.query.udp(query, str(DNS_ADDRESS), timeout=3)
            except OSError as error:
                return type(error).__name__
            if answer.rcode() != dns.rcode.NOERROR:
                return dns.rcode.to_text(answer.rcode())
            return sorted(word for rrset in answer.answer for word in rrset.to_text().split()[4::5])

        return await asyncio.to_thread(namespaces.run_apart, inside)

    def _enter(self) -> None:
        with open(self.namespace, "rb") as file:
            namespaces.enter(file.fileno())


def is_cut(connection: socket.socket) -> bool:
    """Whether a connection is reset when it is used."""
    try:
        connection.sendall(b"hello")
        return not connection.recv(100)
    except ConnectionResetError:
        return True


@dataclass
class Stage:
    """Everything that a test of egress needs."""

    folder: Path
    egress: Egress
    internet: Internet
    sandbox: Sandbox
    neighbour: Sandbox

    async def allow(self, *words: str) -> None:
        await self.egress.bind("sb-a", policy.parse_policy(words))

    async def restart(self, alive: set[str] | None = None) -> None:
        """Have a new gateway, after the old one was killed."""
        self.egress.abandon()
        self.egress = Egress(
            self.folder / "net", world=self.internet.world, upstreams=[self.internet.upstream]
        )
        await self.egress.start({"sb-a", "sb-b"} if alive is None else alive)


@asynccontextmanager
async def opened() -> AsyncGenerator[Stage]:
    """A stage with two sandboxes that have no policy yet."""
    folder = Path(tempfile.mkdtemp(prefix="k8e-net-"))
    internet = Internet(folder)
    internet.host(WEB, OTHER, PRIVATE, WEB6)
    internet.names |= {
        "web.example.org": [WEB, WEB6],
        "other.example.org": [OTHER],
        "alias.example.org": ["=web.example.org"],
        "evil.example.org": [PRIVATE],
        "mapped.example.org": ["::ffff:10.9.9.9"],
        "mixed.example.org": [OTHER, "127.0.0.1"],
        "example.org": [OTHER],
    }
    egress = Egress(folder / "net", world=internet.world, upstreams=[internet.upstream])
    await egress.start(set())
    first = Sandbox(await egress.attach("sb-a"))
    second = Sandbox(await egress.attach("sb-b"))
    made = Stage(folder, egress, internet, first, second)
    yield made
    for name in ("sb-a", "sb-b"):
        await made.egress.detach(name)
    await made.egress.close()
    internet.close()
    assert not mounts_below(folder)
    shutil.rmtree(folder)
