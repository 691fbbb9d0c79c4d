"""``k8e pool``: which sandboxes are ready, and how many shall be."""

from __future__ import annotations

import argparse
from typing import Any

from k8e.cli import fast, printing, sandbox

_COLUMNS = ("template", "runtime", "ready", "starting", "target", "min", "max", "hits", "misses")


def show(options: argparse.Namespace) -> int:
    with sandbox.connect(options) as client:
        found = client.pool()
    if options.json:
        printing.answer({"pools": found})
    else:
        fast.write(1, "".join(f"{line}\n" for line in table(found)).encode())
    return 0


def resize(options: argparse.Namespace) -> int:
    with sandbox.connect(options) as client:
        found = client.set_pool(
            options.template,
            options.runtime,
            min_ready=options.min,
            max_ready=options.max,
            wait=options.wait,
        )
    printing.answer(found)
    return 0


def drain(options: argparse.Namespace) -> int:
    with sandbox.connect(options) as client:
        printing.answer({"drained": client.drain_pool(options.template)})
    return 0


def table(found: list[dict[str, Any]]) -> list[str]:
    """The pools as lines; why one cannot be filled stands below it."""
    rows = [[name.upper() for name in _COLUMNS]]
    rows += [[str(item[name]) for name in _COLUMNS] for item in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    for item in found:
        told = [item["failure"]] if item["failure"] else []
        lines += [f"{item['template']}: {why}" for why in (*told, *item["left_out"])]
    return lines
