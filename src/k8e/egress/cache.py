"""Answers of the world's resolvers, kept for as long as they hold: one cache for each sandbox.

Sandboxes share none, since how quickly an answer comes would tell what others asked for. What is
kept needs not be asked again, so that a question cannot be repeated to say something by it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import dns.rcode

from k8e.egress.budget import Share
from k8e.egress.policy import Address

EACH = 512  # answers of one sandbox
TOTAL = 16_384  # of all sandboxes together
LEAST = 16  # of one sandbox, however many others there are
STALE = 3600.0  # seconds that an answer is kept for questions that may not be asked again

Key = tuple[str, int]
"""A name and the type of a question."""


@dataclass(frozen=True)
class Answer:
    """What the world said about a name, whatever a policy makes of it."""

    rcode: dns.rcode.Rcode = dns.rcode.NOERROR
    addresses: list[Address] = field(default_factory=list[Address])
    seconds: int = 0
    """How long it holds."""


@dataclass(frozen=True)
class _Kept:
    answer: Answer
    until: float


class Cache:
    """The answers of one sandbox. The oldest go where there are too many."""

    def __init__(
        self, share: Share | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``share`` is what the caches of all sandboxes have together."""
        self._share = share or Share(TOTAL, EACH, LEAST)
        self._clock = clock
        self._kept: dict[Key, _Kept] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Key, *, stale: bool = False) -> tuple[Answer, int] | None:
        """An answer and the seconds for which it still holds; ``stale`` takes one that is over."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        left = kept.until - self._clock()
        if left <= 0 and not (stale and left > -STALE and kept.answer.addresses):
            return None
        return kept.answer, max(0, round(left))

    def put(self, key: Key, answer: Answer) -> None:
        if self._closed:
            return
        if self._kept.pop(key, None) is not None:
            self._share.give_back()
        while not self._share.allows(len(self._kept)):
            del self._kept[next(iter(self._kept))]
            self._share.give_back()
        self._kept[key] = _Kept(answer, self._clock() + answer.seconds)
        self._share.take()

    def close(self) -> None:
        """Forget everything, for good: the sandbox is gone."""
        self._closed = True
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._share.give_back(len(self._kept))
        self._kept.clear()
