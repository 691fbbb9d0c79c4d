"""Files of the audit trail: segments of lines that only grow, the oldest removed as a whole.

A segment is named after the number of its first row. Each row is one ``write(2)``, so a gateway
that is killed loses none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path
from typing import NamedTuple

from k8e import disk, errors
from k8e.audit import rows
from k8e.audit.rows import NO_HASH, AuditRow

SUFFIX = ".jsonl"
DAY = 24 * 3600.0
MIN_SEGMENT, MAX_SEGMENT = 64 << 10, 16 << 20  # bytes
LONGEST_LINE = 64 << 10
AHEAD = 512 << 10
"""Bytes for which a segment has blocks before there are rows for them …"""
ENOUGH = 256 << 10
"""… of which so many are for the ends of what has begun, and for what makes things safer."""
MAX_LEFT = 64  # segments that were left and are not on the disk yet


class Excess(NamedTuple):
    """Segments that are to be removed."""

    paths: list[Path]
    """Oldest first."""
    first: int
    """The number of the oldest row that stays, …"""
    prev: str
    """… and the hash that it gives for the row before it."""

    def remove(self) -> None:
        """Remove them, once a row that is on the disk says so.

        The oldest first: whenever this is cut short, the rest has no gap.
        """
        for path in self.paths:
            path.unlink(missing_ok=True)


def segments(folder: Path) -> list[Path]:
    """All segments, oldest first."""
    found = [path for path in folder.glob(f"*{SUFFIX}") if path.stem.isdigit()]
    return sorted(found, key=lambda path: int(path.stem))


class SegmentWriter:
    """The one writer of a folder's rows."""

    def __init__(self, folder: Path, *, max_bytes: int, max_age: float) -> None:
        """Continue where the gateway before stopped.

        Raises:
            Conflict: another gateway writes there.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._max_bytes = max_bytes
        self._max_age = max_age
        self._segment_bytes = min(max(max_bytes // 8, MIN_SEGMENT), MAX_SEGMENT)
        self._lock = _lock(folder / "lock")
        self.seq = 0
        self.head = NO_HASH
        self.repaired = 0
        """Bytes of half a row that was found at the end and taken away."""
        self._fd = -1
        self._size = 0
        self._allocated = 0  # bytes of this segment for which there are blocks
        self._began = 0.0
        self._newest = 0  # the name of the newest segment
        self._left: list[int] = []  # descriptors of segments that are full, and not synced yet
        self._recover()

    def _recover(self) -> None:
        known = segments(self._folder)
        self._newest = int(known[-1].stem) if known else 0
        for path in reversed(known):  # the newest may have been begun and never written to
            last = self._open_last(path)
            if last is not None:
                self.seq, self.head = last.seq, last.hash
                if path != known[-1]:  # readers that follow are in the newest already
                    self._drop_name()
                return
        self._drop_name()

    def _open_last(self, path: Path) -> rows.ChainLink | None:
        """Open a segment for appending; return its last row, if there is a readable one."""
        self._drop_name()
        self._fd, self._size = _open(path), path.stat().st_size
        self._allocated = path.stat().st_blocks * 512
        self._began = path.stat().st_mtime
        start = max(0, self._size - 2 * LONGEST_LINE)
        data = os.pread(self._fd, self._size - start, start)
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            self.repaired += len(data) - whole
            self._size = start + whole
            self._cut()
        found = (rows.link(line) for line in reversed(data[:whole].splitlines()))
        return next((item for item in found if item is not None), None)

    def _drop_name(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._size, self._allocated = -1, 0, 0

    def append(self, row: AuditRow) -> None:
        """Add a row, whole or not at all.

        Raises:
            OSError: it could not be written; the chain is as before.
        """
        now = time.time()
        line, found = rows.encode(self.seq + 1, now, row, self.head)
        while True:
            try:
                self._write(line, now)
            except OSError as error:
                if error.errno not in disk.FULL or not disk.give_way():
                    raise
                continue
            self.seq, self.head = self.seq + 1, found
            return

    def has_room(self) -> bool:
        """Whether there is room for the begin and end rows of an operation."""
        if self._size + ENOUGH <= self._allocated:
            return True
        try:
            if self._fd < 0:
                self._begin(time.time())
        except OSError as error:
            if error.errno in disk.FULL:
                return False
            raise
        if self._size + ENOUGH <= self._allocated:
            return True
        return self._allocate(self._size + AHEAD, urgent=False)

    def _allocate(self, size: int, *, urgent: bool = True) -> bool:
        """Allocate blocks for the first ``size`` bytes of this segment."""
        found = _allocate(self._fd, size, urgent=urgent)
        self._allocated = size if found else self._allocated
        return found

    def _write(self, line: bytes, now: float) -> None:
        if self._fd < 0 or self._size + len(line) > self._segment_bytes or self._is_old(now):
            try:
                self._begin(now)
            except OSError as error:
                # One that grows too long is better than a row that is lost.
                fits = self._fd >= 0 and self._size + len(line) <= self._allocated
                if error.errno not in disk.FULL or not fits:
                    raise
        if self._size + len(line) > self._allocated:
            self._allocate(self._size + AHEAD)
        written = os.write(self._fd, line)
        if written < len(line):
            self._cut()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += written

    def _cut(self) -> None:
        """End the segment after its last row, and free the blocks beyond it."""
        os.ftruncate(self._fd, self._size)
        self._allocated = self._size

    def _is_old(self, now: float) -> bool:
        return self._size > 0 and now - self._began > min(DAY, (self._max_age or DAY) / 8)

    def _begin(self, now: float) -> None:
        number = max(self.seq + 1, self._newest)
        path = self._folder / f"{number:015d}{SUFFIX}"
        fd = _open(path)
        if not _allocate(fd, AHEAD):
            os.close(fd)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._fd >= 0:
            self._cut()
            self._left.append(self._fd)
        self._fd, self._size, self._began, self._newest = fd, path.stat().st_size, now, number
        self._allocated = AHEAD
        if len(self._left) > MAX_LEFT:  # the syncing thread cannot keep up
            sync(self._folder, self.written())

    def written(self) -> list[int]:
        """Descriptors of files that may not be on the disk yet; the caller calls ``sync``."""
        found, self._left = self._left, []
        return [*found, os.dup(self._fd)] if self._fd >= 0 else found

    def excess(self, now: float) -> Excess | None:
        """The segments that are too many or too old, never the newest."""
        kept = segments(self._folder)
        sizes = {path: path.stat() for path in kept}
        total = sum(info.st_size for info in sizes.values())
        gone: list[Path] = []
        while len(kept) > 1:
            old = self._max_age and now - sizes[kept[0]].st_mtime > self._max_age
            if total <= self._max_bytes and not old:
                break
            total -= sizes[kept[0]].st_size
            gone.append(kept.pop(0))
        if not gone:
            return None
        first = _first(kept[0]) or rows.ChainLink(int(kept[0].stem), "", "")
        return Excess(gone, first.seq, first.prev)

    def close(self) -> None:
        if self._fd >= 0:
            self._cut()
        for fd in self._left:
            os.close(fd)
        self._left = []
        self._drop_name()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _allocate(fd: int, size: int, *, urgent: bool = True) -> bool:
    """Allocate blocks for a segment, from the gateway's reserve if need be."""
    while not (found := disk.allocate(fd, size)) and disk.give_way(urgent=urgent):
        pass
    return found


def sync(folder: Path, written: list[int]) -> None:
    """Sync segments and their names to the disk, and close these descriptors of them."""
    with contextlib.ExitStack() as stack:
        for fd in written:
            stack.callback(os.close, fd)
        for fd in written:
            os.fdatasync(fd)
        names = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, names)
        os.fsync(names)


def _first(path: Path) -> rows.ChainLink | None:
    """The chain link of a segment's first row."""
    with path.open("rb") as file:
        return rows.link(file.readline(LONGEST_LINE).rstrip(b"\n"))


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path, flags, 0o600)


def _lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise errors.Conflict(
            "another gateway writes the audit trail of this data folder",
            hint="stop it, or set K8E_DATA_DIR to another folder",
        ) from None
    return fd
