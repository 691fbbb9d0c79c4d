"""Sessions that hold thousands of locks on files, which no limit of the kernel counts."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
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
# The same in a thread whose process seems to have ended: its first thread has, and what the kernel
# tells of a process is what it knows of that one.
HIDDEN = """
import ctypes, platform, threading
threading.Thread(target=exec, args=({code!r}, {{}})).start()
ctypes.CDLL(None).syscall({{'x86_64': 60, 'aarch64': 93}}[platform.machine()], 0)
"""


def lock(client: Client, session_id: str, files: int, *, hidden: bool = False) -> None:
    code = LOCK.format(files=files)
    argv = ["/usr/bin/python3", "-I", "-c", HIDDEN.format(code=code) if hidden else code]
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


@pytest.mark.skipif(os.geteuid() != 0, reason="the local runtimes need root")
@pytest.mark.timeout(120)
def test_locks_of_a_process_whose_first_thread_has_ended_count_too(client: Client) -> None:
    greedy = client.create(runtime="container")
    lock(client, greedy, 15, hidden=True)
    found = eventually(lambda: ended(client, greedy), "the end of a session", seconds=40)
    assert f"more than {locks.MOST} locks" in found


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


def test_locks_of_threads_that_share_their_open_files_count_once(tmp_path: Path) -> None:
    before = locks.count_held([os.getpid()])
    over = threading.Event()
    others = [threading.Thread(target=over.wait) for _ in range(20)]
    for item in others:
        item.start()
    try:
        with open(tmp_path / "file", "w") as file:
            for at in range(50):
                fcntl.fcntl(file, fcntl.F_SETLK, struct.pack("hhqqi4x", 1, 0, 2 * at, 1, 0))
            assert locks.count_held([os.getpid(), os.getpid()]) == before + 50
    finally:
        over.set()
        for item in others:
            item.join()
