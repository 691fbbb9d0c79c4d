"""Work on whole trees of files, a part in each turn of the loop, so that none blocks others.

As in files.py, everything runs with the rights of the sandbox's user.
"""

from __future__ import annotations

import errno
import os
import stat
from itertools import islice
from typing import Any

from k8e.guest.files import PATH_MAX, describe_file, get_number, locate, open_path
from k8e.guest.isolation import name_of
from k8e.guest.loop import Loop
from k8e.guest.spawn import WORKSPACE, as_user
from k8e.guest.wire import (
    CANCEL,
    CREDIT,
    CREDIT_BODY,
    DATA,
    END,
    RESULT,
    WINDOW,
    WireError,
    pack,
)

SCAN = 256  # entries of a directory per turn
LEVELS = 64  # nested directories that a removal enters
LIST_WINDOW = 64 << 10  # the least room that a reader of a listing must have
# Bytes in one frame; with one more entry still well below half of that window.
LIST_BYTES = 24 << 10
ENTRY_COST = 128  # bytes of an entry beside its path
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TreeJob:
    """A job of the loop for a channel; it ends with the channel at the latest."""

    def __init__(self, loop: Loop, channel: Any, work: Any) -> None:
        self._loop = loop
        self._channel = channel
        self._job = self._run(work)
        channel.handler = self
        loop.add_job(self._job)

    def _run(self, work: Any) -> Any:
        try:
            yield from work
        except Exception as error:
            self._channel.fail(error)
        self._channel.close()

    def on_frame(self, kind: int, body: bytes) -> None:
        if kind != CANCEL:
            raise WireError(f"frame {kind} of {len(body)} bytes on a tree")
        self._job.close()
        self._channel.close()

    def on_lost(self) -> None:
        self._job.close()


