"""``k8e pool``: which sandboxes are ready, and how many shall be."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from k8e.cli import output, sessions
from k8e.cli.parser import Commands

_COLUMNS = ("template", "runtime", "ready", "starting", "target", "min", "max", "hits", "misses")


def show(options: argparse.Namespace) -> int:
    with sessions.connect(options) as client:
        found = client.pool()
    if options.json:
        output.answer({"pools": found})
    else:
        output.write_lines(pool_table(found))
    return 0


def resize(options: argparse.Namespace) -> int:
    with sessions.connect(options) as client:
        found = client.set_pool(
            options.template,
            options.runtime,
            min_ready=options.min,
            max_ready=options.max,
            wait=options.wait,
        )
    output.answer(found)
    return 0


def drain(options: argparse.Namespace) -> int:
    with sessions.connect(options) as client:
        output.answer({"drained": client.drain_pool(options.template)})
    return 0


def pool_table(found: list[dict[str, Any]]) -> Iterator[str]:
    """The pools as a table, and below it why a pool cannot be filled."""
    rows = [[name.upper() for name in _COLUMNS]]
    rows += [[str(item[name]) for name in _COLUMNS] for item in found]
    yield from output.table(rows)
    for item in found:
        failures = [item["failure"]] if item["failure"] else []
        yield from (f"{item['template']}: {why}" for why in (*failures, *item["left_out"]))


def add_pool(commands: Commands) -> None:
    pool = commands.add(
        "pool",
        "show which sandboxes are ready for new sessions, and set how many there should be",
        "k8e pool\n         k8e pool set --min 4 --max 20",
        show,
        remote=True,
    )
    pool.add_argument("--json", action="store_true", help="print JSON")
    group = pool.commands()
    resize_parser = group.add(
        "set",
        "change how many sandboxes are ready, until the gateway ends",
        "k8e pool set --runtime container --min 10 --max 50 --wait",
        resize,
        remote=True,
    )
    resize_parser.add_argument("--min", type=int, metavar="N", help="how many are ready at least")
    resize_parser.add_argument("--max", type=int, metavar="N", help="how many are ready at most")
    resize_parser.add_argument(
        "--runtime", default="", metavar="NAME", help="by default the gateway's choice"
    )
    resize_parser.add_argument(
        "--wait", action="store_true", help="return when the minimum is ready"
    )
    drain_parser = group.add(
        "drain",
        "replace the ready sandboxes by new ones",
        "k8e pool drain --template default",
        drain,
        remote=True,
    )
    for parser, what in ((resize_parser, "default"), (drain_parser, "all of them")):
        parser.add_argument(
            "--template", default="", metavar="NAME", help=f"of which template ({what})"
        )
