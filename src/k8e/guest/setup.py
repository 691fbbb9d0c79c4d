"""Preparation of a sandbox before there is a session, and when one gets it.

In gVisor the guest itself puts the workspace and the folders in memory into place, since nothing on
the host can. It may do so until a session is bound, and no program of a user's has run by then.

In gVisor the first start takes twice as long as the next: gVisor makes a process of the host's for
the program's memory, which it keeps for others, and brings in the guest's own code page by page.
"""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

from k8e.guest.execs import Exec, Execs
from k8e.guest.isolation import (
    CAPABILITIES_V3,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    in_image,
    separate_programs,
)
from k8e.guest.spawn import BASE_ENV, GID, HOME, UID, WORKSPACE, as_user, kill_others

SLOT = "/run/k8e/slot/w"
_SYS_ADMIN = 1 << 21


def own_home() -> None:
    """Make the user's home, and its folder for packages.

    Python looks into that folder only if it is there when the interpreter starts.
    """
    os.umask(0o022)
    try:
        os.mkdir(HOME, 0o700)
    except FileExistsError:
        pass
    os.chown(HOME, UID, GID)
    if in_image() and not os.path.exists(BASE_ENV["SHELL"]):
        BASE_ENV["SHELL"] = "/bin/sh"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    with as_user():
        os.makedirs(f"{HOME}/.local/lib/python{version}/site-packages", exist_ok=True)


def leave_log() -> None:
    """Close the host's log, a file without limit: it is for failures before a session."""
    fd = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


class SessionPlace:
    """The workspace and folders of a session, as far as the guest has to make them."""

    def __init__(self) -> None:
        # Only where the guest may mount, which is in gVisor. Importing costs every start.
        self._ctypes: Any = None
        self._libc: Any = None
        self._settled = False
        self._rights: Any = None
        self._folders: list[list[Any]] = []

    def settle(self) -> None:
        """Prepare, once, what needs no session: mount the workspace, set programs apart."""
        if self._settled or not os.path.isdir(SLOT):
            return
        if self._libc is not None:
            raise OSError("the sandbox could not be made ready before")
        import ctypes

        self._ctypes, self._libc = ctypes, ctypes.CDLL(None, use_errno=True)
        self._mount(SLOT, WORKSPACE, "", MS_BIND)
        separate_programs(self._libc)
        self._rights = self._without_mounting()
        self._settled = True

    def renew_workspace(self) -> None:
        """Mount the other file system that the host has put into the slot."""
        if self._libc is not None:
            self._unmount(WORKSPACE)
            self._mount(SLOT, WORKSPACE, "", MS_BIND)

    def renew_folders(self, folders: list[list[Any]]) -> None:
        """Mount new folders in memory: gVisor takes another size for an old one, and ignores it."""
        if self._libc is None or folders == self._folders:
            return
        self._folders = folders
        for path, bounds, mode, noexec in folders:
            flags = MS_NOSUID | MS_NODEV | (MS_NOEXEC if noexec else 0)
            self._unmount(path)
            self._mount("tmpfs", path, "tmpfs", flags, f"{bounds},mode={mode}")
        own_home()

    def give_up_mounting(self) -> None:
        """Drop the right to mount for good."""
        if self._rights is not None:
            self._check(self._libc.capset(*self._rights), "capset")

    def _without_mounting(self) -> Any:
        """The arguments of ``capset`` that keep all rights but that one."""
        header = (self._ctypes.c_uint32 * 2)(CAPABILITIES_V3, 0)
        sets = (self._ctypes.c_uint32 * 6)()
        self._check(self._libc.capget(header, sets), "capget")
        for index in range(3):
            sets[index] &= ~_SYS_ADMIN
        return header, sets

    def _mount(self, source: str, target: str, kind: str, flags: int, data: str = "") -> None:
        arguments = (source.encode(), target.encode(), kind.encode(), self._ctypes.c_ulong(flags))
        self._check(self._libc.mount(*arguments, data.encode()), f"mounting {target}")

    def _unmount(self, target: str) -> None:
        self._check(self._libc.umount2(target.encode(), 0), f"unmounting {target}")

    def _check(self, failed: int, what: str) -> None:
        if failed:
            number = self._ctypes.get_errno()
            raise OSError(number, f"{what} failed: {os.strerror(number)}")


TOKEN_VARIABLE = "SANDBOX_TOKEN"  # noqa: S105 - a name
TOKEN_FILE = "/run/k8e/token"  # noqa: S105 - a path
"""A link out of the root file system, which is read-only."""


def put_token(token: str) -> None:
    """Write the sandbox's own token for its programs; they find the old one or the new one."""
    path = os.path.realpath(TOKEN_FILE)
    scratch = path + ".new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(scratch, flags, 0o400)
    try:
        os.write(fd, token.encode())
        os.fchown(fd, UID, GID)
    finally:
        os.close(fd)
    os.rename(scratch, path)


PROGRAM = ["env"]
"""One that heeds LANG, as most do: what it opens of that, others find open."""


class RehearsalReader:
    """A program without readers."""

    def __init__(self, execs: Execs, made: Exec) -> None:
        self.pid = made.pid
        self._made = made
        self._made.add_reader(self, start=0, credit=1 << 16).pump()
        execs.adopt(self)

    def exited(self, wait_status: int) -> None:
        self._made.exited(wait_status)

    def send(self, *_: Any, **__: Any) -> None:
        """Discard a frame."""

    def close(self) -> None:
        """Do nothing."""


def rehearse(execs: Execs) -> None:
    """Start a program, if the sandbox has it; not in the workspace, which may still be replaced."""
    try:
        RehearsalReader(execs, execs.begin_apart({"argv": PROGRAM, "output": "ring", "cwd": "/"}))
    except OSError:
        pass


def rehearse_binding() -> None:
    """Bind without a session: limits as they are, and no programs to end."""
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC):
        resource.setrlimit(kind, resource.getrlimit(kind))
    kill_others(lambda _: True)
