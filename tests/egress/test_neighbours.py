"""What no namespace limits: neighbours of the whole kernel, and ends of connections."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from k8e.egress import namespaces, rules
from k8e.egress.netlink import Netlink
from k8e.egress.nftables import Nftables
from k8e.egress.policy import parse_policy
from k8e.egress.service import Egress
from tests.egress.internet import Internet
from tests.places import eventually

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")

WEB = "93.184.216.34"
NEAR = ipaddress.ip_network("2606:4700:ffff::/64")
ADDRESSES = 300
MOST_ENDED = 4096
T = TypeVar("T")


@dataclass
class Stage:
    egress: Egress
    internet: Internet
    slot: Path
    router: Path


@pytest.fixture
async def stage() -> AsyncGenerator[Stage]:
    folder = Path(tempfile.mkdtemp(prefix="k8e-net-"))
    internet = Internet(folder)
    internet.host(WEB)
    egress = Egress(folder / "net", world=internet.world, upstreams=[internet.upstream], spare=0)
    await egress.start(set())
    yield Stage(egress, internet, await egress.attach("sb-a"), folder / "net" / "router")
    await egress.detach("sb-a")
    await egress.close()
    internet.close()
    shutil.rmtree(folder)


async def there(path: Path, function: Callable[[], T]) -> T:
    return await asyncio.to_thread(namespaces.run_in, path, function)


def neighbours() -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    with contextlib.closing(Netlink()) as netlink:
        return netlink.neighbours()


def near() -> str:
    """The networks in which the host has neighbours, as the router knows them."""
    with contextlib.closing(Nftables()) as nft:
        return nft.run(f"list set {rules.TABLE} near6")


async def test_the_router_is_the_only_neighbour_also_after_a_change_of_policy(stage: Stage) -> None:
    def crowd() -> None:
        link = socket.if_nametoindex("eth0")
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as connection:
            for number in range(ADDRESSES):
                connection.sendto(b"x", (f"fe80::1:{number:x}", 9, 0, link))
                connection.sendto(b"x", (f"ff02::1:{number:x}", 9, 0, link))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0")
            for number in range(ADDRESSES):
                high, low = divmod(number, 256)
                connection.sendto(b"x", socket.MSG_DONTROUTE, (f"9.9.{high}.{low}", 9))
                connection.sendto(b"x", (f"239.9.{high}.{low}", 9))

    for words in (["none"], ["open"], ["none"]):
        await stage.egress.bind("sb-a", parse_policy(words))
        await there(stage.slot, crowd)
        for path in (stage.slot, stage.router):
            assert len(await there(path, neighbours)) < 16


async def test_a_sandbox_has_few_neighbours_of_the_host_at_a_time(stage: Stage) -> None:
    def arrive() -> None:
        with contextlib.closing(Netlink()) as netlink:
            wan = socket.if_nametoindex("wan")
            netlink.configure(wan, [ipaddress.ip_interface((NEAR[7], NEAR.prefixlen))])

    def crowd() -> None:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as connection:
            for number in range(ADDRESSES):
                with contextlib.suppress(OSError):
                    connection.sendto(b"x", (str(NEAR[1000 + number]), 9))

    await stage.egress.bind("sb-a", parse_policy(["open"]))
    await there(stage.internet.world, arrive)
    known = functools.partial(namespaces.run_in, stage.router, near)
    await asyncio.to_thread(eventually, lambda: str(NEAR) in known())
    await there(stage.slot, crowd)
    found = [item for item in await there(stage.internet.world, neighbours) if item in NEAR]
    assert 0 < len(found) <= rules.MAX_NEAR_FLOWS


async def test_connections_that_have_ended_wait_in_bounded_numbers(stage: Stage) -> None:
    def crowd() -> str:
        with socket.create_server(("127.0.0.1", 0)) as server:
            for _ in range(MOST_ENDED + 400):
                with socket.create_connection(server.getsockname()) as client:
                    server.accept()[0].close()
                    assert client.recv(1) == b""
        return Path("/proc/thread-self/net/sockstat").read_text("ascii")

    told = (await there(stage.slot, crowd)).split()
    assert int(told[told.index("tw") + 1]) <= MOST_ENDED
