"""The watcher tells of what matters to an uplink, once, and never of its own doing for ever."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from k8e.egress import uplink
from k8e.egress.uplink import QUICK_SECONDS, SLOW_SECONDS, NetworkWatcher
from tests.egress import hosts
from tests.egress.hosts import HOST, HOST6, LAN, WEB, WEB6, Host

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

# What nobody tells within this time, nobody tells.
QUIET = 4 * QUICK_SECONDS


class Watched:
    """A host with an uplink, and what its watcher tells."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.told = 0
        self._news = asyncio.Event()
        self.watcher = NetworkWatcher(host.world, self._on_change)

    def _on_change(self) -> None:
        self.told += 1
        self._news.set()

    async def next(self) -> None:
        """Until something is told."""
        async with asyncio.timeout(10):
            await self._news.wait()
        self._news.clear()

    async def silence(self, seconds: float = QUIET) -> bool:
        """Whether nothing is told for a while."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return True
        self._news.clear()
        return False

    async def calm(self) -> None:
        """Until nothing is told any more, with what a gateway does each time."""
        async with asyncio.timeout(20):
            while not await self.silence():
                await self.mend()

    async def mend(self) -> None:
        await asyncio.to_thread(uplink.connect, self.host.router.path, self.host.world)

    async def change(self, commands: str) -> None:
        await asyncio.to_thread(self.host.machine.nft, commands)

    async def link(self, commands: str) -> None:
        await asyncio.to_thread(self.host.machine.ip, commands)

    async def reach(self, address: str) -> str:
        return await asyncio.to_thread(self.host.router.reach, address)


@pytest.fixture
async def watched() -> AsyncGenerator[Watched]:
    folder = Path(tempfile.mkdtemp(prefix="k8e-watch-"))
    host = await asyncio.to_thread(Host, folder)
    made = Watched(host)
    made.watcher.start()
    await made.mend()
    await made.calm()
    made.told = 0
    yield made
    made.watcher.close()
    await asyncio.to_thread(uplink.disconnect, host.world, "k8e-up0")
    await asyncio.to_thread(host.close)
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "before", ["", hosts.DOCKER], ids=["nothing else", "Docker's rules in place"]
)
async def test_rules_that_somebody_flushed_come_back(watched: Watched, before: str) -> None:
    if before:
        await watched.change(before)
        await watched.calm()
    await watched.change("flush ruleset")
    await watched.next()
    await watched.mend()
    assert await watched.reach(WEB) == f"internet {HOST}"
    assert await watched.reach(WEB6) == f"internet {HOST6}"
    assert await watched.reach(LAN) == hosts.REFUSED


async def test_a_firewall_that_starts_is_passed(watched: Watched) -> None:
    await watched.change(hosts.DOCKER)
    await watched.next()
    await watched.mend()
    assert await watched.reach(WEB) == f"internet {HOST}"
    assert await watched.reach(WEB6) == f"internet {HOST6}"


@pytest.mark.parametrize(
    "change",
    [
        "delete table inet k8e-up0",
        "flush chain inet k8e-up0 forward",
        "flush chain ip filter FORWARD",
        "insert rule ip filter FORWARD counter drop",
        "add chain ip filter FORWARD { policy drop; }",
    ],
)
async def test_each_change_of_rules_is_told_once_and_mended(watched: Watched, change: str) -> None:
    await watched.change(
        """
        table ip filter {
            chain FORWARD { type filter hook forward priority 0; policy accept; counter reject; }
        }
        """
    )
    await watched.calm()
    before = watched.told
    await watched.change(change)
    await watched.next()
    assert watched.told == before + 1
    await watched.mend()
    assert await watched.reach(WEB) == f"internet {HOST}"
    await watched.calm()


async def test_mending_what_is_whole_tells_nothing(watched: Watched) -> None:
    await watched.change(hosts.DOCKER)
    await watched.calm()
    for _ in range(3):
        await watched.mend()
        await asyncio.to_thread(uplink.protect, watched.host.world, "k8e-up0")
    assert await watched.silence()


async def test_many_changes_together_are_told_together(watched: Watched) -> None:
    addresses = [f"10.7.{number}.1" for number in range(100)]
    await watched.link("".join(f"address add {item}/24 dev lan\n" for item in addresses))
    await watched.next()
    assert await watched.silence()
    assert watched.told == 1
    found = {str(item) for item in uplink.own_addresses(watched.host.world)}
    assert found.issuperset(addresses)


async def test_forwarding_that_somebody_switches_is_told(watched: Watched) -> None:
    for file in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
        await asyncio.to_thread(watched.host.machine.set, file, 1)
        await watched.next()
        await watched.mend()
        await watched.calm()
    # Its owner has made the host a router, so it is one, between all networks.
    neighbour = await asyncio.to_thread(watched.host.internet.reach, hosts.NEIGHBOUR)
    assert neighbour == "neighbour 203.0.113.1"
    for file in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
        await asyncio.to_thread(watched.host.machine.set, file, 0)
        await watched.next()
        await watched.mend()
        await watched.calm()
    assert await watched.reach(WEB) == f"internet {HOST}"
    assert await watched.reach(WEB6) == f"internet {HOST6}"


async def test_changes_of_sets_and_of_other_families_are_not_told(watched: Watched) -> None:
    await watched.change("table inet theirs {\n set busy { type ipv4_addr; }\n}")
    await watched.change("add element inet theirs busy { 10.0.0.1 }")
    await watched.change("table arp theirs {\n chain x { accept; }\n}")
    assert await watched.silence()


async def test_somebody_who_undoes_everything_is_answered_less_and_less(watched: Watched) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    for _ in range(4):
        await watched.change("delete table inet k8e-up0")
        await watched.next()
        await watched.mend()
    assert 1.5 > loop.time() - began - 4 * QUICK_SECONDS > 0.5
    assert loop.time() - began < 4 * SLOW_SECONDS


async def test_changes_that_do_not_fit_the_queue_are_told_too(watched: Watched) -> None:
    # The loop does not read while this runs in it.
    text = "".join(f"add chain ip busy c{number}\n" for number in range(20_000))
    watched.host.machine.nft(f"add table ip busy\n{text}")
    await watched.next()


async def test_a_closed_watcher_is_silent(watched: Watched) -> None:
    await watched.change("delete table inet k8e-up0")
    watched.watcher.close()
    assert await watched.silence()
    watched.watcher.close()
