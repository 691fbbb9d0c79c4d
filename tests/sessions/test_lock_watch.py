"""Sessions that hold thousands of locks on files, which no limit of the kernel counts."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

import pytest

from k8e.runtimes import locks
from tests.sessions.gateways import Client, eventually

LOCK = """
import fcntl, os, struct, time
kept = []
for number in range({files}):
    kept.append(os.open(f'/workspace/{{number}}', os.O_RDWR | os.O_CREAT))
    for at in range(1000):
        fcntl.fcntl(kept[-1], fcntl.F_SETLK, struct.pack('hhqqi4x', 1, 0, 2 * at, 1, 0))
print('taken', flush=True)
time.sleep(600)
"""


def lock(client: Client, session_id: str, files: int) -> None:
    argv = ["/usr/bin/python3", "-I", "-c", LOCK.format(files=files)]
    client.open({"op": "exec", "session": {"id": session_id}, "argv": argv, "background": True})


@pytest.mark.skipif(os.geteuid() != 0, reason="the local runtimes need root")
@pytest.mark.timeout(120)
def test_a_session_with_too_many_locks_ends_and_its_neighbours_do_not(client: Client) -> None:
    greedy, modest = (client.create(runtime="container") for _ in range(2))
    lock(client, modest, 2)
    lock(client, greedy, 15)
    found = eventually(lambda: ended(client, greedy), "the end of a session", seconds=40)
    assert f"more than {locks.MOST} locks" in found
    assert client.session(modest)["phase"] == "active"
    assert client.shell(modest, "echo alive") == "alive\n"
    client.call("destroy_session", session_id=modest)


def ended(client: Client, session_id: str) -> str:
    return str(client.session(session_id)["ended_reason"])


def test_locks_are_counted_where_they_are_held(tmp_path: Path) -> None:
    before = locks.count_held([os.getpid()])
    with open(tmp_path / "file", "w") as file:
        for at in range(50):
            fcntl.fcntl(file, fcntl.F_SETLK, struct.pack("hhqqi4x", 1, 0, 2 * at, 1, 0))
        assert locks.count_held([os.getpid()]) == before + 50
        assert locks.count_held([os.getpid()], most=10) > 10
        assert locks.count_on_host(most=1 << 20) >= 50
    assert locks.count_held([os.getpid(), 2**22 + 1]) == before, "one that is gone holds nothing"
