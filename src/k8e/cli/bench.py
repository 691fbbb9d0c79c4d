"""``k8e bench`` and ``k8e sandbox benchmark``: how fast a gateway is."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import signal
import statistics
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

from k8e import errors
from k8e._version import __version__
from k8e.bench import measure, suite
from k8e.bench.measure import TableRow
from k8e.cli import fast, output, sessions
from k8e.cli.parser import Commands
from k8e.client.blocking import SandboxClient

MOST = {"rounds": 1000, "at_once": 200}
MAX_BENCHMARK = 100  # rounds, and sessions at a time, of K8E's flags
TERMINATED = 143  # 128 + SIGTERM, as shells report it


def bench(options: argparse.Namespace) -> int:
    plan = _plan(options)
    now = datetime.datetime.now(datetime.UTC)
    with sessions.connect(options) as client:
        gateway = client.status()
        rows = _rows(client, options.runtime or [""], plan)
    if options.json:
        output.answer(
            {
                "at_once": plan.at_once,
                "client": {
                    "cpus": os.cpu_count(),
                    "k8e": __version__,
                    "python": platform.python_version(),
                    "system": f"{platform.system()} {platform.release()}",
                },
                "date": now.isoformat(timespec="seconds"),
                "gateway": {"version": gateway.get("version", "")},
                "quick": options.quick,
                "rounds": plan.rounds,
                "rows": [row.to_json() for row in rows],
            }
        )
    else:
        fast.write(1, f"{measure.table(rows)}\n".encode())
    return 0


def _plan(options: argparse.Namespace) -> suite.Plan:
    plan = suite.QUICK if options.quick else suite.Plan()
    for name, most in MOST.items():
        asked = getattr(options, name)
        if asked is None:
            continue
        if not 1 <= asked <= most:
            raise errors.InvalidRequest(f"--{name.replace('_', '-')} must be 1 to {most}")
        plan = replace(plan, **{name: asked})
    return plan


def _rows(client: SandboxClient, runtimes: Sequence[str], plan: suite.Plan) -> list[TableRow]:
    """The rows of each runtime in turn."""
    rows: list[TableRow] = []
    with _ended_by_sigterm(), _progress() as tell:
        for runtime in runtimes:
            rows += _measure(client, runtime, plan, tell)
    return rows


def _measure(
    client: SandboxClient, runtime: str, plan: suite.Plan, tell: suite.Tell
) -> list[TableRow]:
    where = f"{runtime}: " if runtime else ""
    measured = suite.Suite(client, runtime, plan, lambda what: tell(f"{where}{what}")).measure()
    # Closed also when a signal comes between two rows: that is when it destroys its sessions.
    with closing(measured):
        return list(measured)


@contextmanager
def _progress() -> Generator[suite.Tell]:
    """Shows on a terminal what is being measured, and removes the line at the end."""
    if not os.isatty(2):
        yield lambda _: None
        return
    try:
        yield lambda what: fast.write(2, f"\r\x1b[Kmeasuring {what} …".encode())
    finally:
        fast.write(2, b"\r\x1b[K")


@contextmanager
def _ended_by_sigterm() -> Generator[None]:
    """Let SIGTERM end the measurement like an exception, so that its sessions end too."""

    def end(*_: object) -> None:
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# K8E's name for it.


def benchmark(options: argparse.Namespace) -> int:
    """The suite with K8E's flags: a table on stderr and JSON with the times."""
    for name in ("pool_size", "iterations"):
        if not 1 <= getattr(options, name) <= MAX_BENCHMARK:
            flag = "--" + name.replace("_", "-")
            raise errors.InvalidRequest(f"{flag} must be 1 to {MAX_BENCHMARK}")
    plan = replace(suite.QUICK, rounds=options.iterations, at_once=options.pool_size)
    with sessions.connect(options) as client:
        rows = _rows(client, [options.runtime], plan)
    fast.write(2, f"{measure.table(rows)}\n".encode())
    results = [_times(row, plan) for row in rows]
    output.answer(
        {"iterations": options.iterations, "pool_size": options.pool_size, "results": results}
    )
    return 0


def _times(row: TableRow, plan: suite.Plan) -> dict[str, Any]:
    """A row in K8E's form, which knows only milliseconds."""
    samples = _milliseconds(row.ours, plan)
    told: dict[str, Any] = {
        "name": row.ours.name,
        "samples": len(samples),
        "median_ms": round(statistics.median(samples), 3),
        "min_ms": round(min(samples), 3),
        "max_ms": round(max(samples), 3),
    }
    if row.peer is not None:
        floor_ms = statistics.median(_milliseconds(row.peer, plan))
        told |= {"floor": row.peer.name, "floor_ms": round(floor_ms, 3)}
    return told


def _milliseconds(series: measure.Series, plan: suite.Plan) -> list[float]:
    """The samples as times; a speed is that of the large file."""
    if series.unit == "ms":
        return series.samples
    return [plan.large / 1e6 / speed * 1000 for speed in series.samples]


def add_bench(commands: Commands) -> None:
    parser = commands.add(
        "bench",
        "measure a gateway: create to first result, exec, Python and files, each beside a floor "
        "that is measured in the same minute",
        "k8e bench\n"
        "         k8e bench --quick --json\n"
        "         k8e bench --runtime gvisor --runtime container\n"
        "         k8e bench --endpoint sandboxes.example.org:50051 --at-once 50",
        bench,
        remote=True,
    )
    parser.add_argument(
        "--quick", action="store_true", help="two rounds, to see whether it works at all"
    )
    parser.add_argument("--json", action="store_true", help="print JSON with every single sample")
    parser.add_argument(
        "--runtime",
        action="append",
        help="gvisor or container; repeatable (by default the gateway's own choice)",
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="how often (default 20)")
    parser.add_argument(
        "--at-once", type=int, metavar="N", help="sessions and commands at a time (default 10)"
    )


def add_benchmark(commands: Commands) -> None:
    parser = commands.add(
        "benchmark",
        "measure a gateway as k8e bench does, with K8E's flags: a table on stderr, and JSON",
        "k8e sandbox benchmark --iterations 5",
        benchmark,
        remote=True,
    )
    parser.add_argument(
        "--pool-size", type=int, default=3, metavar="N", help="sessions at a time (default 3)"
    )
    parser.add_argument("--iterations", type=int, default=3, metavar="N", help="rounds (default 3)")
    parser.add_argument("--runtime", default="", help="gvisor or container; by default the best")
