"""Two gateways on one host, each with folders of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Generator

import pytest

from tests.sessions.gateways import Client, Gateways

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="the local runtimes need root"),
    pytest.mark.timeout(120),
]
SMALL = {"memory": 64 << 20, "disk": 16 << 20}


@pytest.fixture
def neighbours() -> Generator[Gateways]:
    neighbours = Gateways(K8E_POOL_MAX="0")
    yield neighbours
    neighbours.close()


def uids(gateways: Gateways) -> set[int]:
    """The first host uid of each sandbox that a gateway has."""
    found = gateways.run_dir.glob("sandboxes/sb-*/sandbox.json")
    return {json.loads(path.read_text())["id_base"] for path in found}


def host_uid(gateways: Gateways, client: Client, session_id: str) -> int:
    """Whom the host sees where a program of a session runs."""
    client.shell(session_id, "touch /workspace/mine")
    sandbox_id = gateways.sandboxes()[session_id]
    return (gateways.run_dir / "sandboxes" / sandbox_id / "slot" / "mine").stat().st_uid


def test_sandboxes_of_two_gateways_are_different_users_of_the_host_also_after_a_crash(
    gateways: Gateways, client: Client, neighbours: Gateways
) -> None:
    ours = client.create(runtime="container", limits=SMALL)
    theirs = neighbours.start()
    first = theirs.create(runtime="container", limits=SMALL)
    seen = {host_uid(gateways, client, ours), host_uid(neighbours, theirs, first)}
    assert len(seen) == 2
    gateways.kill()  # its sandbox lives on
    second = theirs.create(runtime="container", limits=SMALL)
    seen.add(host_uid(neighbours, theirs, second))
    client = gateways.start()
    another = client.create(runtime="container", limits=SMALL)
    seen.add(host_uid(gateways, client, another))
    assert len(seen) == 4
    assert not uids(gateways) & uids(neighbours)
    for session_id in (ours, another):
        client.call("destroy_session", session_id=session_id)
