"""The commands about the warm pool, for the parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Command = Callable[..., argparse.ArgumentParser]


def add(command: Command, commands: Any, common: argparse.ArgumentParser, kind: type[Any]) -> None:
    """``k8e pool``; ``command`` adds one, ``kind`` is the class of its parser."""
    pool = command(
        commands,
        "pool",
        "show which sandboxes are ready for new sessions, and set how many shall be",
        "k8e pool\n         k8e pool set --min 4 --max 20",
        "pool.show",
        common,
    )
    pool.add_argument("--json", action="store_true", help="print JSON")
    group = pool.add_subparsers(title="commands", metavar="COMMAND", parser_class=kind)
    resize = command(
        group,
        "set",
        "change how many sandboxes are ready, until the gateway ends",
        "k8e pool set --runtime container --min 10 --max 50 --wait",
        "pool.resize",
        common,
    )
    resize.add_argument("--min", type=int, metavar="N", help="how many are ready at least")
    resize.add_argument("--max", type=int, metavar="N", help="how many are ready at most")
    resize.add_argument("--runtime", default="", metavar="NAME", help="the usual one by default")
    resize.add_argument(
        "--wait", action="store_true", help="return when the least number of them is ready"
    )
    drain = command(
        group,
        "drain",
        "replace the sandboxes that are ready by new ones",
        "k8e pool drain --template default",
        "pool.drain",
        common,
    )
    for parser, what in ((resize, "default"), (drain, "all of them")):
        parser.add_argument(
            "--template", default="", metavar="NAME", help=f"of which template ({what})"
        )
