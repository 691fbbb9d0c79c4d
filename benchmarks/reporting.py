"""The table at the end, and the JSON with everything behind it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.samples import Row, Series

HEADINGS = ("subject", "runtime", "k8e", "p50 (p95)", "against", "p50 (p95)", "ratio", "bar", "")


def table(rows: Sequence[Row]) -> str:
    cells = [HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(HEADINGS))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    rule = "  ".join("─" * width for width in widths)
    return "\n".join([lines[0], rule, *lines[1:]])


def _cells(row: Row) -> tuple[str, ...]:
    ratio = ""
    if row.ratio is not None:
        ratio = f"{row.ratio:.2f}x"
        if row.sense == "speed-up":
            ratio += " faster"
    return (
        row.subject,
        row.runtime,
        row.ours.name,
        _numbers(row.ours),
        row.peer.name if row.peer else "",
        _numbers(row.peer) if row.peer else "",
        ratio,
        row.bar.text(row.ours.unit) if row.bar else "",
        {True: "pass", False: "MISSED", None: row.note}[row.passed],
    )


def _numbers(series: Series) -> str:
    if len(series.samples) == 1:
        return f"{_short(series.p50)} {series.unit}"
    return f"{_short(series.p50)} ({_short(series.p95)}) {series.unit}"


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")
