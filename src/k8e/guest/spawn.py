"""Starting programs as the sandbox's unprivileged user.

Nothing here forks: vfork costs a third of that in gVisor. A vforked child can only inherit its
ids, or drop to the *real* ones (``posix_spawn`` with RESETIDS), so the guest lends its ids for the
moment of the spawn. That is safe: the saved id stays root's, so nobody of the user's uid may trace
the guest, and the kernel delivers no signal to a PID 1 that has no handler for it (in gVisor,
apart.py sees to that). At exec the saved id follows the effective one, and with no-new-privileges
the program cannot get anything back.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from typing import Any, Callable

from k8e.guest.apart import first_process, name_of, proc_folder
from k8e.guest.plain import plain_words
from k8e.guest.stock import STOCK

UID = 1000
GID = 1000
HOME = "/home/user"
WORKSPACE = "/workspace"
# Programs of ours that a root file system need not have: last, so that its own are found first.
TOOLS = "/run/k8e/guest/bin"
# Late what pip installs: looking into a folder of the user's costs every start before it.
PATH = (
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:" + HOME + "/.local/bin:" + TOOLS
)
BASE_ENV = {
    "PATH": PATH,
    "HOME": HOME,
    "USER": "user",
    "LOGNAME": "user",
    "LANG": "C.UTF-8",
    "SHELL": "/bin/bash",
    # The system's packages are read-only here, so pip cannot break them; its cache would be memory.
    "PIP_BREAK_SYSTEM_PACKAGES": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_CACHE_DIR": "1",
}
# Looking through PATH costs a tenth of a start in gVisor. Nobody in the sandbox can change these.
STEADY = ("/usr/", "/bin/", "/sbin/")
_REMEMBERED = 5.0  # seconds
_LOOKING = 1.0  # seconds of CPU time; PATH may have thousands of folders, each behind links
_MOST_PROGRAMS = 1000
_programs: dict[str, tuple[bool, float]] = {}
_ENCODING = (sys.getfilesystemencoding(), sys.getfilesystemencodeerrors())  # as os.fsencode's
_KILL_ROUNDS = 50
# Python ignores these two; the programs that it starts must not inherit that.
_DEFAULT_SIGNALS = [signal.SIGPIPE, signal.SIGXFSZ]
# fork_exec is private to Python: its last arguments where we know them (whether to use vfork).
_FORK_EXEC_EXTRA = {(3, 11): (True,), (3, 12): (True,), (3, 13): (True,), (3, 14): ()}


class as_user:  # noqa: N801 - read as a statement: `with as_user():`
    """While entered, file access is judged as the sandbox's user."""

    def __enter__(self) -> None:
        os.setresgid(-1, GID, 0)
        os.setresuid(-1, UID, 0)

    def __exit__(self, *_: object) -> None:
        os.setresuid(-1, 0, 0)
        os.setresgid(-1, 0, 0)


