"""A disk that one sandbox fills: its neighbours write on, and the gateway stays in charge."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
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
    pytest.mark.timeout(400),
    # More than there is, on purpose.
    pytest.mark.filterwarnings("ignore:a limit is more than this machine has"),
]
SIZE = 640 * MIB
KEPT, RESERVE = 64 * MIB, 16 * MIB
LIMITS = {"disk": 2048 * MIB, "memory": 512 * MIB}
FILL = """
import os, sys, time
began, done, refused, first = time.time(), 0, 0, 0
block = os.urandom(1 << 20)
with open("/workspace/all-of-it", "wb", buffering=0) as file:
    while refused < 5:
        try:
            done += file.write(block)
            refused = 0
        except OSError as error:
            assert error.errno == 28, error
            refused += 1
            first = first or done
            time.sleep(0.2)  # others may give back what they do not need
    os.fsync(file.fileno())  # all that was taken is on the disk
print(first >> 20, done >> 20, round(time.time() - began, 2))
"""
CHURN = """
import os
block, refused = os.urandom(1 << 20), 0
for number in range(8):
    path = f"/workspace/turn-{number % 3}"
    try:
        with open(path, "wb", buffering=0) as file:
            for _ in range(150):
                file.write(block)
            os.fsync(file.fileno())
    except OSError as error:
        assert error.errno == 28, error
        refused += 1
        os.unlink(path)
print("refused", refused)
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
    place = DiskPlace(SIZE, K8E_MIN_FREE_DISK=str(KEPT))
    yield place
    place.close()


