"""Starting programs as the sandbox's unprivileged user.

``posix_spawn`` with RESETIDS keeps vfork, which in gVisor is a third of the cost of a fork. It
drops to the *real* ids, so the guest lends its real ids for the moment of the spawn. That is safe:
the effective and saved ids stay root's, so nobody of that uid may trace the guest, and the kernel
delivers no signal to a PID 1 that has no handler for it. At exec the saved id follows the effective
one, and with no-new-privileges the program cannot get anything back.
"""

from __future__ import annotations

import os
import signal
from typing import Any

UID = 1000
GID = 1000
HOME = "/home/user"
WORKSPACE = "/workspace"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BASE_ENV = {
    "PATH": PATH,
    "HOME": HOME,
    "USER": "user",
    "LOGNAME": "user",
    "LANG": "C.UTF-8",
    "SHELL": "/bin/bash",
}
# Python ignores these two; the programs that it starts must not inherit that.
_DEFAULT_SIGNALS = [signal.SIGPIPE, signal.SIGXFSZ]


class as_user:  # noqa: N801 - read as a statement: `with as_user():`
    """While entered, file access is judged as the sandbox's user."""

    def __enter__(self) -> None:
        os.setresgid(-1, GID, 0)
        os.setresuid(-1, UID, 0)

    def __exit__(self, *_: object) -> None:
        os.setresuid(-1, 0, 0)
        os.setresgid(-1, 0, 0)


def find_program(name: str, path: str, cwd: str) -> str:
    """Where ``execvp`` would find ``name``; the name itself when nowhere."""
    if "/" in name:
        return os.path.join(cwd, name)
    with as_user():
        for folder in path.split(":"):
            candidate = os.path.join(cwd, folder, name)
            if os.access(candidate, os.X_OK, effective_ids=True) and not os.path.isdir(candidate):
                return candidate
    return name


def spawn(argv: list[str], env: dict[str, str], cwd: str, stdio: list[Any]) -> int:
    """Start a program in a session of its own and return its pid; OSError when it cannot start."""
    program = find_program(argv[0], env.get("PATH", PATH), cwd)
    os.setresgid(GID, GID, 0)
    os.setresuid(UID, UID, 0)
    try:
        os.chdir(cwd)
        os.setresuid(UID, 0, 0)
        os.setresgid(GID, 0, 0)
        return os.posix_spawn(
            program,
            argv,
            env,
            file_actions=stdio,
            setsid=True,
            resetids=True,
            setsigmask=(),
            setsigdef=_DEFAULT_SIGNALS,
        )
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)
        os.chdir("/")


def kill_session(pid: int, number: int) -> None:
    """Signal every process of the session that ``pid`` leads, in whatever group it is."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        member = int(name)
        try:
            if member > 1 and os.getsid(member) == pid:
                os.kill(member, number)
        except OSError:
            continue
