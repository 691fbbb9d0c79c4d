"""Files of the sandbox, read and written inside it, so that the host follows none of its paths.

Everything runs with the rights of the sandbox's user. Those rights do not protect the guest's own
``/proc/self``: a process may always read its own, so those paths are refused.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Any

from k8e.guest.isolation import name_of
from k8e.guest.paths import make_folders, open_parent, refuse_guest
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

PATH_MAX = 4095  # bytes; the kernel accepts no more
MAX_INT = (1 << 63) - 1  # bytes per read from a file that does not know its size (/proc)
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
    """A client's path, made absolute: relative paths start in the workspace."""
    if not isinstance(path, str) or not path:
        raise OSError(errno.EINVAL, "the path is empty")
    if "\0" in path:
        raise OSError(errno.EINVAL, "the path has a NUL byte", path)
    if len(path) > PATH_MAX:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path[:80] + "...")
    return os.path.join(WORKSPACE, path)


def get_number(spec: dict[str, Any], key: str, default: int = 0) -> int:
    """A number from a client, checked before anything is opened that would have to be closed."""
    value = spec.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or value < 0:
        raise OSError(errno.EINVAL, f"{key} must be a number from 0 up")
    return value


def describe_file(path: str, info: os.stat_result) -> dict[str, Any]:
    return {
        "path": path,
        "type": _KINDS.get(stat.S_IFMT(info.st_mode), "other"),
        "size": info.st_size,
        "mode": stat.S_IMODE(info.st_mode),
        # A program may date a file to a year that 64 bits of nanoseconds do not reach.
        "modified_ns": max(-MAX_INT, min(info.st_mtime_ns, MAX_INT)),
    }


def open_path(path: str, flags: int, at: int | None = None) -> int:
    """Open as the user; refuse the guest's own files."""
    fd = os.open(path, flags | _FLAGS, 0o644, dir_fd=at)
    try:
        refuse_guest(fd)
    except OSError as error:
        os.close(fd)
        error.filename = path
        raise
    return fd


def _open_file(path: str, flags: int, at: int | None = None) -> tuple[int, os.stat_result]:
    fd = open_path(path, flags, at)
    try:
        info = os.fstat(fd)
        if stat.S_ISDIR(info.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(info.st_mode):
            # A FIFO, socket or device could block for ever or never end.
            raise OSError(errno.EINVAL, "not a regular file", path)
    except BaseException:
        os.close(fd)
        raise
    return fd, info


class Download:
    """Sends a file as fast as the reader grants credit."""

    def __init__(self, channel: Any, spec: dict[str, Any]) -> None:
        path = locate(spec.get("path"))
        offset = get_number(spec, "offset")
        length = get_number(spec, "length", MAX_INT)
        self._credit = get_number(spec, "window") or WINDOW
        with as_user():
            self._fd, info = _open_file(path, os.O_RDONLY)
        try:
            if offset:
                os.lseek(self._fd, offset, os.SEEK_SET)
        except OSError:  # more than the file system can hold
            os.close(self._fd)
            raise
        # Bounded by the size at opening, so that reading a growing file ends.
        left = max(0, info.st_size - offset) if info.st_size else UNSIZED_READ
        self._left = min(left, length)
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
        mode = get_number(spec, "mode", -1)
        self._scratch = ""
        self._folder = -1  # where the scratch file is, and where the file will be
        self._name = ""
        self._written = 0
        try:
            with as_user():
                self._fd = self._append() if spec.get("append") else self._create(mode)
        except OSError as error:
            self._remove_scratch()
            error.filename = self._path
            raise
        self._resolve()
        self._channel = channel
        channel.handler = self
        channel.send(RESULT, pack({"window": WINDOW}))

    def _append(self) -> int:
        make_folders(os.path.dirname(self._path))
        os.close(open_path(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
        return _open_file(self._path, os.O_WRONLY | os.O_APPEND)[0]

    def _create(self, mode: int) -> int:
        make_folders(os.path.dirname(self._path))
        # Writing through a link changes what it points to, as any program's write would.
        self._folder, self._name = open_parent(self._path)
        try:
            fd, info = _open_file(self._name, os.O_WRONLY, self._folder)
            os.close(fd)
            mode = stat.S_IMODE(info.st_mode) if mode < 0 else mode
        except FileNotFoundError:
            pass
        # Fifty characters, since a name may have 255 bytes, and a character four.
        scratch = f".{self._name[:50]}.{os.urandom(6).hex()}"
        fd = open_path(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._folder)
        self._scratch = scratch
        try:
            if mode >= 0:
                os.fchmod(fd, mode & 0o777)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _resolve(self) -> None:
        """The path of the file with all links followed."""
        if self._scratch:
            try:
                self._path = os.path.join(name_of(self._folder), self._name)
            except OSError:
                pass  # longer than a path can be

    def _remove_scratch(self) -> None:
        """Remove the scratch file of an unfinished upload."""
        if self._scratch:
            try:
                with as_user():
                    os.unlink(self._scratch, dir_fd=self._folder)
            except OSError:
                pass  # its directory was removed, and the file with it
        self._scratch = ""
        if self._folder >= 0:
            os.close(self._folder)
        self._folder = -1

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
            if error.filename is not None:  # it gets its name when it is whole
                error.filename, error.filename2 = self._path, None
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
            at = self._folder
            with as_user():
                os.rename(self._scratch, self._name, src_dir_fd=at, dst_dir_fd=at)
            self._scratch = ""
        self._channel.send(RESULT, pack({"path": self._path, "size": self._written}))
        self._abort()

    def _abort(self) -> None:
        os.close(self._fd)
        self._channel.close()
        self._remove_scratch()


def get_stat(spec: dict[str, Any]) -> dict[str, Any]:
    path = locate(spec.get("path"))
    with as_user():
        info = os.stat(path) if spec.get("follow") else os.lstat(path)
        entry = describe_file(path, info)
        if entry["type"] == "link":
            entry["target"] = os.readlink(path)
    return entry


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


def make_link(spec: dict[str, Any]) -> dict[str, Any]:
    """Make a symbolic link, in place of a file or link of that name if there is one."""
    path, target = locate(spec.get("path")), spec.get("target")
    if not isinstance(target, str) or not 0 < len(target) <= PATH_MAX or "\0" in target:
        raise OSError(errno.EINVAL, "the link's target is not a path")
    with as_user():
        folder, name = os.path.split(path)
        make_folders(folder)
        scratch = os.path.join(folder, f".{name[:50]}.{os.urandom(6).hex()}")
        os.symlink(target, scratch)
        try:
            os.rename(scratch, path)
        except OSError:
            os.unlink(scratch)
            raise
    return {"path": path}


def set_mode(spec: dict[str, Any]) -> dict[str, Any]:
    """Change the mode of a file that the user owns."""
    path, mode = locate(spec.get("path")), get_number(spec, "mode", -1)
    if mode < 0:
        raise OSError(errno.EINVAL, "mode is missing")
    with as_user():
        os.chmod(path, mode & 0o777)
    return {"path": path}