@pytest.fixture(params=["gvisor", "container"])
def runtime(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def client(place: DiskPlace, request: pytest.FixtureRequest) -> Generator[SandboxClient]:
    place.environ["K8E_DISK_RESERVE"] = getattr(request, "param", str(RESERVE))
    place.json("sandbox", "status")  # starts it
    with SandboxClient(endpoint=place.endpoint) as client:
        yield client


def beside(work: Callable[[], Any]) -> Callable[[], Any]:
    """Run something in a thread; what it gives, or its error, is for whoever asks."""
    told: dict[str, Any] = {}

    def run() -> None:
        try:
            told["answer"] = work()
        except BaseException as error:
            told["error"] = error

    thread = threading.Thread(target=run)
    thread.start()

    def answer() -> Any:
        thread.join(200)
        assert not thread.is_alive()
        if "error" in told:
            raise told["error"]
        return told["answer"]

    return answer


def python(place: DiskPlace, session_id: str, code: str) -> Any:
    """Run code on a connection of its own, in a thread perhaps."""
    with SandboxClient(endpoint=place.endpoint) as client:
        done = client.run(code, language="python", session_id=session_id, timeout=180)
        assert done.exit_code == 0, done.stderr
        return done


def used(place: DiskPlace) -> list[int]:
    """What the files of workspaces hold, written out or not."""
    return [
        sum(path.stat().st_blocks * 512 for path in Path(point).iterdir())
        for point in workspaces(place)
    ]


def workspaces(place: DiskPlace) -> list[str]:
    """Where the workspaces of a gateway are mounted."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    ours = (line.split(" ")[4] for line in lines if " - ext4 /dev/loop" in line)
    return sorted(point for point in ours if point.startswith(str(place.run_dir / "sandboxes")))


def kinds(client: SandboxClient, session_id: str) -> list[str]:
    return [event.kind for event in client.events(session_id)]


def io_errors(place: DiskPlace) -> int:
    """What the file systems of workspaces, and of the disk below them, could not write."""
    points = [str(place.data), *workspaces(place)]
    numbers = [os.minor(Path(point).stat().st_dev) for point in points]
    counted = (Path(f"/sys/fs/ext4/loop{number}/errors_count") for number in numbers)
    return sum(int(path.read_text()) for path in counted)


def test_one_sandbox_fills_the_disk_and_its_neighbour_writes_on(
    place: DiskPlace, client: SandboxClient, runtime: str
) -> None:
    before, more = place.free, list[str]()
    place.json("sandbox", "api-key", "create", "doomed")
    one, two = (client.create_session(runtime_class=runtime, limits=LIMITS) for _ in range(2))
    neighbour = beside(lambda: python(place, two, WRITE_ON))
    filled = python(place, one, FILL)
    first, size, _ = map(float, filled.stdout.split())
    assert first > 150
    assert size > 350, "it gets what there is"
    assert place.free >= KEPT // 2, "what is kept free stays free"
    assert neighbour().stdout == "fine\n"
    # The gateway is in charge.
    place.json("sandbox", "api-key", "delete", "doomed")
    client.update_allowed_hosts(two, ["none"])
    assert client.exec(two, ["true"]).exit_code == 0
    told = client.exec(one, ["sh", "-c", "head -c 200M /dev/zero > /workspace/more"])
    assert "nearly full" in told.limits[0].message
    grow = ["sh", "-c", "head -c 200M /dev/zero >> /workspace/more"]
    eventually(lambda: client.exec(one, grow) and "workspace.held" in kinds(client, one), 30)
    assert "workspace.held" not in kinds(client, two)
    status = place.json("status")["disk"]
    assert status["held_back"] >= 1
    with pytest.raises(errors.LimitExceeded, match="disk is nearly full"):  # noqa: PT012 - any of them
        for _ in range(12):  # each may have what is set apart for small ones
            more.append(client.create_session(runtime_class=runtime, limits=LIMITS))
    assert client.exec(two, ["touch", "/workspace/still"]).exit_code == 0
    assert io_errors(place) == 0
    # Room comes back.
    client.exec(one, ["rm", "/workspace/all-of-it", "/workspace/more"])
    eventually(lambda: place.free > 300 * MIB, 20)
    eventually(lambda: "workspace.released" in kinds(client, one))
    client.destroy_session(one)
    assert client.exec(two, ["sh", "-c", "head -c 100M /dev/zero > /workspace/b"]).exit_code == 0
    for session_id in (two, *more):
        client.destroy_session(session_id)
    eventually(lambda: place.free > before - 16 * MIB)
    assert place.json("audit", "verify")["ok"]


def test_writing_deleting_and_writing_again_never_meets_the_end_of_the_disk(
    place: DiskPlace, client: SandboxClient, runtime: str
) -> None:
    ids = [client.create_session(runtime_class=runtime, limits=LIMITS) for _ in range(3)]

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
        said = [turn().stdout for turn in turns]
    finally:
        done.set()
    assert all(text.startswith("refused") for text in said)
    assert lowest() > KEPT // 4
    assert io_errors(place) == 0
    for at in ids:
        mended = client.exec(at, ["sh", "-c", "rm -f /workspace/*; echo x > /workspace/y"])
        assert mended.exit_code == 0
        client.destroy_session(at)


def rows(place: DiskPlace, action: str) -> list[dict[str, Any]]:
    done = place.cli("audit", "--action", action, "--json", "--limit", "5000")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_on_a_disk_that_others_have_filled_what_makes_things_safer_works_and_the_rest_is_refused(
    place: DiskPlace, client: SandboxClient
) -> None:
    for name in ("one", "two", "three"):
        place.json("sandbox", "api-key", "create", name)
    hosts = ["a.example", "b.example"]
    first, second = (client.create_session("container", hosts) for _ in range(2))
    hog = place.fill()
    place.json("sandbox", "api-key", "delete", "one")
    assert client.update_allowed_hosts(first, ["a.example"])
    done = sum(1 for _ in range(20) if client.exec(second, ["true"]).exit_code == 0)
    assert done == 20
    client.destroy_session(second)
    with pytest.raises(errors.LimitExceeded, match="disk is nearly full"):
        client.create_session(runtime_class="container")
    with pytest.raises(errors.LimitExceeded, match="disk is nearly full"):
        client.save_snapshot(first, "late")
    client.close()
    # A gateway that dies meanwhile comes back, with everything that it answered.
    place.kill_gateway()
    (place.data / "reserve").unlink(missing_ok=True)  # and somebody else took what it gave up
    place.fill()
    place.json("sandbox", "api-key", "delete", "two")
    with SandboxClient(endpoint=place.endpoint) as again:
        assert again.egress(first).allowed_hosts == ["a.example"]
        again.update_allowed_hosts(first, ["none"])
        again.destroy_session(first)
    verified = place.json("audit", "verify")
    assert verified["ok"], verified
    assert len(rows(place, "key.deleted")) == 2
    assert len(rows(place, "exec.started")) == len(rows(place, "exec.finished")) == 20
    assert not rows(place, "audit.lost")
    hog.unlink()
    eventually(lambda: place.json("status")["disk"]["reserve_held"] == RESERVE)
    place.json("sandbox", "run", "--runtime", "container", "echo fine")


@pytest.mark.parametrize("client", ["0"], indirect=True)
def test_what_cannot_be_audited_is_refused_until_there_is_room(
    place: DiskPlace, client: SandboxClient
) -> None:
    session_id = client.create_session(runtime_class="container")
    place.fill()
    command = "x" * 1000  # long ones, so that what was set apart for rows is used up
    with pytest.raises(errors.LimitExceeded, match="audit trail"):
        use_up(lambda: client.exec(session_id, ["true", command]))
    client.destroy_session(session_id)
    place.fill().unlink()
    again = client.create_session(runtime_class="container")
    assert client.exec(again, ["true"]).exit_code == 0
    assert place.json("audit", "verify")["ok"]
    assert not rows(place, "audit.lost")


def use_up(call: Callable[[], Any]) -> None:
    for _ in range(2000):
        call()


def test_what_a_broken_workspace_holds_is_saved_and_it_is_repaired_or_its_session_ends(
    place: DiskPlace, client: SandboxClient, runtime: str
) -> None:
    session_id = client.create_session(runtime_class=runtime)
    assert (
        client.exec(
            session_id, ["sh", "-c", "echo precious > /workspace/mine; sync /workspace/mine"]
        ).exit_code
        == 0
    )
    hog = place.fill(KEPT // 2)  # so that there is no room to save anything
    break_workspaces(place)
    failed = client.exec(session_id, ["touch", "/workspace/more"])
    assert b"Read-only" in failed.stderr_bytes
    eventually(lambda: "workspace.failed" in kinds(client, session_id))
    assert place.json("status")["disk"]["broken"] == 1
    hog.unlink()
    eventually(lambda: client.list_snapshots(), 40)
    name = client.list_snapshots()[0].name
    if runtime == "container":  # a sandbox that sees what is mounted later goes on
        eventually(lambda: "workspace.healed" in kinds(client, session_id), 40)
        again = "cat /workspace/mine && echo more > /workspace/more && rm /workspace/mine"
        assert client.exec(session_id, again).stdout == "precious\n"
        assert client.get_session(session_id).phase == "active"
        assert place.json("status")["disk"]["workspaces"] == 1
        eventually(lambda: place.json("status")["disk"]["broken"] == 0)
    else:
        ended = eventually(lambda: client.get_session(session_id).ended_reason, 20)
        assert name in ended
    assert "workspace.rescued" in kinds(client, session_id)
    restored = client.create_session(runtime_class=runtime, snapshot=name)
    # gVisor cannot read a file again that it has lately written; it is told which these are.
    events = client.events(session_id)
    rescued = next(item for item in events if item.kind == "workspace.rescued")
    if runtime == "container" or "mine" not in rescued.fields.get("warning", ""):
        assert client.exec(restored, ["cat", "/workspace/mine"]).stdout == "precious\n"


KILLED_IN_BETWEEN = """#!/bin/sh
test -e {flag} && exec {e2fsck} "$@"
{e2fsck} "$@"
touch {flag}
{unmount}
kill -9 $PPID
"""
"""An e2fsck that ends the gateway which runs it, the first time."""


@pytest.mark.parametrize("unmount", ["", "umount -l {slot}"])
def test_a_gateway_that_is_killed_while_it_repairs_a_workspace_leaves_it_to_the_next_one(
    place: DiskPlace, unmount: str
) -> None:
    tools = place.folder / "tools"
    tools.mkdir()
    place.environ["PATH"] = f"{tools}:{place.environ['PATH']}"
    place.environ["K8E_DISK_RESERVE"] = str(RESERVE)
    place.json("sandbox", "status")
    with SandboxClient(endpoint=place.endpoint) as client:
        session_id = client.create_session(runtime_class="container")
        made = "echo precious > /workspace/mine; sync /workspace/mine"
        assert client.exec(session_id, ["sh", "-c", made]).exit_code == 0
        (slot,) = workspaces(place)
        flag, real = tools / "killed", shutil.which("e2fsck", path="/usr/sbin:/sbin")
        unmount = unmount.format(slot=slot)
        script = KILLED_IN_BETWEEN.format(flag=flag, e2fsck=real, unmount=unmount)
        (tools / "e2fsck").write_text(script)
        (tools / "e2fsck").chmod(0o755)
        break_workspaces(place)
        eventually(lambda: flag.exists() and not place.answers())
    assert workspaces(place) == ([] if unmount else [slot])
    place.json("sandbox", "status")
    with SandboxClient(endpoint=place.endpoint) as client:
        if not unmount:
            eventually(lambda: "workspace.healed" in kinds(client, session_id))
        again = "cat /workspace/mine && echo more > /workspace/more"
        assert client.exec(session_id, ["sh", "-c", again]).stdout == "precious\n"
        assert place.json("status")["disk"]["workspaces"] == 1
        assert not list(place.data.rglob("*.healed"))


def break_workspaces(place: DiskPlace) -> None:
    """Have the kernel give up the file systems of all workspaces, as after an error of a disk."""
    for point in workspaces(place):
        subprocess.run(["mount", "-o", "remount,abort", point], check=True, timeout=20)


def test_bounds_hold_while_no_gateway_runs(place: DiskPlace, client: SandboxClient) -> None:
    one, two = (client.create_session(runtime_class="container", limits=LIMITS) for _ in range(2))
    client.start(one, FILL, language="python")
    neighbour = client.start(two, WRITE_ON, language="python")
    eventually(lambda: max(used(place)) > 100 * MIB, 60)
    client.close()
    place.kill_gateway()
    before: list[int] = []
    while before != (before := [*used(place), place.free]):  # until it has all that it was given
        time.sleep(1.5)
    assert max(used(place)) < SIZE - KEPT
    assert place.free >= KEPT // 2
    assert io_errors(place) == 0
    place.json("sandbox", "status")
    with SandboxClient(endpoint=place.endpoint) as again:
        assert again.get_run(neighbour.run_id).wait().stdout == "fine\n"
        assert again.exec(two, ["sh", "-c", "echo x >> /workspace/mine"]).exit_code == 0
