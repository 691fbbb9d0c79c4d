"""Rows as a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from k8e.bench.samples import Row

HEADINGS = (
    "subject",
    "runtime",
    "k8e",
    "p50 (p95, p99)",
    "against",
    "p50 (p95, p99)",
    "ratio",
    "bar",
    "",
)


def table(rows: Sequence[Row]) -> str:
    """A line for each row below two of headings; columns that nobody needs are left out."""
    lines = [HEADINGS, *(_cells(row) for row in rows)]
    used = [at for at in range(len(HEADINGS)) if any(line[at] for line in lines[1:])]
    widths = {at: max(len(line[at]) for line in lines) for at in used}
    told = ["  ".join(line[at].ljust(widths[at]) for at in used).rstrip() for line in lines]
    rule = "  ".join("─" * widths[at] for at in used)
    return "\n".join([told[0], rule, *told[1:]])


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.subject,
        row.runtime,
        row.ours.name,
        row.ours.text(),
        row.peer.name if row.peer else "",
        row.peer.text() if row.peer else "",
        row.ratio_text(),
        row.bar.text(row.ours.unit) if row.bar else "",
        "  ".join(filter(None, (row.verdict(), row.note))),
    )
