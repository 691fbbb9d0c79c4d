"""Terminals: the foreground process group, input from callers that do not stay, and their end.

Linux tells the holder of a terminal's master which group is in the foreground. gVisor tells only
the programs of the terminal's own session, to which we do not belong: there it is known while the
session has a single group.
"""

from __future__ import annotations

import errno
import os
import signal
from typing import Any, Callable

from k8e.guest.execs import TERM_GRACE, Exec, Execs
from k8e.guest.isolation import is_apart, proc_folder
from k8e.guest.loop import Loop, Timer
from k8e.guest.spawn import START_TIME, kill_session, read_stat, session_members
from k8e.guest.streams import terminal_name
from k8e.guest.wire import CANCEL, RESULT, WireError, pack

TIOCGPGRP = 0x540F
FIONREAD = 0x541B
LONGEST_GRACE = 60.0
UNKNOWN = -1


class Terminals:
    """The operations on execs that have a terminal."""

    def __init__(self, loop: Loop, execs: Execs) -> None:
        self._loop = loop
        self._execs = execs

    def operations(self) -> dict[str, Callable[[Any, dict[str, Any]], None]]:
        return {"foreground": self._foreground, "type": self._type, "dismiss": self._dismiss}

    def _get(self, spec: dict[str, Any]) -> Exec:
        target = self._execs.get(spec)
        _check_terminal(target)
        return target

    def _foreground(self, channel: Any, spec: dict[str, Any]) -> None:
        target = self._get(spec)
        groups = session_groups(target)
        number = foreground_group(target, groups)
        answer = {
            "pid": seen_inside(target.pid) if target.code is None else UNKNOWN,
            "process_group_id": group_inside(number, groups),
            "input_waiting": number in groups and waits_for_input(target, groups[number]),
        }
        channel.send(RESULT, pack(answer))

    def _type(self, channel: Any, spec: dict[str, Any]) -> None:
        """Queue input for the program; answered when it is queued, not when it has been read."""
        self._get(spec).type(bytes(spec["data"]))
        channel.send(RESULT, pack({}))

    def _dismiss(self, channel: Any, spec: dict[str, Any]) -> None:
        grace = min(max(0.0, float(spec.get("grace", TERM_GRACE))), LONGEST_GRACE)
        Dismissal(self._loop, self._execs, self._get(spec), channel).begin(grace)


def _check_terminal(target: Exec) -> None:
    if not target.tty:
        raise OSError(errno.ENOTTY, "the program has no terminal")


# The group in the foreground.


def session_groups(target: Exec) -> dict[int, list[int]]:
    """The processes of a terminal's session by their group, with ids as the guest sees them."""
    groups: dict[int, list[int]] = {}
    if target.code is None:
        for member in session_members(target.pid):
            groups.setdefault(_group_of(member), []).append(member)
    groups.pop(UNKNOWN, None)
    return groups


def _group_of(member: int) -> int:
    try:
        return os.getpgid(member)
    except OSError:
        return UNKNOWN  # it has ended


def foreground_group(target: Exec, groups: dict[int, list[int]]) -> int:
    """The foreground group as the guest sees it; 0 if it has no process: ids are used again."""
    from fcntl import ioctl
    from struct import unpack as unpack_struct

    if target.terminal < 0:
        return UNKNOWN
    try:
        number = int(unpack_struct("i", ioctl(target.terminal, TIOCGPGRP, bytes(4)))[0])
    except OSError:
        number = next(iter(groups)) if len(groups) == 1 else UNKNOWN
    return number if number in groups else UNKNOWN


def waits_for_input(target: Exec, members: list[int]) -> bool:
    """Whether all of these processes sleep, and no input waits that they could read."""
    for member in members:
        found = read_stat(proc_folder(), member)
        if found is None or found[1][0] != "S":
            return False
    return not target.input_held and not _unread_input(target)


def _unread_input(target: Exec) -> int:
    """Bytes that the program could read now; only its own end of the terminal can tell."""
    from fcntl import ioctl
    from struct import unpack as unpack_struct

    flags = os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(terminal_name(target.terminal), flags)
    try:
        return int(unpack_struct("i", ioctl(fd, FIONREAD, bytes(4)))[0])
    finally:
        os.close(fd)


