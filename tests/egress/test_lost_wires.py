"""What a new gateway does with networks whose sandboxes ended while there was none."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from k8e.egress import namespaces
from k8e.egress.policy import parse_policy
from k8e.egress.service import Egress
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
