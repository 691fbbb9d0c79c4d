"""The commands about the audit trail, for the parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Command = Callable[..., argparse.ArgumentParser]
_TIME = "an age (30s, 15m, 2h, 7d), a date and time, or unix time"


def add(command: Command, commands: Any, common: argparse.ArgumentParser, kind: type[Any]) -> None:
    """``k8e audit``; ``command`` adds one, ``kind`` is the class of its parser."""
    wanted = kind(add_help=False, argument_default=argparse.SUPPRESS)
    wanted.add_argument("--session", metavar="ID", help="what happened to one session")
    wanted.add_argument("--principal", metavar="NAME", help="what somebody did")
    wanted.add_argument("--since", metavar="TIME", help=f"not before: {_TIME}")
    wanted.add_argument("--until", metavar="TIME", help="before that time")
    wanted.add_argument("--action", metavar="NAME", help="one action, or all of a kind: 'exec.*'")
    wanted.add_argument(
        "--denied", action="store_true", default=argparse.SUPPRESS, help="only what was refused"
    )
    audit = command(
        commands,
        "audit",
        "show who did what to which session, allowed or not",
        "k8e audit --since 1h\n         k8e audit --session ID --denied --json",
        "audit.show",
        common,
        wanted,
    )
    audit.add_argument("--limit", type=int, default=100, metavar="N", help="the newest N (100)")
    audit.add_argument("--follow", action="store_true", help="go on with rows as they come")
    audit.add_argument("--json", action="store_true", help="print lines of JSON")
    group = audit.add_subparsers(title="commands", metavar="COMMAND", parser_class=kind)
    command(
        group,
        "export",
        "print all rows, oldest first, as the lines of JSON that were written",
        "k8e audit export --since 30d > audit.jsonl",
        "audit.export",
        common,
        wanted,
    )
    verify = command(
        group,
        "verify",
        "check that no row was changed and none is missing; fails with 1 if not",
        "k8e audit verify\n         k8e audit verify --expect 1234:9f86d081…",
        "audit.verify",
        common,
    )
    verify.add_argument(
        "--expect",
        default="",
        metavar="HEAD",
        help="the head that an earlier check printed; it must still be there",
    )
