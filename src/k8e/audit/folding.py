"""Many refusals of the same kind are a few rows and a number: nobody drives out what matters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

WINDOW = 60.0  # seconds
BURST = 20  # rows of one kind in a window; further ones are counted
GROUP_BURST = 500  # rows of a whole group of kinds
MAX_KINDS = 4096

Kind = tuple[str, ...]


@dataclass
class _Count:
    began: float
    rows: int = 0
    more: int = 0


class Folding:
    """Counts by kind; the kind that began longest ago is forgotten first."""

    def __init__(self) -> None:
        self._counts: OrderedDict[Kind, _Count] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    def admit(self, kind: Kind, now: float, group: Kind | None = None) -> bool:
        """Whether this one gets a row of its own; otherwise it is counted.

        Kinds of which there can be any number belong to a ``group``, which has a bound too; what is
        beyond that is counted as the group's.
        """
        count = self._counts.get(kind)
        if count is not None and count.rows >= BURST:
            count.more += 1
            return False
        if group is not None:
            whole = self._counts.setdefault(group, _Count(now))
            if whole.rows >= GROUP_BURST:
                whole.more += 1
                return False
            whole.rows += 1
        if count is None:
            count = self._counts[kind] = _Count(now)
        count.rows += 1
        return True

    def over(self, now: float) -> Iterator[tuple[Kind, int]]:
        """Kinds whose window has ended, or that are too many, each with what was only counted."""
        while self._counts:
            kind, count = next(iter(self._counts.items()))
            if now < count.began + WINDOW and len(self._counts) <= MAX_KINDS:
                return
            del self._counts[kind]
            if count.more:
                yield kind, count.more
