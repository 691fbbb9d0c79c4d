"""Does once, before there is a session, what every session does first: be bound, start a program.

In gVisor the first start takes twice as long as the next: gVisor makes a process of the host's for
the program's memory, which it keeps for others, and brings in the guest's own code page by page.
"""

from __future__ import annotations

import resource
from typing import Any

from k8e.guest.execs import Exec
from k8e.guest.spawn import kill_others
from k8e.guest.table import Execs

PROGRAM = ["env"]
"""One that heeds LANG, as most do: what it opens of that, others find open."""


class Rehearsal:
    """A program that nobody reads and nobody is told of."""

    def __init__(self, execs: Execs, made: Exec) -> None:
        self.pid = made.pid
        self._made = made
        self._made.add_reader(self, start=0, credit=1 << 16).pump()
        execs.adopt(self)

    def exited(self, wait_status: int) -> None:
        self._made.exited(wait_status)

    def send(self, *_: Any, **__: Any) -> None:
        """As a channel that leads nowhere."""

    def close(self) -> None:
        """As a channel."""


def rehearse(execs: Execs) -> None:
    """Start a program, if the sandbox has it; not in the workspace, which may yet be changed."""
    try:
        Rehearsal(execs, execs.begin_apart({"argv": PROGRAM, "output": "ring", "cwd": "/"}))
    except OSError:
        pass


def rehearse_binding() -> None:
    """Bind nobody: limits as they are, and nothing that has to end."""
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC):
        resource.setrlimit(kind, resource.getrlimit(kind))
    kill_others(lambda _: True)