# Ids as programs see them.


def group_inside(number: int, groups: dict[int, list[int]]) -> int:
    if not is_apart() or number not in groups:
        return number
    for member in groups[number]:
        found = read_stat("/proc", seen_inside(member))
        if found is not None:
            return int(found[1][2])
    return UNKNOWN


def seen_inside(number: int) -> int:
    """The id by which programs in the sandbox know a process.

    In gVisor they are in a PID namespace of their own, and nothing translates. So a process is
    recognised by the facts that both views show; equal ones are matched in the order of their ids.
    """
    if not is_apart():
        return number
    look = _look_of(proc_folder(), number)
    ours, theirs = _alike(proc_folder(), look), _alike("/proc", look)
    if look is None or number not in ours or len(ours) != len(theirs):
        return UNKNOWN
    return theirs[ours.index(number)]


def _look_of(folder: str, number: int) -> tuple[Any, ...] | None:
    found = read_stat(folder, number)
    if found is None:
        return None
    comm, fields = found
    return comm, fields[START_TIME], fields[2] == str(number), fields[3] == str(number)


def _alike(folder: str, look: tuple[Any, ...] | None) -> list[int]:
    numbers = sorted(int(name) for name in os.listdir(folder) if name.isdigit())
    return [number for number in numbers if _look_of(folder, number) == look]


# Signals and the end.


def signal_foreground(target: Exec, number: int) -> int:
    """Signal the foreground group; its id is as programs see it.

    Where that group is not known, the terminal itself sends the signal of a key (Ctrl-C), and
    all other signals go to the newest group: nearly always what a shell waits for.
    """
    _check_terminal(target)
    groups = session_groups(target)
    if not groups:
        return UNKNOWN
    group = foreground_group(target, groups)
    if group == UNKNOWN:
        if _press_key(target.terminal, number):
            return UNKNOWN
        group = max(groups)
    shown = group_inside(group, groups)
    os.killpg(group, number)
    return shown


def _press_key(terminal: int, number: int) -> bool:
    """Type the key that makes the terminal send a signal, if it has one."""
    import termios

    keys: dict[int, int] = {
        signal.SIGINT: termios.VINTR,
        signal.SIGQUIT: termios.VQUIT,
        signal.SIGTSTP: termios.VSUSP,
    }
    try:
        settings = termios.tcgetattr(terminal)
        if number not in keys or not settings[3] & termios.ISIG:
            return False
        return os.write(terminal, settings[6][keys[number]]) == 1
    except (OSError, termios.error):
        return False


class Dismissal:
    """Hangs a terminal up, kills processes that stay, forgets it, and answers the caller."""

    def __init__(self, loop: Loop, execs: Execs, target: Exec, channel: Any) -> None:
        self._loop = loop
        self._execs = execs
        self._target = target
        self._channel: Any = channel
        self._grace_over = False
        self._timer: Timer | None = None
        channel.handler = self

    def begin(self, grace: float) -> None:
        target = self._target
        if target.code is not None:
            self._finish()
            return
        if target.status == "running":
            target.status = "killed"
        target.on_exit.append(self._check)
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGCONT):
            kill_session(target.pid, number)
        self._timer = self._loop.later(grace, self._kill)

    def _kill(self) -> None:
        self._grace_over = True
        self._target.kill_now()
        self._check()

    def _check(self) -> None:
        """Finish once the program has ended, and with it the others or their time."""
        if self._target.code is None:
            return
        if self._grace_over or not session_members(self._target.pid):
            self._finish()

    def _finish(self) -> None:
        self._execs.forget(self._target)
        if self._timer is not None:
            self._timer.cancel()
        if self._channel is not None:
            self._channel.send(RESULT, pack({}))
            self._channel.close()
            self._channel = None

    def on_frame(self, kind: int, body: bytes) -> None:
        if kind != CANCEL:
            raise WireError(f"frame {kind} on a dismissal")
        self._channel.close()
        self._channel = None

    def on_lost(self) -> None:
        self._channel = None
