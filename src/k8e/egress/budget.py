"""How much may be said in the names below a wildcard, and other amounts that are bounded.

Whoever owns ``*.example.org`` reads every question that is asked below it, so questions are a way
out for data. Each question that leaves this machine costs what it can carry; the account fills
slowly. An ordinary day's host names fit in; a tunnel gets a few bytes a second.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable

CAPACITY = 8192.0  # bits: some 200 ordinary names, or 24 of sixty random letters
PER_SECOND = 32.0
REMEMBERED = 4096  # names that cost less the second time
LETTERS = 40  # a to z, digits, hyphen, underscore, dot, and the end of a name
KINDS = 2  # of questions that leave the machine: A and AAAA
TICK = 0.001  # seconds: how well somebody far away can tell when a question came


def spelling(text: str) -> float:
    """The bits that a choice among all names carries, whatever the name looks like.

    Not by how often each of its letters comes: a run of one letter says by its length how much.
    """
    return (len(text) + 1) * math.log2(LETTERS)


def timing(seconds: float) -> float:
    """The bits that a choice among all moments carries: the length of its Elias delta code."""
    ticks = 1 + max(0.0, seconds) / TICK
    return math.log2(ticks) + 2 * math.log2(1 + math.log2(ticks)) + 1


class Budget:
    """One sandbox's account.

    A question is written down as who reads it could: how long it came after the one before, of
    which kind, whether its name is a new one, and then its letters or which of the known names. In
    no code can all questions be shorter, so nobody can say more than was paid for.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = CAPACITY
        self._at = clock()
        self._asked = clock()
        self._known: collections.OrderedDict[str, None] = collections.OrderedDict()

    def allows(self, name: str, base: str) -> bool:
        """Whether a question about ``name``, below ``base``, may leave; pays for it if so."""
        now = self._clock()
        self._left = min(CAPACITY, self._left + (now - self._at) * PER_SECOND)
        self._at = now
        cost = self._cost(name, base, now)
        if cost > self._left:
            return False
        self._left -= cost
        self._asked = now
        self._known[name] = None
        self._known.move_to_end(name)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return True

    def _cost(self, name: str, base: str, now: float) -> float:
        bits = 1 + math.log2(KINDS) + timing(now - self._asked)
        if name in self._known:
            return bits + math.log2(len(self._known))
        return bits + spelling(name.removesuffix("." + base))


class Rate:
    """So many a second, and some at once."""

    def __init__(
        self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_second = per_second
        self._burst = self._left = burst
        self._clock = clock
        self._at = clock()

    def allows(self, count: float = 1) -> bool:
        """Whether there may be so many more now; counts them if so."""
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < count:
            return False
        self._left -= count
        return True


class Share:
    """Something that all sandboxes have together; each may take as much as it leaves to others.

    One sandbox gets half of it at most, two get a third each. ``least`` is everybody's own, however
    many others have come before.
    """

    def __init__(self, total: int, each: int, least: int = 0) -> None:
        self._total = total
        self._each = each
        self._least = least
        self.taken = 0

    def allows(self, held: int) -> bool:
        """Whether who holds so many already may take one more."""
        return held < self._least or held < min(self._each, self._total - self.taken)

    def take(self) -> None:
        self.taken += 1

    def give_back(self, count: int = 1) -> None:
        self.taken -= count
