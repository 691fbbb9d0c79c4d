"""Times to the first result as public benchmarks of sandboxes tell them, to lay ours beside theirs.

Their score of a series: 100 points for nothing and none for ten seconds, of the median (60 %), the
95th (25 %) and the 99th percentile (15 %), without the best and the worst twentieth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from k8e.bench.measure import Series, TableRow, percentile

MODES = ("sequential", "staggered", "burst")
WORST_MS = 10_000.0
WEIGHTS = {50: 0.60, 95: 0.25, 99: 0.15}
TRIMMED = 0.05


def score(samples: Sequence[float]) -> float:
    """Points of a series of milliseconds."""
    ordered = sorted(samples)
    cut = int(len(ordered) * TRIMMED)
    kept = ordered[cut : len(ordered) - cut]
    points = (
        weight * max(0.0, 100 * (1 - percentile(kept, percent) / WORST_MS))
        for percent, weight in WEIGHTS.items()
    )
    return round(sum(points), 2)


def documents(rows: Iterable[TableRow]) -> list[dict[str, Any]]:
    """One document for each system and mode that the rows of ``first echo`` have."""
    series: dict[str, Series] = {}
    for row in rows:
        if row.subject == "first echo":
            for each in (row.ours, row.peer):
                if each is not None and each.name.rpartition(", ")[2] in MODES:
                    series.setdefault(each.name, each)
    return [_document(each) for each in series.values()]


def _document(series: Series) -> dict[str, Any]:
    provider, _, mode = series.name.rpartition(", ")
    return {
        "provider": provider,
        "mode": mode,
        "iterations": [{"ttiMs": sample} for sample in series.samples],
        "summary": {
            "ttiMs": {
                "median": series.p50,
                "p95": series.p95,
                "p99": series.p99,
                "min": min(series.samples),
                "max": max(series.samples),
            }
        },
        "compositeScore": score(series.samples),
        "successRate": 1,
    }
