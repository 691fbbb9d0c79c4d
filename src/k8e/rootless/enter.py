"""Moving a process into the holder's namespaces, once, before it does anything else."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path

from k8e import errors, system
from k8e.rootless import cgroup, holder
from k8e.system import start_time

SPACES = {"user": holder.CLONE_NEWUSER, "mnt": holder.CLONE_NEWNS, "ipc": holder.CLONE_NEWIPC}
PR_SET_PDEATHSIG = 1
RELAYED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class NamespaceUser:
    """The identity of a process that is root in a user namespace only."""

    ids: int
    """How many uids and gids there are, from 0 on."""
    name: str
    """Of the holder; no other one of this run of the machine has it."""
    world: Path = Path("/proc/1/ns/net")
    """The network that leads out of the machine, if anything does."""


_outer_pid = 0
_use = -1  # what keeps the holder from ending


def inside() -> NamespaceUser | None:
    """The namespaces of this process; None where it is in none of a holder's.

    Also for children of a process inside.
    """
    return _look() if os.geteuid() == 0 else None


@functools.cache
def _look() -> NamespaceUser | None:
    """Whether the first of our processes is a holder."""
    with contextlib.suppress(OSError, ValueError):
        if Path("/proc/1/cmdline").read_bytes().startswith(holder.NAME.encode() + b"\0"):
            rows = Path("/proc/self/uid_map").read_text("ascii").splitlines()
            space = Path("/proc/self/ns/pid").stat().st_ino
            return NamespaceUser(
                sum(int(row.split()[2]) for row in rows), f"{space}.{start_time(1)}"
            )
    return None


def outer_pid() -> int:
    """The pid of this process for others on the machine."""
    return _outer_pid or os.getpid()


def enter(run_dir: Path, *, detach: bool, shared: bool = True) -> None:
    """Continue as root of the user namespace, in a process of its own.

    The caller becomes the stand-in of the new process outside: it passes signals on and ends as
    that one does. With ``detach`` it ends at once. The network stays that of the machine. Without
    ``shared``, no other process may be in there.
    """
    global _outer_pid, _use
    run_dir = run_dir.absolute()
    try:
        system.make_own(run_dir)
        found, _use = holder.ensure(run_dir, shared=shared)
    except OSError as error:
        raise errors.InvalidRequest(
            f"the folder {run_dir} cannot be used: {error.strerror or error}",
            hint=errors.folder_hint(
                error, "make it writable, or set K8E_RUN_DIR to a folder of yours"
            ),
        ) from None
    cgroup.follow(found.pid)
    place = Path.cwd()
    _join(found)
    with contextlib.suppress(OSError):
        os.chdir(place)
    told, tells = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid:
        os.write(tells, f"{pid}\n".encode())
        if detach:
            os._exit(0)
        _stand_in(run_dir, pid)
    os.close(tells)
    if not detach:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with open(told, "rb") as file:
        _outer_pid = int(file.readline())
        if not detach and _is_alone(told):
            os._exit(128 + signal.SIGKILL)


def leave(run_dir: Path) -> None:
    """Let the namespaces end if no other process or sandbox is left in them; we end with them."""
    global _use
    use, _use = _use, -1
    holder.leave(run_dir, use)


def _is_alone(told: int) -> bool:
    """Whether our stand-in ended before the kernel was told to signal us then."""
    waiting = select.poll()
    waiting.register(told, select.POLLIN)
    return bool(waiting.poll(0))


def _join(found: holder.Holder) -> None:
    opened: list[tuple[int, int]] = []
    spaces = {**SPACES, "pid": holder.CLONE_NEWPID}
    try:
        for name, flag in spaces.items():
            path = f"/proc/{found.pid}/ns/{name}"
            opened.append((os.open(path, os.O_RDONLY | os.O_CLOEXEC), flag))
        for fd, flag in opened:
            if _libc.setns(fd, flag):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
            if flag == holder.CLONE_NEWUSER:
                holder.become_root()
    except OSError as error:
        raise errors.RuntimeUnusable(
            f"the namespaces of this user's gateway cannot be entered: {error.strerror}",
            hint=f"end the process {found.pid} ({holder.NAME}), and its sandboxes with it",
        ) from None
    finally:
        for fd, _ in opened:
            os.close(fd)


def _stand_in(run_dir: Path, pid: int) -> None:
    """Wait for the process inside, as its stand-in, then end as it did."""
    global _use
    os.close(_use)  # the process inside has it too, and uses it
    _use = -1
    for number in RELAYED:
        signal.signal(number, lambda received, _: os.kill(pid, received))
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    # While its pid is still its own: signals from now on have no receiver.
    for number in RELAYED:
        signal.signal(number, signal.SIG_IGN)
    _, status = os.waitpid(pid, 0)
    leave(run_dir)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)
