"""Ctrl-C for a context of bash, and for children that bash has only just made.

Such a child is a copy of bash that is about to become a program. What it hears until then is
noted by a handler that the program does not have; and bash holds interrupts back while it makes
one, so that afterwards it hears alone. Then either bash waits for a program that does not know that
it should end, or it goes on without it, and waits for it in the middle of the next cell. So who
was a copy, or was not there, hears it again as soon as it is a program.
"""

from __future__ import annotations

import os
import signal

from k8e.guest.apart import proc_folder
from k8e.guest.loop import Loop
from k8e.guest.processes import read_stat

LOOKS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)  # seconds from each look to the next


class Press:
    """One interrupt of everything in the process group of ``leader``."""

    def __init__(self, loop: Loop, leader: int) -> None:
        self._loop = loop
        self._leader = leader
        self._left: list[int] | None = None
        self._looks = list(LOOKS)
        # Who is a program now hears it. It is told once: a program may need time to tidy up.
        self._heard = {pid for pid, name in self._children() if name != self._own_name()}
        try:
            os.killpg(leader, signal.SIGINT)
        except OSError:
            return  # it has ended
        self._later()

    def cell_ended(self) -> None:
        """From now on, new children are the next cell's."""
        if self._left is None:
            self._left = [pid for pid, _ in self._children() if pid not in self._heard]

    def forget(self) -> None:
        """Look no more: another one comes, or there is nobody left to hear it."""
        self._looks.clear()

    def _later(self) -> None:
        if self._looks and self._left != []:
            self._loop.later(self._looks.pop(0), self._look)

    def _look(self) -> None:
        name = self._own_name()
        for pid, called in self._children():
            if pid in self._heard or (self._left is not None and pid not in self._left):
                continue
            # A copy that stays one is a subshell, and may have missed it as well. While bash waits
            # for it, the cell goes on, and all of it is interrupted once more.
            if called != name or (self._left and not self._looks):
                self._heard.add(pid)
                try:
                    os.kill(pid, signal.SIGINT)
                except OSError:
                    pass  # it has ended
        self._later()

    def _own_name(self) -> str:
        found = read_stat(proc_folder(), self._leader)
        return found[0] if found is not None else ""

    def _children(self) -> list[tuple[int, str]]:
        """The pids and names of bash's own children in its group; theirs are theirs to end."""
        found: list[tuple[int, str]] = []
        for name in os.listdir(proc_folder()):
            stat = read_stat(proc_folder(), int(name)) if name.isdigit() else None
            if stat is not None and stat[1][1:3] == [str(self._leader)] * 2:
                found.append((int(name), stat[0]))
        return found
