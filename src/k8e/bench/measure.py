"""Measurements: timing, series of samples, rows that compare two of them, and tables."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["faster", "ratio", "share", "most", "least"]
"""What a bar means: at least so many times faster than the peer, at most (ratio) or at least
(share) so many times the peer, or a plain value of ours that may not be above (most) or below
(least) the bar."""
Sense = Literal["multiple", "speed-up"]
"""How a ratio is shown: as a multiple of the peer's, or how many times faster we are."""
RATES = ("MB/s", "/s")
"""Units of which more is better."""
P99_SAMPLES = 100
"""With fewer samples, the 99th percentile is just the worst of them."""


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that at least ``percent`` of all samples do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def short(value: float) -> str:
    """A number with as many digits as are worth reading."""
    size = abs(value)
    return f"{value:.2f}" if size < 10 else f"{value:.1f}" if size < 100 else f"{value:,.0f}"


def ratio_text(ratio: float, sense: Sense) -> str:
    if sense == "multiple":
        return f"{short(ratio)}x"
    return f"{short(ratio)}x faster" if ratio >= 1 else f"{short(1 / ratio)}x slower"


@dataclass(frozen=True)
class Series:
    """Samples of one thing, all in the same unit."""

    name: str
    unit: str
    samples: list[float]

    @property
    def p50(self) -> float:
        ordered = sorted(self.samples)
        middle = len(ordered) // 2
        if len(ordered) % 2:
            return ordered[middle]
        return (ordered[middle - 1] + ordered[middle]) / 2

    @property
    def p95(self) -> float:
        """The bad end: the slow one of times, the low one of rates."""
        return percentile(self.samples, 5 if self.unit in RATES else 95)

    @property
    def p99(self) -> float:
        return percentile(self.samples, 1 if self.unit in RATES else 99)

    def text(self) -> str:
        """The median and, in brackets, the bad end: p95, with enough samples p99 too."""
        told = short(self.p50)
        if len(self.samples) > 1:
            tail = [self.p95, self.p99] if len(self.samples) >= P99_SAMPLES else [self.p95]
            told += f" ({', '.join(map(short, tail))})"
        return f"{told} {self.unit}"

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Series:
        return cls(told["name"], told["unit"], told["samples"])

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "p50": self.p50,
            "p95": self.p95,
            "p99": self.p99,
            "samples": self.samples,
        }


@dataclass(frozen=True)
class Goal:
    """A bar for a measurement."""

    kind: Kind
    value: float

    def text(self, unit: str) -> str:
        value = f"{self.value:g}"
        return {
            "faster": f"≥ {value}x faster",
            "ratio": f"≤ {value}x",
            "share": f"≥ {value}x",
            "most": f"≤ {value} {unit}",
            "least": f"≥ {value} {unit}",
        }[self.kind]


@dataclass(frozen=True)
class TableRow:
    """One line of the table: ours, the peer's, and the bar."""

    subject: str
    runtime: str
    ours: Series
    peer: Series | None = None
    bar: Goal | None = None
    sense: Sense = "multiple"
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Of the two medians."""
        if self.peer is None:
            return None
        if self.sense == "speed-up":
            return self.peer.p50 / self.ours.p50
        return self.ours.p50 / self.peer.p50

    @property
    def passed(self) -> bool | None:
        """Whether the bar is reached; None without one."""
        if self.bar is None:
            return None
        if self.bar.kind in ("most", "least"):
            value = self.ours.p50
        elif self.ratio is None:
            return None
        else:
            value = self.ratio
        if self.bar.kind in ("faster", "share", "least"):
            return value >= self.bar.value
        return value <= self.bar.value

    def ratio_text(self) -> str:
        if self.ratio is None:
            return ""
        return ratio_text(self.ratio, self.sense)

    def verdict(self) -> str:
        return {True: "pass", False: "MISSED", None: ""}[self.passed]

    def to_json(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "runtime": self.runtime,
            "ours": self.ours.to_json(),
            "peer": self.peer.to_json() if self.peer else None,
            "ratio": self.ratio,
            "sense": self.sense,
            "bar": self.bar.text(self.ours.unit) if self.bar else None,
            "passed": self.passed,
            "note": self.note,
        }


@dataclass(frozen=True)
class Skipped:
    """A measurement that could not be made here, and why."""

    subject: str
    runtime: str
    name: str
    reason: str

    def text(self) -> str:
        where = f" ({self.runtime})" if self.runtime else ""
        return f"{self.subject}{where}: {self.name}: skipped: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Timed = Callable[[], float]
"""Does something once and says how long that took, in seconds."""


def timed(work: Callable[[], object]) -> Timed:
    """A function that runs ``work`` and returns its seconds."""

    def run() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return run


def interleave(
    rounds: int, contenders: Mapping[str, Timed], *, warm_up: int = 0
) -> dict[str, list[float]]:
    """Seconds of each contender, once per round.

    Each round has another order, because what runs before leaves its traces in caches.
    """
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    order = random.Random(0)  # noqa: S311 - the same order each time, and no secret
    for turn in range(-warm_up, rounds):
        for name in names:
            took = contenders[name]()
            if turn >= 0:
                samples[name].append(took)
        order.shuffle(names)
    return samples


def milliseconds(seconds: Sequence[float]) -> list[float]:
    return [1000 * value for value in seconds]


def megabytes_per_second(size: int, seconds: Sequence[float]) -> list[float]:
    return [size / 1e6 / value for value in seconds]


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


def table(rows: Sequence[TableRow]) -> str:
    """A line for each row below two of headings; empty columns are left out."""
    lines = [HEADINGS, *(_cells(row) for row in rows)]
    used = [at for at in range(len(HEADINGS)) if any(line[at] for line in lines[1:])]
    widths = {at: max(len(line[at]) for line in lines) for at in used}
    told = ["  ".join(line[at].ljust(widths[at]) for at in used).rstrip() for line in lines]
    rule = "  ".join("─" * widths[at] for at in used)
    return "\n".join([told[0], rule, *told[1:]])


def _cells(row: TableRow) -> tuple[str, ...]:
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
