"""The commands that tell about sandboxes and about this command itself, for the parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Command = Callable[..., argparse.ArgumentParser]


def add(command: Command, group: Any, common: argparse.ArgumentParser) -> None:
    """Add them to ``k8e sandbox``; ``command`` adds one."""
    _add_events(command, group, common)
    _add_benchmark(command, group, common)
    command(
        group,
        "catalog",
        "print every command of k8e sandbox and its flags as JSON",
        "k8e sandbox catalog",
        "catalog.show",
        common,
    )


def add_doctor(command: Command, group: Any) -> None:
    """``doctor``, which K8E has among the commands for sandboxes."""
    doctor = command(
        group,
        "doctor",
        "show what works on this host, and how to fix what does not",
        "k8e doctor",
        "doctor.doctor",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument("--fresh", action="store_true", help="try everything out again")


def _add_events(command: Command, group: Any, common: argparse.ArgumentParser) -> None:
    events = command(
        group,
        "events",
        "print what happened in a session: one line of JSON each, on a terminal a table",
        "k8e sandbox events ID\n         k8e sandbox events ID --limit 10 --json",
        "events.show",
        common,
    )
    events.add_argument("session_id", metavar="ID")
    events.add_argument(
        "--limit", type=int, default=500, metavar="N", help="only the newest N (default 500)"
    )
    events.add_argument("--json", action="store_true", help="lines of JSON on a terminal too")


def _add_benchmark(command: Command, group: Any, common: argparse.ArgumentParser) -> None:
    benchmark = command(
        group,
        "benchmark",
        "measure this gateway: sessions made and destroyed, runs and files, as a table on stderr "
        "and as JSON",
        "k8e sandbox benchmark --iterations 5",
        "benchmark.benchmark",
        common,
    )
    benchmark.add_argument(
        "--pool-size", type=int, default=3, metavar="N", help="sessions at a time (default 3)"
    )
    benchmark.add_argument(
        "--iterations", type=int, default=3, metavar="N", help="rounds (default 3)"
    )
    benchmark.add_argument("--runtime", default="", help="gvisor or container; by default the best")
