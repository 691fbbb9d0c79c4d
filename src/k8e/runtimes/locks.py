"""Locks on parts of files: memory of the kernel that no control group counts, and nothing bounds.

A program may lock a million single bytes. Few need more than a handful, so sandboxes with thousands
are found here, from the kernel's description of each open file. That is complete for locks that
belong to a process: they are gone when it closes the file. Those that belong to an open file, which
could be hidden in a socket, are refused by ``seccomp``.

What the kernel tells of a process is what it knows of its first thread. That one may have ended,
and the others may have open files of their own: so every thread is asked, unless it shares the open
files of one that was.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterable
from pathlib import Path

from k8e.runtimes import cgroups

MOST = 10_000
"""Locks that a sandbox may hold at a time: 2 MB of the kernel's memory."""
TOO_MANY = "it held more than {} locks on files, which take memory of the host that no limit counts"
LOCKS = Path("/proc/locks")
_KCMP = {"x86_64": 312, "aarch64": 272}.get(platform.machine(), -1)
_KCMP_FILES, _SAME, _LESS = 2, 0, 1
_libc = ctypes.CDLL(None, use_errno=True)
_MOST_BYTES = 16 << 20  # of what one open file tells; each lock is a line


def find_greedy(sandbox_ids: Iterable[str]) -> dict[str, str]:
    """The sandboxes that hold more locks than any program needs, with the reason to end them."""
    if count_on_host() <= MOST:
        return {}
    found: dict[str, str] = {}
    for sandbox_id in sandbox_ids:
        processes, _ = cgroups.what_is_left(sandbox_id)
        if count_held(processes) > MOST:
            found[sandbox_id] = TOO_MANY.format(MOST)
    return found


def count_on_host(most: int = MOST) -> int:
    """The number of locks on this host, counted up to a little more than ``most``."""
    count = 0
    with open(LOCKS, "rb", buffering=0) as file:  # in small pieces: a large buffer stops nobody
        while count <= most and (data := file.read(1 << 16)):
            count += data.count(b"\n")
    return count


def count_held(pids: Iterable[int], most: int = MOST) -> int:
    """The number of locks that these processes hold, counted up to ``most``."""
    count = 0
    asked: list[int] = []  # threads with different open files, in the kernel's order
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for name in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - as text, may be many
                if _is_new(asked, int(name)):
                    count += _count_of_thread(f"/proc/{pid}/task/{name}/fdinfo", most - count)
                if count > most:
                    return count
    return count


def _is_new(asked: list[int], thread: int) -> bool:
    """Whether no thread in ``asked`` shares the open files of ``thread``, which is added to it.

    One that has ended meanwhile, or a kernel that does not compare, is no reason to leave one out.
    """
    low, high = 0, len(asked)
    while low < high:
        middle = (low + high) // 2
        told = _libc.syscall(_KCMP, thread, asked[middle], _KCMP_FILES, 0, 0)
        if told == _SAME:
            return False
        low, high = (low, middle) if told == _LESS else (middle + 1, high)
    asked.insert(low, thread)
    return True


def _count_of_thread(folder: str, most: int) -> int:
    count = 0
    with contextlib.suppress(OSError):  # it has ended
        for name in os.listdir(folder):  # noqa: PTH208 - as text, there may be thousands
            count += _count_of(f"{folder}/{name}")
            if count > most:
                break
    return count


def _count_of(path: str) -> int:
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        count = 0
        for _ in range(_MOST_BYTES >> 16):
            data = file.read(1 << 16)
            if not data:
                break
            count += data.count(b"lock:")
        return count
    return 0
