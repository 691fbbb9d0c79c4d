"""Folders of a user's own, and processes identified by more than their pid."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path

_POSIX = os.open in os.supports_dir_fd
_FOLDER = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


def make_own(folder: Path) -> None:
    """Make a folder, if there is none; OSError if another user made it, or could replace it."""
    # Not by ``parents``, which asks the umask who may write to those.
    for missing in reversed([path for path in folder.parents if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    own = os.geteuid()
    # A link is judged by its own place: its target may be ours, but chosen by another user.
    for path in (folder, *folder.parents):
        found = path.lstat()
        above = path != folder
        if found.st_uid != own and not (above and found.st_uid == 0):
            whose = f"the folder {path}" if above else "it"
            raise PermissionError(f"{whose} belongs to uid {found.st_uid}")
        if above and _is_everybodys(found):
            raise PermissionError(f"every user can replace what is in the folder {path}")
        if above and found.st_uid == 0:
            break  # what is above is the machine's
    if folder.lstat().st_mode & 0o022:
        _refuse_shared(folder)
        folder.chmod(0o700)


def make_with_rights(folder: Path, mode: int, marks: Set[str], early: Set[str]) -> None:
    """Make a folder with the rights ``mode``; OSError if an existing one cannot be used so.

    A folder that is there may be used by others too, such as /tmp. So its rights are changed only
    where it is known to be ours: one of the files ``marks`` is in it, or nothing but files of the
    names ``early``, which are there before we first use it.
    """
    folder.mkdir(mode=mode, parents=True, exist_ok=True)
    info = folder.stat()
    if info.st_uid != os.geteuid():
        raise PermissionError(f"it belongs to uid {info.st_uid}")
    rights = stat.S_IMODE(info.st_mode)
    _refuse_shared(folder)
    names = {path.name for path in folder.iterdir()}
    if names & marks or names <= early:
        if rights != mode:
            folder.chmod(mode)
    elif rights & stat.S_IWGRP:
        raise PermissionError("it is not ours alone, and a group may write to it")
    elif mode & ~rights:
        raise PermissionError(
            f"it is not ours alone, and has the rights {rights:o} where {mode:o} are needed"
        )


def _refuse_shared(folder: Path) -> None:
    """Refuse a folder in which other users have files, or could put some."""
    if folder.stat().st_mode & stat.S_IWOTH and any(folder.iterdir()):
        raise PermissionError("every user may write to it")


def _is_everybodys(found: os.stat_result) -> bool:
    """Whether every user may rename and remove other users' files in a folder."""
    is_open = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IWOTH
    return bool(is_open and not found.st_mode & stat.S_ISVTX)


def open_folder(folder: Path) -> int:
    """A descriptor of a folder, made for its user alone if there is none.

    Root may be asked to write into the home of another user, who can put a link anywhere in it and
    at any moment. So below a folder that is neither root's nor ours no link is followed.
    """
    fd = os.open("/", _FOLDER)
    foreign = False
    try:
        for part in folder.absolute().parts[1:]:
            try:
                below = os.open(part, _FOLDER | (_NO_LINK if foreign else 0), dir_fd=fd)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=fd)
                below = os.open(part, _FOLDER | _NO_LINK, dir_fd=fd)
            os.close(fd)
            fd = below
            foreign = foreign or os.fstat(fd).st_uid not in (0, os.geteuid())
    except BaseException:
        os.close(fd)
        raise
    return fd


def replace_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files that only their owner may read, each all at once, and all or none of them."""
    if not _POSIX:
        _replace_plainly(folder, files)
        return
    fd = open_folder(folder)
    scratches: dict[str, str] = {}
    try:
        for name, data in files.items():
            scratches[name] = f".{name}.{os.urandom(6).hex()}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK | os.O_CLOEXEC
            with open(os.open(scratches[name], flags, 0o600, dir_fd=fd), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        for name in files:
            os.rename(scratches[name], name, src_dir_fd=fd, dst_dir_fd=fd)
            del scratches[name]
    finally:
        for scratch in scratches.values():
            with contextlib.suppress(OSError):
                os.unlink(scratch, dir_fd=fd)
        os.close(fd)


def add_file(path: Path, data: bytes) -> bool:
    """Make a file that only its owner may read, all at once; False if there is one already."""
    fd = open_folder(path.parent)
    scratch = f".{path.name}.{os.urandom(6).hex()}"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK | os.O_CLOEXEC
        with open(os.open(scratch, flags, 0o600, dir_fd=fd), "wb") as file:
            file.write(data)
        try:
            os.link(scratch, path.name, src_dir_fd=fd, dst_dir_fd=fd)
        finally:
            os.unlink(scratch, dir_fd=fd)
    except FileExistsError:
        return False
    finally:
        os.close(fd)
    return True


def _replace_plainly(folder: Path, files: Mapping[str, bytes]) -> None:
    """The same where folders cannot be held open (Windows)."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, data in files.items():
        scratch = folder / f".{name}.{os.urandom(6).hex()}"
        scratch.write_bytes(data)
        scratch.replace(folder / name)


KILL_ROUNDS = 5  # one may start another while it is looked for
MOST_NAMES = 5
KILL_SECONDS = 5.0  # one that has much memory takes a while to end


def start_time(pid: int) -> int:
    """The start time of a process, in kernel ticks; 0 if there is no such process."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
        return int(text.rpartition(")")[2].split()[19])
    return 0


def describe(pids: Iterable[int]) -> str:
    """Processes by the names of their programs, for people: ``2 processes (sh, python3)``."""
    names = [_name(pid) for pid in pids]
    shown = ", ".join(names[:MOST_NAMES]) + (", …" if len(names) > MOST_NAMES else "")
    return f"{len(names)} process{'es' if len(names) != 1 else ''} ({shown})"


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
        return "".join(char if char.isprintable() else "?" for char in text)
    return "unknown"


def end_all(find: Callable[[], Iterable[int]]) -> list[int]:
    """Kill the processes that ``find`` finds until there are none; afterwards all have ended.

    What comes back are those that did not end in time.
    """
    deadline = time.monotonic() + KILL_SECONDS
    for _ in range(KILL_ROUNDS):
        with contextlib.ExitStack() as opened:
            held = {pid: fd for pid in find() if (fd := _hold(pid, opened)) >= 0}
            if not held:
                return []
            # Their pids cannot be reused from here on; before, they could.
            killed = [held[pid] for pid in find() if pid in held]
            for fd in killed:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
            _await_ends(killed, deadline)
        if time.monotonic() > deadline:
            break
    return list(find())


def _hold(pid: int, opened: contextlib.ExitStack) -> int:
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return -1  # it has ended
    opened.callback(os.close, fd)
    return fd


def _await_ends(pidfds: list[int], deadline: float) -> None:
    waiting = select.poll()
    for fd in pidfds:
        waiting.register(fd, select.POLLIN)
    left = len(pidfds)
    while left and (seconds := deadline - time.monotonic()) > 0:
        for fd, _ in waiting.poll(seconds * 1000):
            waiting.unregister(fd)
            left -= 1
