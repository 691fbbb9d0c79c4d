"""Locks on parts of files: memory of the kernel that no control group counts, and nothing bounds.

A program may lock a million single bytes. Few need more than a handful, so whoever holds thousands
is found here, by what the kernel tells of each open file. That is complete for locks that belong to
a process: they are gone when it closes the file. Those that belong to an open file, which could be
hidden in a socket, are refused by ``seccomp``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

MOST = 10_000
"""Locks that a sandbox may hold at a time: 2 MB of the kernel's memory."""
LOCKS = Path("/proc/locks")
_MOST_BYTES = 16 << 20  # of what one open file tells; each lock is a line


def count_on_host(most: int = MOST) -> int:
    """How many locks there are on this host; at most a few more than ``most``."""
    count = 0
    with open(LOCKS, "rb", buffering=0) as file:  # in small pieces: a large buffer stops nobody
        while count <= most and (data := file.read(1 << 16)):
            count += data.count(b"\n")
    return count


def count_held(pids: Iterable[int], most: int = MOST) -> int:
    """How many of them these processes hold; it stops counting when there are ``most``."""
    count = 0
    for pid in pids:
        folder = f"/proc/{pid}/fdinfo"
        with contextlib.suppress(OSError):  # it has ended
            for name in os.listdir(folder):  # noqa: PTH208 - as text, there may be thousands
                count += _count_of(f"{folder}/{name}")
                if count > most:
                    return count
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
