"""Files of the sandbox, read and written inside it, so that the host follows none of its paths.

Everything runs with the rights of the sandbox's user. One thing those rights would not stop is the
guest's own ``/proc/self``: a process may always look at itself, so those paths are refused.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Any

from k8e.guest.loop import Loop
from k8e.guest.spawn import WORKSPACE, as_user
from k8e.guest.wire import (
    CANCEL,
    CHUNK,
    CREDIT,
    CREDIT_BODY,
    DATA,
    END,
    RESULT,
    WINDOW,
    WireError,
    pack,
)

LIST_BATCH = 256
PATH_MAX = 4095  # bytes; a kernel takes no more
UNSIZED_READ = 64 << 20  # bytes read from a file that does not know its size (/proc)
_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
}


def locate(path: Any) -> str:
    """A client's path: absolute, or relative to the workspace."""
    if not isinstance(path, str) or not path:
        raise OSError(errno.EINVAL, "the path is empty")
    if "\0" in path:
        raise OSError(errno.EINVAL, "the path has a NUL byte", path)
    if len(path) > PATH_MAX:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path[:80] + "...")
    return os.path.join(WORKSPACE, path)


def make_folders(path: str) -> None:
    """``os.makedirs``, which would recurse once per folder and so fail on a deep path."""
    missing: list[str] = []
    folder = path.rstrip("/")
    while folder and not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for folder in reversed(missing):
        _make_folder(folder)


def _make_folder(folder: str) -> None:
    try:
        os.mkdir(folder)
    except FileExistsError:
        if not os.path.isdir(folder):  # else somebody was quicker
            raise


def describe_file(path: str, info: os.stat_result) -> dict[str, Any]:
    return {
        "path": path,
        "type": _KINDS.get(stat.S_IFMT(info.st_mode), "other"),
        "size": info.st_size,
        "mode": stat.S_IMODE(info.st_mode),
        "modified_ns": info.st_mtime_ns,
    }


def _open(path: str, flags: int, mode: int = 0o644) -> int:
    """Open as the user, and refuse what is the guest itself."""
    fd = os.open(path, flags | _FLAGS, mode)
    real = os.readlink(f"/proc/self/fd/{fd}")
    if real == "/proc/1" or real.startswith("/proc/1/"):
        os.close(fd)
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)
    return fd


