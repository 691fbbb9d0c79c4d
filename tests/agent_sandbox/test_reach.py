"""The way to a pod's port, with a server on this machine's loopback in the place of the pod."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncGenerator

import pytest

from k8e.agent_sandbox.answers import Refusal
from k8e.agent_sandbox.reach import PodReach
from k8e.agent_sandbox.target import Target

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


@contextlib.asynccontextmanager
async def echoing() -> AsyncGenerator[Target]:
    """A server that sends back what it gets, in capitals."""

    under_way: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        under_way.add(asyncio.current_task())
        with contextlib.suppress(OSError):
            while data := await reader.read(100):
                writer.write(data.upper())
                await writer.drain()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port: int = server.sockets[0].getsockname()[1]
        yield Target("space", "box", port, 10)
        async with asyncio.timeout(30):
            for task in filter(None, under_way):
                await task


def resolve(target: Target) -> str:
    if (target.namespace, target.sandbox) != ("space", "box"):
        raise Refusal(404, "there is no such sandbox")
    return "127.0.0.1"


HERE = [ipaddress.ip_network("127.0.0.0/8")]


async def test_a_pod_is_reached_at_the_address_of_its_sandbox() -> None:
    async with echoing() as target, PodReach(resolve, networks=HERE).open(target) as connection:
        await connection.send(b"hello")
        assert await connection.receive() == b"HELLO"


FORBIDDEN = [
    "127.0.0.1",
    "::1",
    "::ffff:127.0.0.1",
    "169.254.169.254",
    "fe80::1",
    "224.0.0.1",
    "0.0.0.0",
    "::",
    "240.0.0.1",
    "nonsense",
]


@pytest.mark.parametrize("address", FORBIDDEN)
async def test_an_address_that_is_no_pods_is_never_dialled(address: str) -> None:
    def forged(target: Target) -> str:
        return address

    async with echoing() as target:
        with pytest.raises(Refusal) as refused:
            async with PodReach(forged).open(target):
                pass
        assert refused.value.code == 502


async def test_an_unknown_sandbox_and_a_closed_port_are_refused() -> None:
    async with echoing() as target:
        for wrong in (target._replace(sandbox="other"), target._replace(namespace="other")):
            with pytest.raises(Refusal):
                async with PodReach(resolve, networks=HERE).open(wrong):
                    pass
    with pytest.raises(Refusal) as refused:
        async with PodReach(resolve, networks=HERE).open(target):
            pass
    assert "does not answer" in str(refused.value)
