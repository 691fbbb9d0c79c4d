"""Timing, interleaved: whatever disturbs the machine disturbs everything that is compared."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence

Timed = Callable[[], float]
"""Does something once and says how long that took, in seconds."""


def timed(work: Callable[[], object]) -> Timed:
    """``work`` with a stop-watch around it."""

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
