"""A sandbox whose process does not end when it is killed is told, and removed when it can be."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from k8e.conformance.promises.lifecycle import frozen, waits_for_kernel
from k8e.runtimes.base import Leftover, NotRemoved
from k8e.runtimes.leftovers import (
    FIRST_DELAY,
    LONGEST_DELAY,
    NOTE,
    Leftovers,
    RemovalRetries,
    delay_of,
)
from tests.sessions.fakes import until
from tests.sessions.gateways import Client, Gateways, eventually

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the local runtimes need root")


def mount_point(gateways: Gateways, sandbox_id: str) -> Path:
    slot = gateways.run_dir / "sandboxes" / sandbox_id / "slot"
    return slot / "w" if (slot / "w").is_dir() else slot


def destroy(client: Client, session_id: str) -> str:
    return str(client.call("destroy_session", session_id=session_id).get("warning", ""))


@needs_root
@pytest.mark.timeout(180)
def test_what_resists_its_end_is_told_and_removed_later_by_another_gateway(
    gateways: Gateways, client: Client, runtime: str
) -> None:
    session_id = client.create(runtime=runtime)
    sandbox_id = gateways.sandboxes()[session_id]
    with frozen(mount_point(gateways, sandbox_id)):
        call = {"op": "exec", "argv": ["/bin/sh", "-c", "echo go; echo > file"]}
        client.output(client.open({**call, "session": {"id": session_id}}), until=b"go\n")
        eventually(lambda: waits_for_kernel(sandbox_id), "a process that cannot be killed")
        told = destroy(client, session_id)
        assert "1 process (" in told
        assert "did not end when killed" in told
        (left,) = client.call("status")["removals"]
        assert left["sandbox_id"] == sandbox_id
        assert left["what"] in told
        assert "k8e_removals_pending 1.0" in client.call("metrics")["text"]
        client = gateways.restart()  # with the process still there
        assert [item["sandbox_id"] for item in client.call("doctor")["removals"]] == [sandbox_id]
        others = client.create(runtime="container")
        assert uids_of(gateways, gateways.sandboxes()[others]) != uids_of(gateways, sandbox_id)
        assert destroy(client, others) == "", "another one ends as ever"
    eventually(lambda: not client.call("status")["removals"], "the end of it", seconds=90)
    eventually(lambda: not gateways.traces(sandbox_id), "that the host has forgotten it")


def uids_of(gateways: Gateways, sandbox_id: str) -> Any:
    record = gateways.run_dir / "sandboxes" / sandbox_id / "sandbox.json"
    return json.loads(record.read_text())["id_base"]


def test_tries_get_rarer_and_never_stop() -> None:
    delays = [delay_of(Leftover("sb-x", "", 0.0, tries)) for tries in (1, 2, 3, 7, 8, 10**6)]
    assert delays[0] == FIRST_DELAY
    assert delays == sorted(delays)
    assert delays[-1] == LONGEST_DELAY


def test_a_note_survives_its_gateway_and_a_damaged_one_harms_nobody(tmp_path: Path) -> None:
    for name in ("sb-a", "sb-b", "sb-c"):
        (tmp_path / name).mkdir()
    before = Leftovers(tmp_path)
    before.note("sb-a", "a process")
    (tmp_path / "sb-b" / NOTE).write_text('{"what": ')
    after = Leftovers(tmp_path)
    after.load()
    assert [(item.sandbox_id, item.what) for item in after.listing()] == [("sb-a", "a process")]
    assert after.listing()[0].since == before.listing()[0].since


class Stubborn:
    """Stands in for all runtimes: removes nothing for so many times."""

    def __init__(self, leftovers: Leftovers, failures: int) -> None:
        self.asked: list[str] = []
        self._leftovers = leftovers
        self._failures = failures

    async def purge(self, sandbox_id: str) -> None:
        self.asked.append(sandbox_id)
        if len(self.asked) > self._failures:
            self._leftovers.forget(sandbox_id)
            return
        if len(self.asked) == 1:
            raise OSError("what nobody thought of")
        self._leftovers.note(sandbox_id, "a process")
        raise NotRemoved("a process")


async def test_it_is_tried_until_it_is_gone_whatever_goes_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k8e.runtimes.leftovers.FIRST_DELAY", 0.001)
    leftovers = Leftovers(tmp_path)
    leftovers.note("sb-early", "what an earlier gateway left")
    stubborn = Stubborn(leftovers, failures=4)
    removal = RemovalRetries(leftovers, stubborn.purge)
    removal.start()
    try:
        await until(lambda: not leftovers.listing())
        assert stubborn.asked == ["sb-early"] * 5
    finally:
        await removal.stop()
