"""Time that a virtual machine's host takes is told apart from what a program takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import stealing

STAT = """cpu  9 9 9 9 9 9 9 {sum} 0 0
cpu0 1 2 3 4 5 6 7 {first} 0 0
cpu1 1 2 3 4 5 6 7 {second} 0 0
ctxt 1 2 3 4 5 6 7 8 9
"""


def told(first: int, second: int) -> str:
    return STAT.format(sum=first + second, first=first, second=second)


class Host:
    """One that takes so many ticks during each of some tries."""

    def __init__(self, file: Path, *takes: int, seconds: float) -> None:
        self._file = file
        self._takes = list(takes)
        self._seconds = seconds
        self._taken = 0
        self.tries = 0
        self._tell()

    def _tell(self) -> None:
        self._file.write_text(told(self._taken, 0))

    def work(self) -> float:
        self.tries += 1
        self._taken += self._takes.pop(0) if self._takes else 0
        self._tell()
        return self._seconds


@pytest.fixture
def stat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(stealing, "STAT", tmp_path / "stat")
    return tmp_path / "stat"


def test_what_all_cpus_lost_is_counted_once() -> None:
    assert stealing.stolen(told(3, 4)) == 7


def test_a_kernel_that_does_not_count_it_says_nothing() -> None:
    assert stealing.stolen("cpu0 1 2 3 4\n") == 0


def test_a_try_from_which_much_was_taken_is_made_again(stat: Path) -> None:
    host = Host(stat, 1, 5, seconds=0.01)
    guarded = stealing.Guarded(host.work)
    assert guarded() == 0.01
    assert host.tries == 3
    assert guarded.set_aside == [0.01, 0.01]


def test_a_long_try_from_which_little_was_taken_counts(stat: Path) -> None:
    host = Host(stat, 2, seconds=0.1)
    guarded = stealing.Guarded(host.work)
    assert guarded() == 0.1
    assert guarded.set_aside == []


def test_a_host_that_takes_time_without_end_does_not_stop_the_measurement(stat: Path) -> None:
    host = Host(stat, *[9] * 100, seconds=0.01)
    assert stealing.Guarded(host.work)() == 0.01
    assert host.tries == stealing.MOST_TRIES
