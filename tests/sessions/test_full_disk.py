"""A disk that one sandbox fills: its neighbours write on, and the gateway stays in charge."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from k8e import SandboxClient, errors
from tests.disks import MIB, DiskPlace
from tests.places import eventually

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="the local runtimes need root"),
    pytest.mark.timeout(240),
]
SIZE = 640 * MIB
KEPT, RESERVE = 64 * MIB, 16 * MIB
LIMITS = {"disk": 2048 * MIB, "memory": 512 * MIB}
FILL = """
import os, sys, time
began, done = time.time(), 0
block = os.urandom(1 << 20)
with open("/workspace/all-of-it", "wb", buffering=0) as file:
    try:
        while True:
            done += file.write(block)
    except OSError as error:
        print(error.errno, done >> 20, round(time.time() - began, 2))
"""
CHURN = """
import os, time
until = time.time() + 8
block = os.urandom(1 << 20)
number = 0
while time.time() < until:
    number += 1
    try:
        with open(f"/workspace/turn-{number % 3}", "wb", buffering=0) as file:
            for _ in range(200):
                file.write(block)
            os.fsync(file.fileno())
    except OSError as error:
        assert error.errno == 28, error
        os.unlink(f"/workspace/turn-{number % 3}")
print(number)
"""
WRITE_ON = """
import os, time
until, count = time.time() + 6, 0
while time.time() < until:
    with open("/workspace/mine", "ab" if count % 50 else "wb") as file:
        file.write(b"x" * 65536)
        file.flush()
        os.fsync(file.fileno())
    count += 1
os.makedirs("/workspace/more")
print("fine")
"""


@pytest.fixture
def place() -> Generator[DiskPlace]:
    place = DiskPlace(SIZE, K8E_MIN_FREE_DISK=str(KEPT), K8E_DISK_RESERVE=str(RESERVE))
    yield place
    place.close()


@pytest.fixture(params=["gvisor", "container"])
def runtime(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def client(place: DiskPlace) -> Generator[SandboxClient]:
    place.json("sandbox", "status")  # starts it
    with SandboxClient(endpoint=place.endpoint) as client:
        yield client


def beside(work: Callable[[], Any]) -> Callable[[], Any]:
    """Run something in a thread; what it gives, or its error, is for who asks."""
    told: dict[str, Any] = {}

    def run() -> None:
        try:
            told["answer"] = work()
        except BaseException as error:
            told["error"] = error

    thread = threading.Thread(target=run)
    thread.start()

    def answer() -> Any:
        thread.join(120)
        assert not thread.is_alive()
        if "error" in told:
            raise told["error"]
        return told["answer"]

    return answer


def python(place: DiskPlace, session_id: str, code: str) -> Any:
    """Run code on a connection of its own, in a thread perhaps."""
    with SandboxClient(endpoint=place.endpoint) as client:
        done = client.run(code, language="python", session_id=session_id, timeout=100)
        assert done.exit_code == 0, done.stderr
        return done


def kinds(client: SandboxClient, session_id: str) -> list[str]:
    return [event.kind for event in client.events(session_id)]


def io_errors() -> int:
    """What loop devices could not write, as their file systems count it."""
    found = Path("/sys/fs/ext4").glob("loop*/errors_count")
    return sum(int(path.read_text()) for path in found)


def test_one_sandbox_fills_the_disk_and_its_neighbour_writes_on(
    place: DiskPlace, client: SandboxClient, runtime: str
) -> None:
    before = place.free
    place.json("sandbox", "api-key", "create", "doomed")
    one, two = (client.create_session(runtime=runtime, limits=LIMITS) for _ in range(2))
    neighbour = beside(lambda: python(place, two, WRITE_ON))
    filled = python(place, one, FILL)
    number, size, _ = filled.stdout.split()
    assert number == "28", "the one that grows is told that there is no room"
    print(filled.stdout)
    assert int(size) > 300, "it gets what there is"
    assert place.free >= KEPT // 2, "what is kept free stays free"
    assert neighbour().stdout == "fine\n"
    # The gateway is in charge.
    place.json("sandbox", "api-key", "delete", "doomed")
    client.update_allowed_hosts(two, ["none"])
    assert client.exec(two, ["true"]).exit_code == 0
    eventually(lambda: "workspace.held" in kinds(client, one))
    assert "workspace.held" not in kinds(client, two)
    told = client.exec(one, ["sh", "-c", "head -c 80M /dev/zero > /workspace/more"])
    assert "nearly full" in told.limits[0].message
    status = place.json("status")["disk"]
    assert status["held_back"] >= 1
    with pytest.raises(errors.LimitExceeded, match="disk is nearly full"):
        eventually(lambda: client.create_session(runtime=runtime, limits=LIMITS) and None)
    # Room comes back.
    client.exec(one, ["rm", "/workspace/all-of-it", "/workspace/more"])
    eventually(lambda: place.free > 300 * MIB, 20)
    eventually(lambda: "workspace.released" in kinds(client, one))
    client.destroy_session(one)
    assert client.exec(two, ["sh", "-c", "head -c 100M /dev/zero > /workspace/b"]).exit_code == 0
    client.destroy_session(two)
    eventually(lambda: place.free > before - 16 * MIB)
    assert place.json("sandbox", "audit", "verify")["ok"]
    assert io_errors() == 0


def test_writing_deleting_and_writing_again_never_meets_the_end_of_the_disk(
    place: DiskPlace, client: SandboxClient, runtime: str
) -> None:
    ids = [client.create_session(runtime=runtime, limits=LIMITS) for _ in range(3)]

    least = place.free
    turns = [beside(partial(python, place, session_id, CHURN)) for session_id in ids]
    done = threading.Event()

    def look() -> int:
        low = least
        while not done.wait(0.01):
            low = min(low, place.free)
        return low

    lowest = beside(look)
    try:
        for turn in turns:
            assert int(turn().stdout) > 3
    finally:
        done.set()
    assert lowest() > 0
    assert io_errors() == 0
    for at in ids:
        assert client.exec(at, ["sh", "-c", "rm -f /workspace/*; echo x > /workspace/y"]).exit_code == 0
        client.destroy_session(at)
