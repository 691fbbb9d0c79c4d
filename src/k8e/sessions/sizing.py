"""How many sandboxes are kept ready: as many as were claimed at once of late, within bounds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from k8e import errors

AT_ONCE = 2.0
"""Seconds within which claims count as one rush: refilling takes about as long."""
REMEMBERED = 300.0
"""Seconds for which a rush is expected to come again."""
MOST = 1000


@dataclass(frozen=True)
class Sizes:
    """Between which numbers of ready sandboxes a pool may choose."""

    min: int
    max: int

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.max <= MOST:
            raise errors.InvalidRequest(
                f"a pool keeps from {self.min} to {self.max} sandboxes",
                hint=f"use 0 <= min <= max <= {MOST}",
            )

    def clamp(self, wanted: int) -> int:
        return min(self.max, max(self.min, wanted))


class Demand:
    """The claims of late, and the greatest rush among them."""

    def __init__(self) -> None:
        self._claims: deque[float] = deque()
        # (when, how many): each smaller than the one before, so the first is the greatest.
        self._rushes: deque[tuple[float, int]] = deque()

    def claimed(self, now: float) -> None:
        self._claims.append(now)
        while self._claims[0] <= now - AT_ONCE:
            self._claims.popleft()
        size = len(self._claims)
        while self._rushes and self._rushes[-1][1] <= size:
            self._rushes.pop()
        self._rushes.append((now, size))

    def greatest_rush(self, now: float) -> int:
        while self._rushes and self._rushes[0][0] <= now - REMEMBERED:
            self._rushes.popleft()
        return self._rushes[0][1] if self._rushes else 0

    def forgets_at(self) -> float:
        """When the greatest rush will be forgotten; 0 if there is none."""
        return self._rushes[0][0] + REMEMBERED if self._rushes else 0.0
