"""What a new gateway does with networks whose sandboxes ended while there was none."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from k8e.egress import namespaces
from k8e.egress.policy import parse_policy
from k8e.egress.service import Egress
from tests.chaos import leftovers
from tests.gateway import worlds
from tests.places import eventually

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


def wires(router: Path) -> set[str]:
    return {name for _, name in namespaces.run_in(router, socket.if_nameindex)}


async def test_a_wire_that_went_with_its_sandbox_takes_nobody_elses_network_along(
    folder: Path,
) -> None:
    router, records = folder / "net" / "router", folder / "net" / "sandboxes"
    with worlds.world() as world:
        before = Egress(folder / "net", world=world, spare=0)
        await before.start(set())
        others = wires(router)
        gone = await before.attach("sb-gone")
        (wire,) = wires(router) - others
        await before.attach("sb-here")
        for name in ("sb-gone", "sb-here"):
            await before.bind(name, parse_policy(["8.8.8.0/24:80"]))
        before.abandon()  # killed, as the sandbox ended, before it had cleaned up
        namespaces.unmount(gone)
        eventually(lambda: wire not in wires(router))
        (records / "sb-half.tmp").write_text("{")
        after = Egress(folder / "net", world=world, spare=0)
        await after.start({"sb-gone", "sb-here"})
        assert (after.knows("sb-gone"), after.knows("sb-here")) == (False, True)
        assert after.policy("sb-here").words() == ["8.8.8.0/24:80"]
        assert [path.name for path in records.iterdir()] == ["sb-here.json"]
        await after.detach("sb-here")
        await after.close()


async def test_a_sandbox_whose_record_is_lost_reaches_nothing_any_more(folder: Path) -> None:
    words = ["8.8.8.0/24:80", "open", "1.1.1.1", "[2606:4700::/32]:443"]
    with worlds.world() as world:
        before = Egress(folder / "net", world=world, spare=0)
        await before.start(set())
        for name in ("sb-lost", "sb-here"):
            await before.attach(name)
            await before.bind(name, parse_policy(words))
        before.abandon()
        assert leftovers.held(folder / "net" / "router") == {"sb0", "sb1"}
        (folder / "net" / "sandboxes" / "sb-lost.json").write_text("{")
        (folder / "net" / "generation").write_text("")
        after = Egress(folder / "net", world=world, spare=0)
        await after.start({"sb-lost", "sb-here"})
        assert (after.knows("sb-lost"), after.knows("sb-here")) == (False, True)
        assert leftovers.held(folder / "net" / "router") == {"sb1"}
        assert after.policy("sb-here") == parse_policy(words)
        await after.bind("sb-here", parse_policy(["8.8.4.4"]))
        await after.detach("sb-here")
        assert leftovers.held(folder / "net" / "router") == set()
        await after.close()


async def test_records_that_outlived_the_machine_do_not_keep_egress_from_starting(
    folder: Path,
) -> None:
    router = folder / "net" / "router"
    with worlds.world() as world:
        before = Egress(folder / "net", world=world, spare=0)
        await before.start(set())
        path = await before.attach("sb-old")
        for word in ("8.8.8.8", "8.8.4.4"):
            await before.bind("sb-old", parse_policy([word]))
        before.abandon()
        for mounted in (path, router):  # what a restart of the machine does
            namespaces.unmount(mounted)
        path.touch()
        after = Egress(folder / "net", world=world, spare=0)
        await after.start(set())
        assert not after.knows("sb-old")
        await after.attach("sb-new")
        await after.bind("sb-new", parse_policy(["8.8.8.8"]))
        await after.detach("sb-new")
        await after.close()
