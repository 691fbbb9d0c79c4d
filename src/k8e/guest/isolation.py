"""Keeps the guest out of the programs' reach in gVisor: they live in a PID namespace of their own.

Linux delivers no signal to the first process of a PID namespace that this has no handler for.
gVisor does, and for the moment of a spawn the guest has the user's real uid, so ``kill -9 1`` in a
loop would hit it. A process cannot even name what is outside its namespace. The first process in
there has ids of its own and no rights; it does nothing, and leaves orphans to the kernel.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

CLONE_NEWPID = 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x2, 0x4, 0x8
FIRST_PROCESS = ["/usr/bin/sleep", "infinity"]
OWN_PYTHON = "/run/k8e/python"

MS_BIND = 0x1000
CAPABILITIES_V3 = 0x20080522
NOBODYS_ID = 65533
# The guest's own /proc, since programs have another one at that place. It is behind a folder of
# root's, and not behind a descriptor, which could become a program's working directory.
HIDDEN = "/dev/.k8e"
_proc = ["/proc"]
_first: list[int] = []


def in_image() -> bool:
    """Whether the root is an image: its programs are not ours, and never run with our rights."""
    return sys.prefix == OWN_PYTHON


def proc_folder() -> str:
    """The ``/proc`` in which the guest sees all processes."""
    return _proc[0]


def name_of(fd: int) -> str:
    """The path of an open file, without links; the user may not look there."""
    return os.readlink(f"{proc_folder()}/self/fd/{fd}")


def is_apart() -> bool:
    """Whether programs, and paths below ``/proc``, can no longer reach the guest."""
    return _proc[0] != "/proc"


def first_process() -> int:
    """The guest's pid for the first process of the programs' namespace; 0 if there is none."""
    return _first[0] if _first else 0


def separate_programs(libc: Any) -> None:
    """Start programs in a new PID namespace from now on, with a ``/proc`` of their own."""
    os.mkdir(HIDDEN, 0o700)
    os.mkdir(HIDDEN + "/proc")
    if libc.mount(b"/proc", (HIDDEN + "/proc").encode(), None, MS_BIND, None):
        raise OSError("keeping the guest's /proc failed")
    if libc.unshare(CLONE_NEWPID):
        raise OSError("making a PID namespace failed")
    told, tell = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
            failed = libc.mount(b"proc", b"/proc", b"proc", flags, None) or _be_nobody(libc)
            # Ignored, also after exec: the kernel then reaps orphans that become this process's
            # children.
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            os.write(tell, b"no" if failed else b"ok")
            if in_image():
                _stay()
            os.execv(FIRST_PROCESS[0], FIRST_PROCESS)  # noqa: S606 - a constant
        finally:
            os._exit(1)
    os.close(tell)
    answer = os.read(told, 2)
    os.close(told)
    if answer != b"ok":
        raise OSError("mounting /proc for programs failed")
    _first.append(pid)
    _proc[0] = HIDDEN + "/proc"


def _be_nobody(libc: Any) -> int:
    """Drop all rights; return 0, or not 0 if that fails."""
    from struct import pack as pack_struct

    os.setgroups([])
    os.setresgid(NOBODYS_ID, NOBODYS_ID, NOBODYS_ID)
    os.setresuid(NOBODYS_ID, NOBODYS_ID, NOBODYS_ID)
    failed: int = libc.capset(pack_struct("=Ii", CAPABILITIES_V3, 0), bytes(24))
    return failed


def _stay() -> None:
    """Do nothing for ever, and hold nothing of the guest's."""
    signal.set_wakeup_fd(-1)
    os.chdir("/")
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))
    while True:
        signal.pause()
