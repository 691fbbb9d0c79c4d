"""Old rows go, and nothing that happens meanwhile looks as if somebody had removed them."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from k8e.audit import query
from k8e.audit.query import Checked
from k8e.audit.rows import AuditRow
from k8e.audit.segments import Excess, SegmentWriter, segments
from k8e.audit.trail import Trail
from tests.audit.test_trail import PATIENCE, make, read

DYING = """
import asyncio, os, signal, sys
from pathlib import Path
from k8e.audit.trail import Trail

unlink, left = Path.unlink, [int(sys.argv[2])]

def dying(path, missing_ok=False):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    unlink(path, missing_ok=missing_ok)

async def main():
    trail = Trail(Path(sys.argv[1]), max_bytes=256 << 10, max_age=0)
    for number in range(2000):
        trail.record("file.written", path=f"{number:0200d}")
    Path.unlink = dying
    await trail.prune()

asyncio.run(main())
"""
"""A gateway that dies when it has removed so many segments, and is about to remove the next."""


def overfull(folder: Path) -> Trail:
    """A trail of which most is too much."""
    trail = make(folder, max_bytes=256 << 10)
    for number in range(2000):
        trail.record("file.written", path=f"{number:0200d}")
    return trail


async def test_the_oldest_rows_go_when_there_are_too_many_and_that_is_no_gap(
    tmp_path: Path,
) -> None:
    trail = make(tmp_path, max_bytes=256 << 10)
    for number in range(2000):
        trail.record("file.written", path=f"{number:0200d}")
    assert len(segments(tmp_path)) > 8
    await trail.prune()
    found = await trail.verify()
    assert found.first > 1
    assert found.problems == []
    assert sum(path.stat().st_size for path in segments(tmp_path)) <= 256 << 10
    assert read(tmp_path)[-1]["action"] == "audit.pruned"
    segments(tmp_path)[0].unlink()
    assert len((await trail.verify()).problems) == 1


async def test_rows_go_when_they_are_too_old(tmp_path: Path) -> None:
    trail = make(tmp_path, max_bytes=1 << 20, max_age=3600)
    for number in range(400):
        trail.record("file.written", path=f"{number:01000d}")
    first, second, *_ = segments(tmp_path)
    os.utime(first, (0, time.time() - 3601))
    await trail.prune()
    assert segments(tmp_path)[0] == second
    assert (await trail.verify()).problems == []


@pytest.mark.parametrize("removed", [0, 1, 3])
async def test_who_dies_while_it_removes_rows_leaves_no_gap_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: int
) -> None:
    argv = [sys.executable, "-c", DYING, str(tmp_path), str(removed)]
    died = await asyncio.to_thread(subprocess.run, argv, check=False, timeout=PATIENCE)
    assert died.returncode == -signal.SIGKILL
    assert read(tmp_path)[-1]["action"] == "audit.pruned"
    monkeypatch.setattr("k8e.audit.trail.SYNC_SECONDS", 0.01)
    trail = make(tmp_path, max_bytes=256 << 10)
    found = await trail.verify()
    assert (found.problems, found.first > 1) == ([], removed > 0)
    done, remove = threading.Event(), Excess.remove

    def removing(excess: Excess) -> None:
        remove(excess)
        done.set()

    monkeypatch.setattr(Excess, "remove", removing)
    async with trail.running():
        assert await asyncio.to_thread(done.wait, PATIENCE)
    assert sum(path.stat().st_size for path in segments(tmp_path)) < 260 << 10
    again = make(tmp_path)
    assert (await again.verify()).problems == []
    segments(tmp_path)[0].unlink()  # this, nobody has announced
    assert len((await again.verify()).problems) == 1


async def test_rows_stay_while_their_removal_cannot_be_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trail = overfull(tmp_path)
    before = segments(tmp_path)

    def full(writer: SegmentWriter, row: AuditRow) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(SegmentWriter, "append", full)
        await trail.prune()
    assert segments(tmp_path) == before
    await trail.prune()
    assert len(segments(tmp_path)) < len(before)
    assert (await trail.verify()).problems == []


async def test_rows_that_go_while_the_chain_is_checked_are_no_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trail = overfull(tmp_path)
    looks, step = 0, query.Verifying.step
    loop = asyncio.get_running_loop()

    def stepping(check: query.Verifying) -> Checked | None:
        nonlocal looks
        looks += 1
        if looks == 2:  # the first segment has been read, and the others are going to be
            asyncio.run_coroutine_threadsafe(trail.prune(), loop).result(PATIENCE)
        return step(check)

    monkeypatch.setattr(query.Verifying, "step", stepping)
    assert (await trail.verify()).problems == []
