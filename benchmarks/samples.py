"""What a measurement leaves: series of samples, rows that compare two of them, and bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["faster", "ratio", "most", "least"]
"""How a bar is meant: at least so many times faster than the peer, at most so many times the peer,
or a plain value of ours that may not be above (most) or below (least) the bar."""
Sense = Literal["multiple", "speed-up"]
"""How a ratio is told: ours as a multiple of the peer's, or how many times faster we are."""


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that at least ``percent`` of all samples do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


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
        return percentile(self.samples, 5 if self.unit == "MB/s" else 95)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "p50": self.p50,
            "p95": self.p95,
            "samples": self.samples,
        }


@dataclass(frozen=True)
class Bar:
    """What we want to reach."""

    kind: Kind
    value: float

    def text(self, unit: str) -> str:
        value = f"{self.value:g}"
        return {
            "faster": f"≥ {value}x faster",
            "ratio": f"≤ {value}x",
            "most": f"≤ {value} {unit}",
            "least": f"≥ {value} {unit}",
        }[self.kind]


@dataclass(frozen=True)
class Row:
    """One line of the table: ours, what it is compared with, and the bar."""

    subject: str
    runtime: str
    ours: Series
    peer: Series | None = None
    bar: Bar | None = None
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
        if self.bar.kind in ("faster", "least"):
            return value >= self.bar.value
        return value <= self.bar.value

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
