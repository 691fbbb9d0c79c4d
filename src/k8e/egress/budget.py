"""How much may be said in the names below a wildcard.

Whoever owns ``*.example.org`` reads every name that is asked below it, so names are a way out for
data. Each *different* name costs what it can carry, by the entropy of its letters; the account
fills slowly. An ordinary day's host names fit in; a tunnel gets a few bytes a second.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable

CAPACITY = 8192.0  # bits: some 250 ordinary names, or 30 of random letters
PER_SECOND = 32.0
REMEMBERED = 4096  # names that cost nothing the second time


def information(text: str) -> float:
    """The bits that ``text`` carries, by how often each of its letters comes."""
    counts = collections.Counter(text)
    return -sum(n * math.log2(n / len(text)) for n in counts.values()) + 1


class Budget:
    """One sandbox's account."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = CAPACITY
        self._at = clock()
        self._known: collections.OrderedDict[str, None] = collections.OrderedDict()

    def allows(self, name: str, base: str) -> bool:
        """Whether ``name``, which stands below ``base``, may be asked; pays for it if so."""
        if name in self._known:
            self._known.move_to_end(name)
            return True
        now = self._clock()
        self._left = min(CAPACITY, self._left + (now - self._at) * PER_SECOND)
        self._at = now
        cost = information(name.removesuffix("." + base))
        if cost > self._left:
            return False
        self._left -= cost
        self._known[name] = None
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return True


class Rate:
    """So many a second, and some at once."""

    def __init__(
        self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_second = per_second
        self._burst = self._left = burst
        self._clock = clock
        self._at = clock()

    def allows(self) -> bool:
        """Whether there may be one more now; counts it if so."""
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
