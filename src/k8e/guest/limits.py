"""Limits of the session that a program has met, as far as the sandbox can tell.

The kernel does not report refusals, so this looks at what is full when a program fails, and at its
last words. What the kernel of the host counts, the gateway adds.
"""

from __future__ import annotations

import errno
import os

from k8e.guest.spawn import UID, WORKSPACE

MEMORY_FOLDERS = ("/tmp", "/home", "/var/tmp", "/dev/shm")
# A file system with less than this part of its blocks left is full: ext4 keeps some back.
FULL_SHARE = 32
FULL_BYTES = 1 << 20  # and never more than this
USUAL_BLOCKS = 4096  # blocks that ext4 keeps back by itself, or a fiftieth
WORDS = (
    (b"No space left on device", "disk"),
    (b"Disk quota exceeded", "disk"),
    (b"Too many open files", "open_files"),
    (b"MemoryError", "memory"),
    (b"Cannot allocate memory", "memory"),
    (b"can't start new thread", "pids"),
    (b"fork: retry: Resource temporarily unavailable", "pids"),
    (b"fork: Resource temporarily unavailable", "pids"),
    (b"Cannot fork", "pids"),
)
SESSION_LIMITS: dict[str, float] = {}
"""Those of the session, by name; nothing before it is bound."""
COUNTED: dict[str, int] = {}
"""The limit of processes where the sandbox itself has to hold it."""


def limits_met(words: bytes) -> list[str]:
    """The limits that a program may have failed for, by name; ``words`` ends its output."""
    found = _full_places()
    if COUNTED and _count_tasks(COUNTED["pids"]) >= COUNTED["pids"] - 1:
        found.append("pids")
    for text, name in WORDS:
        # A full folder in memory gives the same error as a full workspace.
        if text in words and name not in found and not (name == "disk" and found):
            found.append(name)
    return found


def _full_places() -> list[str]:
    found: list[str] = []
    for place in (WORKSPACE, *MEMORY_FOLDERS):
        try:
            told = os.statvfs(place)
        except OSError:
            continue
        left = told.f_bavail * told.f_frsize
        enough = min(FULL_BYTES, told.f_blocks * told.f_frsize // FULL_SHARE)
        name = "disk" if place == WORKSPACE else "memory"
        if told.f_blocks and left < enough and name not in found:
            found.append(name)
        if told.f_files and not told.f_ffree:
            name = "inodes" if place == WORKSPACE else "memory"
            if name not in found:
                found.append(name)
    return found


def _count_tasks(most: int) -> int:
    """Processes and threads of the user; counts no further than ``most``."""
    count = 0
    for name in os.listdir("/proc"):
        if count >= most:
            break
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == UID:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue  # it has just ended
    return count


def why_refused(number: int) -> str:
    """What an error of the system means here, where a limit is the cause; empty where none is."""
    if number == errno.ENOSPC and SESSION_LIMITS:
        if _held_back():
            return "the disk of the gateway is nearly full, so /workspace cannot grow now"
        disk, memory = (_mebibytes(SESSION_LIMITS[name]) for name in ("disk", "memory"))
        return (
            f"the limit disk of /workspace is {disk}, and other folders are bounded by the limit "
            f"memory, {memory}; a new session can have more"
        )
    return ""


def _held_back() -> bool:
    """Whether the workspace may not grow to its limit now.

    The host has then taken blocks away, and most of what ext4 keeps back by itself too; a gateway
    of an older release has ext4 keep back more instead.
    """
    try:
        told = os.statvfs(WORKSPACE)
    except OSError:
        return False
    kept, part = told.f_bfree - told.f_bavail, told.f_blocks // 50
    return 0 < kept < min(USUAL_BLOCKS, part) // 2 or kept > max(USUAL_BLOCKS, part)


def no_more_processes() -> OSError:
    """Why a program cannot be started although nothing is wrong with it."""
    most = SESSION_LIMITS.get("pids")
    told = f"the limit pids of the session is {most:g}" if most else "the limit pids is reached"
    text = f"{os.strerror(errno.EAGAIN)}: {told}; end programs, or give a new session more"
    return OSError(errno.EAGAIN, text)


def _mebibytes(size: float) -> str:
    return f"{size / (1 << 20):g} MiB"
