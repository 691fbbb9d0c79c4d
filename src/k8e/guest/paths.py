"""Paths that clients name and programs have filled with links: the kernel resolves them, not us.

A kernel follows 40 links and no more. Following them one by one, as ``os.path.realpath`` does,
means following as many as a program has made, with thousands of lookups each. Here the kernel gets
every path as a whole, and lookups in parts go on from the directory that they have reached.
"""

from __future__ import annotations

import errno
import os
import time

from k8e.guest.isolation import is_apart

MAX_LINKS = 40  # the kernel's own
# Seconds of CPU time, for one path; a kernel takes a fifth of it for the worst lookup.
LOOKUP_SECONDS = 1.0
_PLACE = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


def open_place(path: str, at: int | None = None) -> int:
    """A descriptor that only names a directory; a relative path is taken from ``at``."""
    return os.open(path, _PLACE, dir_fd=at)


def refuse_guest(fd: int) -> None:
    """Refuse the guest's own files: a process may always read its own, whatever its user."""
    real = "" if is_apart() else os.readlink(f"/proc/self/fd/{fd}")
    if real == "/proc/1" or real.startswith("/proc/1/"):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def open_parent(path: str) -> tuple[int, str]:
    """The directory and name of the file that ``path`` leads to, whether it exists or not."""
    try:
        os.close(os.open(path, os.O_PATH | os.O_CLOEXEC))  # ELOOP, if there are too many links
    except FileNotFoundError:
        pass
    folder, name = os.path.split(path)
    fd = open_place(folder)
    try:
        for _ in range(MAX_LINKS + 1):
            refuse_guest(fd)
            try:
                target = os.readlink(name, dir_fd=fd)
            except OSError:
                return fd, name  # not a link, or not there
            folder, name = os.path.split(target)
            if not name:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            fd = _go_on(fd, folder or ".")
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))  # a program makes more meanwhile
    except OSError as error:
        os.close(fd)
        error.filename = path
        raise


def _go_on(fd: int, path: str, flags: int = _PLACE) -> int:
    """Open the directory ``path`` below ``fd``, and close ``fd``."""
    below = os.open(path, flags, dir_fd=fd)
    os.close(fd)
    return below


def make_folders(path: str) -> None:
    """``os.makedirs``, which would look up the whole path once for each of its parts."""
    if os.path.isdir(path):
        return
    parts = [part for part in path.split("/") if part]
    place = [open_place("/")]
    try:
        known = _find_last(parts, place)
        for number, name in enumerate(parts[known:], start=known + 1):
            _make_folder(place, name, last=number == len(parts))
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(place[0])


def _find_last(parts: list[str], place: list[int]) -> int:
    """The number of parts that exist; ``place`` then has the directory that they lead to."""
    until = time.process_time() + LOOKUP_SECONDS
    low, high, step = 0, len(parts), 1
    while low + 1 < high:
        if time.process_time() > until:
            raise OSError(errno.ELOOP, "its links take too long to follow")
        probe = min(low + step, high - 1)
        try:
            place[0] = _go_on(place[0], "/".join(parts[low:probe]))
            low, step = probe, step * 2
        except FileNotFoundError:
            high, step = probe, 1
    return low


def _make_folder(place: list[int], name: str, *, last: bool) -> None:
    try:
        os.mkdir(name, dir_fd=place[0])
        exists = None
    except FileExistsError as error:
        exists = error
    if last and exists is None:
        return
    # Links are not followed: a client cannot mean a link that was not there a moment ago.
    try:
        place[0] = _go_on(place[0], name, _PLACE | os.O_NOFOLLOW)
    except OSError:
        if exists is None:
            raise
        raise exists from None
