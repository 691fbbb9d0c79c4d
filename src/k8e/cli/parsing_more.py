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


def add_bench(command: Command, commands: Any, common: argparse.ArgumentParser) -> None:
    """``k8e bench``, for whoever wants to know how fast a gateway is."""
    bench = command(
        commands,
        "bench",
        "measure a gateway: create to first result, exec, Python and files, each beside a floor "
        "that is measured in the same minute",
        "k8e bench\n"
        "         k8e bench --quick --json\n"
        "         k8e bench --runtime gvisor --runtime container\n"
        "         k8e bench --endpoint sandboxes.example.org:50051 --at-once 50",
        "bench.bench",
        common,
    )
    bench.add_argument("--quick", action="store_true", help="two rounds: does it work at all")
    bench.add_argument("--json", action="store_true", help="print JSON with every single sample")
    bench.add_argument(
        "--runtime",
        action="append",
        help="gvisor or container; repeatable (by default the gateway's own choice)",
    )
    bench.add_argument("--rounds", type=int, metavar="N", help="how often (default 20)")
    bench.add_argument(
        "--at-once", type=int, metavar="N", help="sessions and commands at a time (default 10)"
    )


def _add_events(command: Command, group: Any, common: argparse.ArgumentParser) -> None:
    events = command(
        group,
        "events",
        "print what happened in a session: one line of JSON each, on a terminal a table",
        "k8e sandbox events ID\n         k8e sandbox events ID --limit 10 --json",
        "events.show",
        common,
    )
    events.add_argument(
        "session_id", metavar="ID", nargs="?", default="", help="without it: all of yours"
    )
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
