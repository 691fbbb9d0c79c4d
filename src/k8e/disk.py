"""The disk of the data folder: its free space, and the gateway's reserve on it.

Everything that can be refused is refused before the disk is full. What must never be refused
(deleting a key, tightening a policy, ending a session, the audit trail) gets its room from the
*reserve*: a file without content that is made shorter, step by step, when the disk is full all the
same, and longer again when there is room.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import threading
from pathlib import Path
from typing import NamedTuple

from k8e import errors

log = logging.getLogger(__name__)

STEPS = 16
"""In how many steps a reserve is given up."""
FULL = (errno.ENOSPC, errno.EDQUOT)
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
_libc = ctypes.CDLL(None, use_errno=True)


class Space(NamedTuple):
    """A file system's size, in bytes."""

    total: int
    free: int
    """What is left without the part that some file systems keep for root."""


def space(folder: Path) -> Space:
    """The size of the file system that holds a folder."""
    told = os.statvfs(folder)
    return Space(told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize)


def nearly_full(free: int, least: int, what: str) -> errors.LimitExceeded:
    """The refusal of ``what``, which would need more room than the disk has."""
    return errors.LimitExceeded(
        f"disk is nearly full: the data folder of the gateway has {free >> 20} MiB left; {what} "
        f"{least >> 20} MiB (K8E_MIN_FREE_DISK)",
        hint="destroy sessions, remove snapshots (k8e sandbox snapshot list) and images "
        "(k8e image prune), or ask the gateway's operator for a larger disk for its data folder",
    )


def refuse_if_full(folder: Path, least: int, what: str) -> None:
    """Raise LimitExceeded where less than ``least`` bytes are free; 0 asks for nothing."""
    if least and (free := space(folder).free) < least:
        raise nearly_full(free, least, what)


def allocate(fd: int, size: int) -> bool:
    """Allocate blocks for the first ``size`` bytes of a file, whose length does not change.

    False if there is no room for them. A file system that cannot do this gives none ahead.
    """
    if not hasattr(_libc, "fallocate64"):
        return True
    while _libc.fallocate64(fd, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size)):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            return number not in FULL
    return True


class Reserve:
    """Room that no other program can take, in a file of its own."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self.size = size
        """What is to be kept."""
        self._step = max(4096, -(-size // STEPS))
        self._lock = threading.Lock()
        self.held = path.stat().st_size if path.exists() else 0
        """What is kept now."""
        if self.held > size:
            self._resize(size)

    @property
    def missing(self) -> int:
        return self.size - self.held

    def fill(self, spare: int) -> None:
        """Fill the reserve again, with at most ``spare`` free bytes."""
        with self._lock:
            while self.missing and spare >= min(self._step, self.missing):
                more = min(self._step, self.missing)
                if not self._resize(self.held + more):
                    return
                spare -= more

    def give_way(self, *, urgent: bool = True) -> bool:
        """Give up a step, for a write that has just failed; False if nothing is left.

        What is not ``urgent`` leaves half of the reserve to what is.
        """
        with self._lock:
            if self.held <= (0 if urgent else self.size // 2):
                return False
            log.warning("the disk is full: %d bytes of the reserve are left", self.held)
            return self._resize(max(0, self.held - self._step))

    def _resize(self, size: int) -> bool:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(self._path, flags, 0o600)
        except OSError as error:
            log.error("the reserve %s cannot be used: %s", self._path, error)
            return False
        try:
            if size > self.held:
                os.posix_fallocate(fd, self.held, size - self.held)
            else:
                os.ftruncate(fd, size)
                os.fsync(fd)  # some file systems give blocks back no sooner
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, self.held)
            log.log(logging.INFO if error.errno in FULL else logging.ERROR, "reserve: %s", error)
            return False
        finally:
            os.close(fd)
        self.held = size
        return True


_reserve: Reserve | None = None


def keep_reserve(data_dir: Path, size: int, least: int) -> Reserve:
    """Keep a reserve of ``size`` bytes for this process, if ``least`` more are free beside it."""
    global _reserve
    _reserve = Reserve(data_dir / "reserve", size)
    _reserve.fill(space(data_dir).free - least)
    return _reserve


def give_way(*, urgent: bool = True) -> bool:
    """Make room for a write of the gateway's own that has failed; False if there is none."""
    return _reserve is not None and _reserve.give_way(urgent=urgent)
