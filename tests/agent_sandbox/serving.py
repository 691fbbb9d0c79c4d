"""The router of a cluster in this process, with servers of this machine in the place of pods.

No API server runs: the cache that a watch would fill is filled by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from k8e.agent_sandbox import cluster_router, principals
from k8e.agent_sandbox.cluster_router import App, Cluster, Options, Server
from k8e.agent_sandbox.principals import AccessFile
from k8e.kubernetes.api import Api

Object = dict[str, Any]
PATIENCE = 30.0
KEY = principals.new_key()
ACCESS = {
    "principals": [
        {"name": "somebody", "keys": [principals.digest(KEY)], "namespaces": ["space"]},
    ]
}
_addresses = itertools.count(2)
_versions = itertools.count(1)


def address() -> str:
    """An address of this machine that no other pod of the tests has."""
    number = next(_addresses)
    return f"127.{70 + number // 65536}.{number // 256 % 256}.{number % 256}"


def sandbox(name: str, *addresses: str, **more: Any) -> Object:
    """A Sandbox object as the API server has it."""
    version = next(_versions)
    ready = {"type": "Ready", "status": "True", "reason": "DependenciesReady"}
    return {
        "metadata": {
            "name": name,
            "namespace": "space",
            "uid": f"uid-{version}",
            "resourceVersion": str(version),
            **more.get("metadata", {}),
        },
        "spec": {"operatingMode": "Running", **more.get("spec", {})},
        "status": {"podIPs": list(addresses), "conditions": [more.get("ready", ready)]},
    }


class Routed(NamedTuple):
    """A router that runs, and where."""

    port: int
    cluster: Cluster

    def add(self, item: Object) -> None:
        self.cluster.pods.cache.absorb(item)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def say(self, data: bytes) -> bytes:
        """What the router answers to these bytes until it ends the connection."""
        reader, writer = await self.connect()
        writer.write(data)
        try:
            async with asyncio.timeout(PATIENCE):
                return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def routed(folder: Path, access: Object | None = None) -> AsyncGenerator[Routed]:
    file = folder / "access.yaml"
    file.write_text(yaml.safe_dump(ACCESS if access is None else access), "utf-8")
    networks = (principals.parse_network("127.64.0.0/10"),)
    options = Options(file, networks=networks)
    api = Api("https://127.0.0.1:1", ssl.create_default_context())
    cluster = cluster_router.cluster_of(options, lambda: api)
    cluster.pods.cache.synced.set()
    api.heard_at = asyncio.get_running_loop().time()
    server = Server(App(cluster, AccessFile(file)), cluster.requests)
    listening = cluster_router.listen("127.0.0.1:0")
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield Routed(listening.getsockname()[1], cluster)
    finally:
        server.told.set()
        async with asyncio.timeout(PATIENCE):
            await serving
        await cluster.activity.close()


class Pod:
    """A server in the place of a pod's: what it heard, and what it answers with."""

    def __init__(self, address: str, port: int) -> None:
        self.address, self.port = address, port
        self.heard: list[bytearray] = []
        self.changed = asyncio.Event()
        self.writers: list[asyncio.StreamWriter] = []

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not holds():
                self.changed.clear()
                await self.changed.wait()


ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@contextlib.asynccontextmanager
async def pod(answer: bytes = ANSWER, *, port: int = 8888) -> AsyncGenerator[Pod]:
    """A server that answers each connection with the same bytes, once a head is there."""
    made = Pod(address(), port)
    tasks: set[asyncio.Task[Any] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        heard = bytearray()
        made.heard.append(heard)
        made.writers.append(writer)
        told = False
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                heard.extend(data)
                if not told and b"\r\n\r\n" in heard and answer:
                    told = True
                    writer.write(answer)
                    await writer.drain()
                made.changed.set()
        heard.extend(b"<end>")
        made.changed.set()
        writer.close()

    server = await asyncio.start_server(serve, made.address, port)
    async with server:
        yield made
        for writer in made.writers:
            writer.transport.abort()
        async with asyncio.timeout(PATIENCE):
            for task in filter(None, tasks):
                await task


def head(line: str = "GET /a HTTP/1.1", *fields: str, sandbox: str = "box") -> bytes:
    """A request's head for a sandbox, with the key."""
    lines = [line, "Host: router", f"Authorization: Bearer {KEY}", f"X-Sandbox-ID: {sandbox}"]
    lines += ["X-Sandbox-Namespace: space", *fields]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.") else 0
