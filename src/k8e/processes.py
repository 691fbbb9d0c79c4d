"""Processes by more than their number, which the kernel gives to another one day."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

KILL_ROUNDS = 5  # one may start another while it is looked for
MOST_NAMES = 5
KILL_SECONDS = 5.0  # one that has much memory takes a while to end


def start_time(pid: int) -> int:
    """When a process started, in kernel ticks; 0 if there is no such process."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
        return int(text.rpartition(")")[2].split()[19])
    return 0


def describe(pids: Iterable[int]) -> str:
    """Processes by the names of their programs, for people: ``2 processes (sh, python3)``."""
    names = [_name(pid) for pid in pids]
    shown = ", ".join(names[:MOST_NAMES]) + (", …" if len(names) > MOST_NAMES else "")
    return f"{len(names)} process{'es' if len(names) != 1 else ''} ({shown})"


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
        return "".join(char if char.isprintable() else "?" for char in text)
    return "unknown"


def end_all(find: Callable[[], Iterable[int]]) -> list[int]:
    """Kill what ``find`` finds until it finds nothing; whatever was killed has ended then.

    What comes back are those that did not end in time.
    """
    deadline = time.monotonic() + KILL_SECONDS
    for _ in range(KILL_ROUNDS):
        with contextlib.ExitStack() as opened:
            held = {pid: fd for pid in find() if (fd := _hold(pid, opened)) >= 0}
            if not held:
                return []
            # Their numbers can be nobody else's from here on; before that they could.
            killed = [held[pid] for pid in find() if pid in held]
            for fd in killed:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
            _await_ends(killed, deadline)
        if time.monotonic() > deadline:
            break
    return list(find())


def _hold(pid: int, opened: contextlib.ExitStack) -> int:
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return -1  # it has ended
    opened.callback(os.close, fd)
    return fd


def _await_ends(pidfds: list[int], deadline: float) -> None:
    waiting = select.poll()
    for fd in pidfds:
        waiting.register(fd, select.POLLIN)
    left = len(pidfds)
    while left and (seconds := deadline - time.monotonic()) > 0:
        for fd, _ in waiting.poll(seconds * 1000):
            waiting.unregister(fd)
            left -= 1