def find_program(name: str, path: str, cwd: str, *, lent: bool = False) -> str:
    """Where ``execvp`` would find ``name``; ``lent`` if we have the user's ids at the moment."""
    if "/" in name:
        return os.path.join(cwd, name)
    now = time.monotonic()
    candidates = [os.path.join(cwd, folder, name) for folder in path.split(":")]
    for number, candidate in enumerate(candidates):
        known, until = _programs.get(candidate, (False, 0.0))
        if now >= until:
            if lent:
                return _look_for(name, candidates[number:], now)
            with as_user():
                return _look_for(name, candidates[number:], now)
        if known:
            return candidate
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def _look_for(name: str, candidates: list[str], now: float) -> str:
    """The first that the user may execute; what is in the host's folders is remembered."""
    until = time.process_time() + _LOOKING
    for path in candidates:
        if time.process_time() > until:
            raise OSError(errno.ETIMEDOUT, "looking through PATH takes too long", name)
        found = os.access(path, os.X_OK, effective_ids=True) and not os.path.isdir(path)
        if path.startswith(STEADY):
            if len(_programs) >= _MOST_PROGRAMS:
                _programs.clear()
            _programs[path] = (found, now + _REMEMBERED)
        if found:
            return path
    # Where no file can be opened any more, none seems to be there: then this says so.
    os.close(os.open("/usr", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def spawn(argv: list[str], env: dict[str, str], cwd: str, stdio: list[int]) -> int:
    """Start a program in a session of its own and return its pid; OSError when it cannot start."""
    words = plain_words(argv)
    if words and "PWD" not in env:
        try:
            return _spawn(words, dict(env, PWD=_real_folder(cwd)), cwd, stdio)
        except OSError:
            pass  # let the shell say why
    return _spawn(argv, env, cwd, stdio)


def _real_folder(cwd: str) -> str:
    """What a shell makes PWD."""
    if cwd.rstrip("/") == WORKSPACE:
        return WORKSPACE
    with as_user():
        fd = os.open(cwd, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return name_of(fd)
    finally:
        os.close(fd)


def _spawn(argv: list[str], env: dict[str, str], cwd: str, stdio: list[int]) -> int:
    """Start exactly this.

    By what ``subprocess`` is built on: glibc's ``posix_spawn`` sets 63 signal handlers with two
    calls each, which in gVisor takes as long as a quarter of everything else.
    """
    extra = _FORK_EXEC_EXTRA.get(sys.version_info[:2])
    if extra is None:
        actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(stdio)]
        return spawn_by_actions(argv, env, cwd, actions)
    from _posixsubprocess import fork_exec

    environment = [(name + "=" + value).encode(*_ENCODING) for name, value in env.items()]
    streams = (stdio[0], -1, -1, stdio[1], -1, stdio[2])
    error, report = STOCK.take_report()
    try:
        os.setresgid(GID, GID, 0)
        os.setresuid(UID, UID, 0)
        try:
            program = find_program(argv[0], env.get("PATH", PATH), cwd, lent=True)
            # No descriptors need closing, since all of ours are close-on-exec; then: restore
            # signals, new session, and no process group, ids, umask or function of its own.
            options: tuple[Any, ...] = (True, True, -1, None, None, None, -1, None, *extra)
            programs = (os.fsencode(program),)
            pid: int = fork_exec(
                argv, programs, False, (), cwd, environment, *streams, error, report, *options
            )
        finally:
            os.setresuid(0, 0, 0)
            os.setresgid(0, 0, 0)
        os.close(report)
        report = -1
        told = os.read(error, 256)
    finally:
        os.close(error)
        if report >= 0:
            os.close(report)
    if told:
        # As in subprocess.py: a class, a number in hexadecimal, and where it happened.
        _, number, where = told.split(b":", 2)
        code = int(number, 16)
        raise OSError(code, os.strerror(code), cwd if where.startswith(b"noexec") else program)
    return pid


def spawn_by_actions(argv: list[str], env: dict[str, str], cwd: str, actions: list[Any]) -> int:
    """``spawn`` for what only file actions can do, and for Pythons that we do not know."""
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
            file_actions=actions,
            setsid=True,
            resetids=True,
            setsigmask=(),
            setsigdef=_DEFAULT_SIGNALS,
        )
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)
        os.chdir("/")


def session_members(pid: int) -> list[int]:
    """Every process of the session that ``pid`` leads, in whatever group it is."""
    return [number for number in _all_processes() if _session_of(number) == pid]


def _all_processes() -> list[int]:
    """All but the guest."""
    numbers = [int(name) for name in os.listdir(proc_folder()) if name.isdigit()]
    return [number for number in numbers if number > 1]


def _session_of(number: int) -> int:
    try:
        return os.getsid(number)
    except OSError:
        return -1  # it has ended


def kill_session(pid: int, number: int) -> None:
    """Signal every process of the session that ``pid`` leads."""
    for member in session_members(pid):
        _send_signal_to(member, number)


def kill_others(spared: Callable[[int], bool]) -> None:
    """Kill every process but the guest, the first one beside it, and those that are ``spared``."""
    first = first_process()
    killed: set[int] = set()
    for _ in range(_KILL_ROUNDS):  # one that was about to fork has a child by now
        found = [pid for pid in _all_processes() if pid != first and not spared(pid)]
        if killed.issuperset(found):
            return
        for pid in found:
            _send_signal_to(pid, signal.SIGKILL)
        killed.update(found)
    raise OSError(errno.EAGAIN, "programs that were there before the session do not end")


def _send_signal_to(member: int, number: int) -> None:
    try:
        os.kill(member, number)
    except OSError:
        pass  # it has ended
