"""``k8e conformance``, for the parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

Command = Callable[..., argparse.ArgumentParser]


def add(command: Command, commands: Any, parser_class: type[argparse.ArgumentParser]) -> None:
    """Add it; ``command`` adds one."""
    conformance = command(
        commands,
        "conformance",
        "check that sandboxes on this machine keep every promise, also under attack",
        "k8e conformance run",
        "conformance.run",
    )
    conformance.set_defaults(handler=partial(_help, conformance))
    group = conformance.add_subparsers(
        title="commands", metavar="COMMAND", parser_class=parser_class
    )
    run = command(
        group,
        "run",
        "check every promise and print pass, fail or not applicable for each; exits with 1 if one "
        "is broken; prints lines, or JSON",
        "k8e conformance run\n"
        "         k8e conformance run --runtime gvisor --only attacks --only network\n"
        "         k8e conformance run --list",
        "conformance.run",
    )
    run.add_argument(
        "--runtime",
        action="append",
        help="gvisor or container; repeatable (by default all that work on this machine)",
    )
    run.add_argument(
        "--only",
        action="append",
        metavar="ID",
        help="a promise, or all whose id begins with this word; repeatable",
    )
    run.add_argument("--list", action="store_true", help="print the promises and check nothing")
    run.add_argument("--json", action="store_true", help="print JSON, at the end")


def _help(parser: argparse.ArgumentParser, _: argparse.Namespace) -> int:
    from k8e.cli import fast

    fast.write(1, parser.format_help().encode())
    return 0
