"""A gateway is killed while it, or somebody else, waits for something."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from k8e.guest import wire
from tests.sessions.gateways import Client, Gateways, eventually

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="the local runtimes need root"),
    pytest.mark.timeout(120),
]
SMALL = {"memory": 64 << 20, "disk": 16 << 20}
ROOMY = {"memory": 128 << 20, "disk": 128 << 20}


def running(client: Client, session_id: str) -> list[dict[str, Any]]:
    told = client.call("execs", session={"id": session_id})["execs"]
    return [item for item in told if item["status"] == "running"]


def test_the_archiver_of_a_snapshot_ends_with_its_gateway(
    gateways: Gateways, client: Client, runtime: str
) -> None:
    session_id = client.create(runtime=runtime, limits=ROOMY)
    client.shell(session_id, "head -c 60M /dev/urandom > big")
    client.open({"op": "save_snapshot", "session_id": session_id, "name": f"cut-{runtime}"})
    eventually(lambda: any(gateways.data.glob("snapshots/*.part")), "a part of the archive")
    client = gateways.restart()
    eventually(lambda: not running(client, session_id), "the end of tar")
    assert list((gateways.data / "snapshots").iterdir()) == []
    assert client.call("list_snapshots")["snapshots"] == []
    saved = client.call("save_snapshot", session_id=session_id, name=f"cut-{runtime}")
    assert saved["file_count"] == 1
    client.call("delete_snapshot", name=f"cut-{runtime}")
    client.call("destroy_session", session_id=session_id)


def test_a_program_of_a_client_does_not_end_with_the_gateway(
    gateways: Gateways, client: Client, runtime: str
) -> None:
    session_id = client.create(runtime=runtime, limits=SMALL)
    call = {"op": "exec", "session": {"id": session_id}, "kill_on_disconnect": True}
    for name, more in (("stays", {}), ("goes", {"kill_on_loss": True})):
        client.receive(client.open({**call, **more, "id": name, "argv": ["sleep", "1000"]}))
    client = gateways.restart()
    eventually(lambda: len(running(client, session_id)) == 1, "the end of one of them")
    assert running(client, session_id)[0]["id"] == "stays"
    client.call("destroy_session", session_id=session_id)


def test_whoever_waits_for_an_approval_can_go_on_waiting(
    gateways: Gateways, client: Client
) -> None:
    session_id = client.create(runtime="container", limits=SMALL)
    asking = {"session_id": session_id, "action": "drop the table", "wait": True, "timeout": 60.0}
    client.open({"op": "confirm_action", **asking})
    other = gateways.connect()

    def pending() -> list[dict[str, Any]]:
        return other.call("list_approvals", session_id=session_id)["approvals"]

    eventually(pending, "the approval")
    before = pending()
    client = gateways.restart()
    other = gateways.connect()
    assert pending() == before
    again = {"approval_id": before[0]["approval_id"], **asking}
    waiting = client.open({"op": "confirm_action", **again})
    other.call("approve_action", approval_id=before[0]["approval_id"], approved=True)
    assert wire.unpack_dict(client.receive(waiting)[1])["approved"] is True
    assert pending() == []
    client.call("destroy_session", session_id=session_id)


def test_what_is_overdue_when_a_gateway_starts_ends_at_once_and_is_told_so(
    gateways: Gateways, client: Client, runtime: str
) -> None:
    brief = client.create(runtime=runtime, limits=SMALL, lifetime=6.0)
    paused = client.create(runtime=runtime, limits=SMALL, lifetime=8.0)
    client.call("pause_session", session_id=paused)
    over = float(client.session(paused)["expires_at"])
    gateways.kill()
    eventually(lambda: time.time() > over, "the end of their lives")
    client = gateways.start()
    for name in (brief, paused):
        eventually(lambda name=name: client.session(name)["phase"] == "ended", "its end")
        assert client.session(name)["ended_reason"] == "its lifetime was over"
        assert gateways.traces(gateways.sandboxes()[name]) == []
