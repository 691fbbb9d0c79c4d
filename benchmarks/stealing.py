"""Time that the host of a virtual machine takes from it.

A tail of two hundred samples is two or three of them, and where others use the same host, it takes
the CPUs away for a tenth of a second at a time: that measures the host. The kernel counts it.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.timing import Timed

STAT = Path("/proc/stat")
TICK = 0.01  # seconds
A_LOT = 0.25
"""Of a sample's time, that is: a long one with a little of it stolen is long for other reasons."""
_STEAL = 8  # the field of a CPU's line, its name being the first
MOST_TRIES = 10  # on a host that takes time without end, the last try is what there is


def stolen(text: str | None = None) -> int:
    """How much time the host has taken so far, of all CPUs, in ticks."""
    lines = (STAT.read_text("ascii") if text is None else text).splitlines()
    fields = [line.split() for line in lines if line.startswith("cpu") and line[3:4].isdigit()]
    return sum(int(each[_STEAL]) for each in fields if len(each) > _STEAL)


class Guarded:
    """Something timed that is done again where the host took much of its time.

    Times of tries that were set aside are kept: they belong to what was really seen.
    """

    def __init__(self, work: Timed) -> None:
        self._work = work
        self.set_aside: list[float] = []

    def __call__(self) -> float:
        for _ in range(MOST_TRIES - 1):
            before = stolen()
            took = self._work()
            if (stolen() - before) * TICK <= A_LOT * took:
                return took
            self.set_aside.append(took)
        return self._work()