def _open_file(path: str, flags: int) -> tuple[int, os.stat_result]:
    fd = _open(path, flags)
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode):
        return fd, info
    os.close(fd)
    if stat.S_ISDIR(info.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    # A FIFO, socket or device could block for ever or never end.
    raise OSError(errno.EINVAL, "not a regular file", path)


class Download:
    """Sends a file as fast as the reader grants credit."""

    def __init__(self, channel: Any, spec: dict[str, Any]) -> None:
        path = locate(spec.get("path"))
        with as_user():
            self._fd, info = _open_file(path, os.O_RDONLY)
        if spec.get("offset"):
            os.lseek(self._fd, int(spec["offset"]), os.SEEK_SET)
        left = info.st_size - int(spec.get("offset") or 0) if info.st_size else UNSIZED_READ
        length = spec.get("length")
        # Bounded by the size at opening, so that reading a growing file ends.
        self._left = max(0, left if length is None else min(left, int(length)))
        self._credit = int(spec.get("window") or WINDOW)
        self._channel = channel
        channel.handler = self
        channel.send(RESULT, pack(describe_file(path, info)))
        self._pump()

    def on_frame(self, kind: int, body: bytes) -> None:
        if kind == CREDIT:
            self._credit += CREDIT_BODY.unpack(body)[0]
            self._pump()
        elif kind == CANCEL:
            self._finish()
        else:
            raise WireError(f"frame {kind} on a download")

    def on_lost(self) -> None:
        os.close(self._fd)

    def _pump(self) -> None:
        while self._credit > 0:
            try:
                data = os.read(self._fd, min(CHUNK, self._left, self._credit))
            except OSError as error:
                self._channel.fail(error)
                self._finish()
                return
            if not data:
                self._channel.send(END)
                self._finish()
                return
            self._left -= len(data)
            self._credit -= len(data)
            self._channel.send(DATA, data)

    def _finish(self) -> None:
        os.close(self._fd)
        self._channel.close()


class Upload:
    """Takes a file. A new one appears whole or not at all; appending happens in place."""

    def __init__(self, channel: Any, spec: dict[str, Any]) -> None:
        self._path = locate(spec.get("path"))
        if self._path.endswith("/"):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self._path)
        self._scratch: str | None = None
        self._written = 0
        with as_user():
            self._fd = self._create(spec)
        self._channel = channel
        channel.handler = self
        channel.send(RESULT, pack({"window": WINDOW}))

    def _create(self, spec: dict[str, Any]) -> int:
        make_folders(os.path.dirname(self._path))
        if spec.get("append"):
            os.close(_open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
            return _open_file(self._path, os.O_WRONLY | os.O_APPEND)[0]
        # Writing through a link changes what it points to, as any program's write would.
        self._path = os.path.realpath(self._path)
        mode = spec.get("mode")
        try:
            fd, info = _open_file(self._path, os.O_WRONLY)
            os.close(fd)
            mode = stat.S_IMODE(info.st_mode) if mode is None else mode
        except FileNotFoundError:
            pass
        folder, name = os.path.split(self._path)
        self._scratch = os.path.join(folder, f".{name[:200]}.{os.urandom(6).hex()}")
        fd = _open(self._scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        if mode is not None:
            os.fchmod(fd, int(mode) & 0o777)
        return fd

    def on_frame(self, kind: int, body: bytes) -> None:
        try:
            if kind == DATA:
                self._write(body)
            elif kind == END:
                self._commit()
            elif kind == CANCEL:
                self._abort()
            else:
                raise WireError(f"frame {kind} on an upload")
        except OSError as error:
            self._channel.fail(error)
            self._abort()

    def on_lost(self) -> None:
        self._abort()

    def _write(self, body: bytes) -> None:
        view = memoryview(body)
        while view:
            view = view[os.write(self._fd, view) :]
        self._written += len(body)
        if body:
            self._channel.send(CREDIT, CREDIT_BODY.pack(len(body)))

    def _commit(self) -> None:
        if self._scratch:
            with as_user():
                os.rename(self._scratch, self._path)
            self._scratch = None
        self._channel.send(RESULT, pack({"path": self._path, "size": self._written}))
        self._abort()

    def _abort(self) -> None:
        os.close(self._fd)
        self._channel.close()
        if self._scratch:
            try:
                with as_user():
                    os.unlink(self._scratch)
            except OSError:
                pass  # its directory is gone, and the file with it


class Listing:
    """Sends the entries below a directory, some at a time, so that large trees block nobody."""

    def __init__(self, loop: Loop, channel: Any, spec: dict[str, Any]) -> None:
        path = locate(spec.get("path") or WORKSPACE)
        with as_user():
            os.close(_open(path, os.O_RDONLY | os.O_DIRECTORY))
        self._depth = int(spec.get("depth") or 1)
        self._since = int(spec.get("since_ns") or 0)
        self._credit = int(spec.get("window") or WINDOW)
        self._channel = channel
        self._done = False
        channel.handler = self
        channel.send(RESULT, pack({"path": path}))
        self._loop = loop
        self._job = self._walk(path)
        self._parked = False
        loop.add_job(self._job)

    def on_frame(self, kind: int, body: bytes) -> None:
        if kind == CREDIT:
            self._credit += CREDIT_BODY.unpack(body)[0]
            if self._parked:
                self._parked = False
                self._loop.add_job(self._job)
        elif kind == CANCEL:
            self._done = True
            self._channel.close()
        else:
            raise WireError(f"frame {kind} on a listing")

    def on_lost(self) -> None:
        self._done = True

    def _walk(self, top: str) -> Any:
        """A job: yields None to go on in the next turn, False to wait for credit."""
        folders = [(top, 1)]
        batch: list[dict[str, Any]] = []
        while folders and not self._done:
            folder, depth = folders.pop()
            for entry in self._scan(folder):
                if entry["type"] == "dir" and depth < self._depth:
                    folders.append((entry["path"], depth + 1))
                if entry["modified_ns"] > self._since:
                    batch.append(entry)
                if len(batch) >= LIST_BATCH:
                    yield from self._send(batch)
                    batch = []
            yield None
        yield from self._send(batch)
        if not self._done:
            self._channel.send(END)
            self._channel.close()

    def _scan(self, folder: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        with as_user():
            try:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        info = entry.stat(follow_symlinks=False)
                        found.append(describe_file(entry.path, info))
            except OSError:
                pass  # removed or closed to the user while we looked: not there for them
        found.sort(key=lambda item: item["path"])
        return found

    def _send(self, batch: list[dict[str, Any]]) -> Any:
        body = pack(batch)
        while self._credit < len(body) and not self._done:
            self._parked = True
            yield False
        if batch and not self._done:
            self._credit -= len(body)
            self._channel.send(DATA, body)


def get_stat(spec: dict[str, Any]) -> dict[str, Any]:
    path = locate(spec.get("path"))
    with as_user():
        info = os.stat(path) if spec.get("follow") else os.lstat(path)
        entry = describe_file(path, info)
        if entry["type"] == "link":
            entry["target"] = os.readlink(path)
    return entry


def remove_path(spec: dict[str, Any]) -> dict[str, Any]:
    """Remove a file, an empty directory, or with ``recursive`` a tree (links are not followed)."""
    path = locate(spec.get("path"))
    with as_user():
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
        elif spec.get("recursive"):
            from shutil import rmtree

            rmtree(path)
        else:
            os.rmdir(path)
    return {"path": path}


def rename_path(spec: dict[str, Any]) -> dict[str, Any]:
    source, target = locate(spec.get("path")), locate(spec.get("to"))
    with as_user():
        make_folders(os.path.dirname(target))
        os.rename(source, target)
    return {"path": target}


def make_directory(spec: dict[str, Any]) -> dict[str, Any]:
    path = locate(spec.get("path"))
    with as_user():
        if not spec.get("exist_ok", True) and os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        make_folders(path)
    return {"path": path}
