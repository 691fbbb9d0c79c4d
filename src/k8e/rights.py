"""Rights of another user, for work of root in that user's folders.

The owner of a folder can put a link into it at any moment, even between a check and the next step.
So root does not check; it works there with no more rights than the owner has, and the kernel
refuses everything that the owner could not have done. New files belong to the owner by themselves.

On Linux only the file system's user of the calling thread is changed (setfsuid(2)): no other thread
notices, and nobody may signal or trace the process because of it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

MAX_LINKS = 40
_SETGROUPS = {"x86_64": 116, "aarch64": 159}  # system calls; the C library's is for all threads
_PLACE = getattr(os, "O_PATH", 0) | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)


class User(NamedTuple):
    """The user whose rights are meant."""

    uid: int
    gid: int


def master_of(path: Path) -> User | None:
    """The user who controls where ``path`` leads; None if only root does.

    It is the owner of the first folder or link on the way that is not root's. Nobody else can
    change what comes before. A file at its end decides about nothing but itself.
    """
    left = list(reversed(path.absolute().parts[1:]))
    fd = os.open("/", _PLACE)
    links = 0
    try:
        while left:
            part = left.pop()
            try:
                info = os.lstat(part, dir_fd=fd) if part != ".." else os.fstat(fd)
            except FileNotFoundError:
                return None
            if info.st_uid and (left or not stat.S_ISREG(info.st_mode)):
                return User(info.st_uid, _group_of(info))
            if stat.S_ISLNK(info.st_mode):
                links += 1
                if links > MAX_LINKS:
                    return None  # whoever opens it is told
                target = os.readlink(part, dir_fd=fd)
                left += reversed([item for item in target.split("/") if item])
                if not target.startswith("/"):
                    continue
                part = "/"
            elif not stat.S_ISDIR(info.st_mode):
                return None
            below = os.open(part, _PLACE, dir_fd=fd)
            os.close(fd)
            fd = below
    finally:
        os.close(fd)
    return None


def _group_of(info: os.stat_result) -> int:
    import pwd

    try:
        return pwd.getpwuid(info.st_uid).pw_gid
    except KeyError:  # a user without a name
        return info.st_gid


@contextlib.contextmanager
def of_master(path: Path) -> Generator[None]:
    """While entered, root's access to files is checked as that of the user who controls ``path``.

    Blocks in each other have the rights of the outermost one that is not for a path of root's.
    """
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0  # Windows has no such user
    user = master_of(path) if is_root else None
    if user is None:
        yield
        return
    with _as(user):
        yield


@contextlib.contextmanager
def _as(user: User) -> Generator[None]:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "setfsuid"):  # not Linux: for the whole process, and only for a moment
        os.setegid(user.gid)
        os.seteuid(user.uid)
        try:
            yield
        finally:
            os.seteuid(0)
            os.setegid(0)
        return
    if libc.setfsuid(-1):  # we are in such a block already, and have no rights to give away
        yield
        return
    before = os.getgroups()
    try:
        _set_groups(libc, [user.gid])
        libc.setfsgid(user.gid)
        libc.setfsuid(user.uid)  # takes root's rights to files away, too
        if libc.setfsuid(-1) != user.uid:
            raise PermissionError(f"the rights of uid {user.uid} cannot be had")
        yield
    finally:
        libc.setfsuid(0)
        libc.setfsgid(0)
        _set_groups(libc, before)


def _set_groups(libc: Any, groups: list[int]) -> None:
    """Set the supplementary groups of this thread, where we know how; otherwise root's own stay."""
    import ctypes

    number = _SETGROUPS.get(os.uname().machine)
    if number is not None:
        libc.syscall(number, len(groups), (ctypes.c_uint32 * len(groups))(*groups))
