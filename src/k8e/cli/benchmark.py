"""``k8e sandbox benchmark``: how fast this gateway is, beside what the host itself needs."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from k8e import errors
from k8e.cli import fast, printing, sandbox
from k8e.client.blocking import SandboxClient

T = TypeVar("T")
MOST = 100  # sessions at a time, and rounds
RUNS = 5  # of the same program, in each session
PROGRAM = "true"
DATA = os.urandom(1 << 20)
FILE = "benchmark.bin"


def _no_samples() -> list[float]:
    return []


@dataclass
class Row:
    """One thing that was measured, and what it is compared with."""

    name: str
    floor: str = ""
    """What the host needs for the same, without any sandbox; its name."""
    samples: list[float] = field(default_factory=_no_samples)
    floor_samples: list[float] = field(default_factory=_no_samples)

    def to_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "name": self.name,
            "samples": len(self.samples),
            "median_ms": _ms(statistics.median(self.samples)),
            "min_ms": _ms(min(self.samples)),
            "max_ms": _ms(max(self.samples)),
        }
        if self.floor:
            floor_ms = _ms(statistics.median(self.floor_samples))
            told |= {"floor": self.floor, "floor_ms": floor_ms}
        return told


def benchmark(options: argparse.Namespace) -> int:
    for name in ("pool_size", "iterations"):
        if not 1 <= getattr(options, name) <= MOST:
            flag = "--" + name.replace("_", "-")
            raise errors.InvalidRequest(f"{flag} must be 1 to {MOST}")
    rows = {
        "create": Row("create"),
        "first": Row("first run", f"bash -c {PROGRAM} on this host"),
        "run": Row("run", f"bash -c {PROGRAM} on this host"),
        "write": Row("write 1 MiB", "a file on this host"),
        "read": Row("read 1 MiB", "a file on this host"),
        "destroy": Row("destroy"),
    }
    with sandbox.connect(options) as client, ThreadPoolExecutor(options.pool_size) as pool:
        for _ in range(options.iterations):
            _round(client, pool, options, rows)
    results = [row.to_json() for row in rows.values()]
    fast.write(2, "".join(f"{line}\n" for line in _table(results)).encode())
    printing.answer(
        {"iterations": options.iterations, "pool_size": options.pool_size, "results": results}
    )
    return 0


def _round(
    client: SandboxClient,
    pool: ThreadPoolExecutor,
    options: argparse.Namespace,
    rows: dict[str, Row],
) -> None:
    """Make sessions at once, use one after the other, destroy them at once."""

    def create(_: int) -> str:
        return _timed(rows["create"].samples, lambda: client.create_session(options.runtime))

    def destroy(session_id: str) -> None:
        _timed(rows["destroy"].samples, lambda: client.destroy_session(session_id))

    tasks = [pool.submit(create, number) for number in range(options.pool_size)]
    failed = [error for task in tasks if (error := task.exception())]
    made = [task.result() for task in tasks if not task.exception()]
    try:
        if failed:
            raise failed[0]
        for session_id in made:
            _use(client, session_id, rows)
    finally:
        list(pool.map(destroy, made))


def _use(client: SandboxClient, session_id: str, rows: dict[str, Row]) -> None:
    for key in ("first", *["run"] * RUNS):
        row = rows[key]
        _timed(row.samples, lambda: client.run(PROGRAM, session_id=session_id))
        _timed(row.floor_samples, lambda: subprocess.run(["bash", "-c", PROGRAM], check=True))
    write, read = rows["write"], rows["read"]
    _timed(write.samples, lambda: client.write_file(session_id, FILE, DATA))
    found = _timed(read.samples, lambda: client.read_bytes(session_id, FILE))
    if found != DATA:
        raise errors.GuestFailed("what was read is not what was written")
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder, FILE)
        _timed(write.floor_samples, lambda: local.write_bytes(DATA))
        _timed(read.floor_samples, local.read_bytes)


def _timed(samples: list[float], work: Callable[[], T]) -> T:
    begin = time.perf_counter()
    result = work()
    samples.append(time.perf_counter() - begin)
    return result


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _table(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"{'':12}{'MEDIAN ms':>10}{'MIN':>10}{'MAX':>10}  FLOOR"
    for row in results:
        floor = f"  {row['floor_ms']:.3f} ({row['floor']})" if "floor" in row else ""
        numbers = "".join(f"{row[key]:>10.3f}" for key in ("median_ms", "min_ms", "max_ms"))
        yield f"{row['name']:12}{numbers}{floor}"
