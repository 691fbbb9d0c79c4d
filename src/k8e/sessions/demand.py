"""Demand for ready sandboxes: as many as were recently claimed at once, within bounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from k8e import errors

AT_ONCE = 2.0
"""Seconds within which claims count as one rush: refilling takes about as long."""
REMEMBERED = 300.0
"""Seconds for which a rush is expected to come again."""
MOST = 1000


@dataclass(frozen=True)
class Sizes:
    """The bounds between which a pool chooses its number of ready sandboxes."""

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


def check_total(least: int, total: int) -> None:
    """Refuse to promise more ready sandboxes of one template than all may have together."""
    if least > total:
        raise errors.InvalidRequest(
            f"{least} ready sandboxes are more than all templates together may have ({total})",
            hint="K8E_POOL_TOTAL raises that number",
        )


def share(total: int, wishes: Sequence[tuple[int, int]]) -> list[int]:
    """Divide ``total``: each pool has a minimum, and a number that it would like to have.

    The minima come first. Then none gets more than another, unless that one has as many as it would
    like; a remainder goes to the first ones.
    """
    least = _level([least for least, _ in wishes], total)
    more = [most - given for (_, most), given in zip(wishes, least, strict=True)]
    rest = _level(more, total - sum(least))
    return [a + b for a, b in zip(least, rest, strict=True)]


def _level(wishes: list[int], total: int) -> list[int]:
    given = [0] * len(wishes)
    while total > 0 and (open_ := [at for at, wish in enumerate(wishes) if given[at] < wish]):
        each = max(1, total // len(open_))
        for at in open_[:total]:
            step = min(each, wishes[at] - given[at])
            given[at] += step
            total -= step
    return given


class Demand:
    """The recent claims, and the greatest rush among them."""

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

    def newest(self) -> float:
        """The time of the last claim; 0 if there is no recent one."""
        return self._claims[-1] if self._claims else 0.0

    def forgets_at(self) -> float:
        """When the greatest rush will be forgotten; 0 if there is none."""
        return self._rushes[0][0] + REMEMBERED if self._rushes else 0.0
