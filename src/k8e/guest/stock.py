"""Descriptors for the next program, made while nobody waits for it.

Each is a system call, which in gVisor takes as long as ten of Linux's, and a program needs five.
They are never shared: what one program does to its own is not seen by the next.
"""

from __future__ import annotations

import os
from typing import Any, Callable


def _make_null() -> int:
    return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)


def _make_pipe() -> tuple[int, int]:
    return os.pipe2(os.O_CLOEXEC)


def _make_output() -> tuple[int, int]:
    ends = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(ends[0], False)
    return ends


class Stock:
    """As much as one program needs; whoever needs more has it made."""

    def __init__(self) -> None:
        self._nulls: list[int] = []
        self._outputs: list[tuple[int, int]] = []
        self._reports: list[tuple[int, int]] = []

    def take_null(self) -> int:
        """An input that is at its end."""
        return self._nulls.pop() if self._nulls else _make_null()

    def take_output(self) -> tuple[int, int]:
        """A pipe that we read without waiting."""
        return self._outputs.pop() if self._outputs else _make_output()

    def take_report(self) -> tuple[int, int]:
        """A pipe that we wait for."""
        return self._reports.pop() if self._reports else _make_pipe()

    def refill(self) -> None:
        """Make what was taken; where no more can be had, whoever needs it is told."""
        try:
            self._add(self._nulls, 1, _make_null)
            self._add(self._outputs, 2, _make_output)
            self._add(self._reports, 1, _make_pipe)
        except OSError:
            pass

    def _add(self, kept: list[Any], wanted: int, make: Callable[[], object]) -> None:
        while len(kept) < wanted:
            kept.append(make())


STOCK = Stock()