class Listing(TreeJob):
    """Sends the entries below a directory as its reader grants credit."""

    def __init__(self, loop: Loop, channel: Any, spec: dict[str, Any]) -> None:
        path = locate(spec.get("path") or WORKSPACE)
        self._depth = get_number(spec, "depth") or 1
        self._since = get_number(spec, "since_ns")
        self._credit = get_number(spec, "window") or WINDOW
        if self._credit < LIST_WINDOW:
            raise OSError(errno.EINVAL, f"window must be {LIST_WINDOW} bytes or more")
        with as_user():
            fd = open_path(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._real = name_of(fd)  # so that no link on the path is followed again for each entry
        except OSError:
            self._real = path
        finally:
            os.close(fd)
        self._parked = False
        channel.send(RESULT, pack({"path": path}))
        super().__init__(loop, channel, self._walk(path))

    def on_frame(self, kind: int, body: bytes) -> None:
        if kind != CREDIT:
            super().on_frame(kind, body)
            return
        self._credit += CREDIT_BODY.unpack(body)[0]
        if self._parked:
            self._parked = False
            self._loop.add_job(self._job)

    def _walk(self, top: str) -> Any:
        """Yields None to go on in the next turn, False to wait for credit."""
        folders = [("", 1)]  # by their paths below the top
        batch: list[dict[str, Any]] = []
        size = 0
        while folders:
            folder, depth = folders.pop()
            for found in _scan(os.path.join(self._real, folder)):
                for entry in found:
                    below = os.path.join(folder, entry["path"])
                    entry["path"] = os.path.join(top, below)
                    if entry["type"] == "dir" and depth < self._depth:
                        folders.append((below, depth + 1))
                    if self._since and entry["modified_ns"] <= self._since:
                        continue
                    batch.append(entry)
                    size += ENTRY_COST + len(os.fsencode(entry["path"]))
                    if size >= LIST_BYTES:
                        yield from self._send(batch)
                        batch, size = [], 0
                yield None
        if batch:
            yield from self._send(batch)
        self._channel.send(END)

    def _send(self, batch: list[dict[str, Any]]) -> Any:
        body = pack(batch)
        while self._credit < len(body):
            self._parked = True
            yield False
        self._credit -= len(body)
        self._channel.send(DATA, body)


def _scan(folder: str) -> Any:
    """The entries of a directory by their names, in sorted batches."""
    try:
        with as_user():
            # By a descriptor: each entry is looked up from here and not from the root.
            fd = open_path(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return  # removed, or closed to the user meanwhile: it does not exist for them
    try:
        with os.scandir(fd) as entries:
            more = True
            while more:
                with as_user():
                    found, more = _describe_some(entries)
                found.sort(key=lambda item: item["path"])
                yield found
    finally:
        os.close(fd)  # entries are looked at by it


def _describe_some(entries: Any) -> tuple[list[dict[str, Any]], bool]:
    """Descriptions of the next entries of a directory, and whether there may be more."""
    try:
        some: list[os.DirEntry[str]] = list(islice(entries, SCAN))
    except OSError:
        return [], False
    described = [_describe_entry(entry) for entry in some]
    return [entry for entry in described if entry is not None], len(some) == SCAN


def _describe_entry(entry: os.DirEntry[str]) -> dict[str, Any] | None:
    try:
        return describe_file(entry.name, entry.stat(follow_symlinks=False))
    except OSError:
        return None  # removed while we looked


class TreeRemoval(TreeJob):
    """Removes a tree, depth first.

    It holds one directory at a time, beside the topmost one, and goes back by ``..``; and it goes
    by names in that directory, never by a path, so that no link leads it elsewhere. gVisor needs a
    descriptor of the machine's for each directory above one that is used, so what lies deeper than
    ``LEVELS`` is first moved up, to the top of the tree.
    """

    def __init__(self, loop: Loop, channel: Any, path: str) -> None:
        self._path = path
        self._fd = self._top = -1
        # Directories that were moved up, with their original paths.
        self._moved: dict[str, str] = {}
        self._folders: list[str] = []  # found in the current directory; the last one is next
        self._more = True  # whether the current directory may have more
        self._above: list[tuple[tuple[int, int], list[str]]] = []  # which directory, its folders
        super().__init__(loop, channel, self._remove())

    def _remove(self) -> Any:
        with as_user():
            self._fd = open_path(self._path, _FOLDER)
        try:
            self._top = os.dup(self._fd)
            while self._take_turn():
                yield None
        except OSError as error:
            error.filename = self._describe(error.filename)
            raise
        finally:
            os.close(self._fd)
            if self._top >= 0:
                os.close(self._top)
        with as_user():
            os.rmdir(self._path)
        self._channel.send(RESULT, pack({"path": self._path}))

    def _describe(self, *last: object) -> str:
        """The original path of a name in the current directory."""
        parts = [folders[-1] for _, folders in self._above]
        if parts:
            parts[0] = self._moved.get(parts[0], parts[0])
        parts += [part for part in last if isinstance(part, str)]
        return os.path.join(self._path, *parts)[:PATH_MAX]

    def _take_turn(self) -> bool:
        """Do a part of the work; False when nothing is left in the tree."""
        budget = SCAN
        with as_user():
            while budget > 0:
                budget -= 1
                if self._folders:
                    self._go_down()
                elif self._more:
                    budget -= self._unlink_some()
                elif self._above:
                    self._go_up()
                else:
                    return False
        return True

    def _unlink_some(self) -> int:
        with os.scandir(self._fd) as entries:
            some = list(islice(entries, SCAN))
        for entry in some:
            if entry.is_dir(follow_symlinks=False):
                self._folders.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=self._fd)
        self._more = len(some) == SCAN
        return len(some)

    def _go_down(self) -> None:
        if len(self._above) >= LEVELS and self._move_up(self._folders[-1]):
            self._folders.pop()
            self._more = True
            return
        identity = self._identity()
        self._enter(self._folders[-1])
        self._above.append((identity, self._folders))
        self._folders = []
        self._more = True

    def _go_up(self) -> None:
        self._enter("..")
        identity, self._folders = self._above.pop()
        self._more = True
        name = self._folders.pop()
        if self._identity() != identity:
            raise OSError(errno.EBUSY, "moved while it was being removed", name)
        os.rmdir(name, dir_fd=self._fd)
        if not self._above:
            self._moved.pop(name, None)

    def _move_up(self, name: str) -> bool:
        """Move a directory to the top of the tree; False if that fails."""
        scratch = f".{os.urandom(8).hex()}"
        where = self._describe(name)[len(self._path) + 1 :]
        try:
            os.rename(name, scratch, src_dir_fd=self._fd, dst_dir_fd=self._top)
        except OSError:
            return False  # perhaps closed to the user; then we see how far we get
        self._moved[scratch] = where
        return True

    def _enter(self, name: str) -> None:
        fd = os.open(name, _FOLDER, dir_fd=self._fd)
        os.close(self._fd)
        self._fd = fd

    def _identity(self) -> tuple[int, int]:
        info = os.fstat(self._fd)
        return info.st_dev, info.st_ino


def remove_path(loop: Loop, channel: Any, spec: dict[str, Any]) -> None:
    """Remove a file, an empty directory, or with ``recursive`` a tree (links are not followed)."""
    path = locate(spec.get("path")).rstrip("/") or "/"
    with as_user():
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
        elif spec.get("recursive"):
            TreeRemoval(loop, channel, path)
            return
        else:
            os.rmdir(path)
    channel.send(RESULT, pack({"path": path}))
