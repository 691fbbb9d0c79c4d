"""``k8e bench``: how fast a gateway is, beside floors that are measured in the same minute."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import signal
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import replace

from k8e import errors
from k8e._version import __version__
from k8e.bench import suite, tables
from k8e.bench.samples import Row
from k8e.cli import fast, printing, sandbox
from k8e.client.blocking import SandboxClient

MOST = {"rounds": 1000, "at_once": 200}
TERMINATED = 143  # 128 + SIGTERM, as shells report it


def bench(options: argparse.Namespace) -> int:
    plan = _plan(options)
    now = datetime.datetime.now(datetime.UTC)
    rows: list[Row] = []
    with _ended_by_sigterm(), sandbox.connect(options) as client, _progress() as tell:
        gateway = client.status()
        for runtime in options.runtime or [""]:
            rows += _measure(client, runtime, plan, tell)
    if options.json:
        printing.answer(
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
        fast.write(1, f"{tables.table(rows)}\n".encode())
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


def _measure(client: SandboxClient, runtime: str, plan: suite.Plan, tell: suite.Tell) -> list[Row]:
    where = f"{runtime}: " if runtime else ""
    measured = suite.Suite(client, runtime, plan, lambda what: tell(f"{where}{what}")).measure()
    # Closed also when a signal comes between two rows: that is when it destroys its sessions.
    with closing(measured):
        return list(measured)


@contextmanager
def _progress() -> Generator[suite.Tell]:
    """Says on a terminal what is measured now; the line is gone afterwards."""
    if not os.isatty(2):
        yield lambda _: None
        return
    try:
        yield lambda what: fast.write(2, f"\r\x1b[Kmeasuring {what} …".encode())
    finally:
        fast.write(2, b"\r\x1b[K")


@contextmanager
def _ended_by_sigterm() -> Generator[None]:
    """Let a signal end the measurement as an exception does, so that its sessions end too."""

    def end(*_: object) -> None:
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
