"""Reads and replaces other programs' files: whole or not at all, keeping mode, owner and links.

Root does so with the rights of the user who controls the path (:mod:`k8e.rights`): in a user's home
that is the user, who may plant a link anywhere and at any moment.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path
from typing import NamedTuple

from k8e import errors, rights

MAX_SIZE = 64 << 20
PRIVATE = 0o600
PLAIN = 0o644
PRIVATE_FOLDER = 0o700
_AT_ONCE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)


class FoundFile(NamedTuple):
    """A file as it was when it was read; ``data`` is None if it was not there."""

    path: Path
    """What was asked for; it may be a link."""
    target: Path
    """The file to replace, as it was read."""
    data: bytes | None


def read(path: Path, root: Path | None) -> FoundFile:
    """Read a file. With a ``root`` (a project), it must not lead out of there."""
    with rights.of_master(path):
        return _read(path, root)


def _read(path: Path, root: Path | None) -> FoundFile:
    target = _target(path, root)
    try:
        if not stat.S_ISREG(target.stat().st_mode):  # before it is opened: a pipe would wait
            raise errors.InvalidRequest(
                f"{path} is not a file", hint="move it away, and run this again"
            )
        with open(target, "rb") as file:
            data = file.read(MAX_SIZE + 1)
    except FileNotFoundError:
        return FoundFile(path, target, None)
    if len(data) > MAX_SIZE:
        raise errors.InvalidRequest(
            f"{path} is larger than {MAX_SIZE >> 20} MiB", hint="add the entry by hand"
        )
    return FoundFile(path, target, data)


def _target(path: Path, root: Path | None) -> Path:
    """The target of a path. A link stays a link: the file behind it is edited."""
    target = Path(os.path.realpath(path))
    if root is not None and not target.is_relative_to(os.path.realpath(root)):
        raise errors.InvalidRequest(
            f"{path} leads out of the project, to {target}",
            hint="a project's files should be in the project: replace the link by a file",
        )
    if not path.is_symlink():
        return target
    if not target.exists():
        raise errors.InvalidRequest(
            f"{path} is a link to {target}, which does not exist",
            hint="make that file, or remove the link, and run this again",
        )
    if target.stat().st_uid != path.lstat().st_uid:
        raise errors.InvalidRequest(
            f"{path} is a link to {target}, which belongs to another user",
            hint="replace the link by a file of your own, and run this again",
        )
    return target


def replace(found: FoundFile, data: bytes, *, private: bool = False) -> list[Path]:
    """Replace a file that was read; return the folders that had to be made.

    Refuses if another program changed the file since: an agent that runs writes its own file.
    """
    with rights.of_master(found.path):
        if found.data is not None:
            _check_writable(found)
        made = _make_folders(found.target.parent)
        try:
            _replace(found, data, private=private)
        except BaseException:
            remove_folders(made)
            raise
    return made


def _check_writable(found: FoundFile) -> None:
    """Check by opening it: only the kernel knows with whose rights we are here."""
    try:
        os.close(os.open(found.target, os.O_WRONLY | _AT_ONCE))
    except FileNotFoundError:
        return  # replacing it will fail, and report why
    except OSError:
        raise errors.InvalidRequest(
            f"{found.path} is read-only", hint="chmod u+w it if it may be changed"
        ) from None


def remove(found: FoundFile) -> None:
    """Remove a file that was read, if it still exists."""
    with rights.of_master(found.path):
        found.target.unlink(missing_ok=True)


def _replace(found: FoundFile, data: bytes, *, private: bool) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{found.target.name}.", dir=found.target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            _keep(file.fileno(), found.target, private=private)
            os.fsync(file.fileno())
        if _now(found.target) != found.data:
            raise errors.Conflict(
                f"{found.path} was changed by another program at the same time",
                hint="end the agent that uses it, and run this again",
            )
        os.replace(name, found.target)  # noqa: PTH105 - the same, with one name less
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)  # noqa: PTH108
        raise


def _keep(descriptor: int, target: Path, *, private: bool) -> None:
    """Give the new file the mode and the owner of the old one."""
    if not hasattr(os, "fchown"):
        return  # Windows has neither
    try:
        told = target.stat()
    except FileNotFoundError:
        told = target.parent.stat()  # whose folder it is, whose file it is
        os.fchmod(descriptor, PRIVATE if private else PLAIN)
    else:
        os.fchmod(descriptor, stat.S_IMODE(told.st_mode))
    with contextlib.suppress(PermissionError):  # only root can give files away
        os.fchown(descriptor, told.st_uid, told.st_gid)


def _now(target: Path) -> bytes | None:
    try:
        return target.read_bytes()
    except FileNotFoundError:
        return None


def _make_folders(folder: Path) -> list[Path]:
    """Make a folder and its missing parents for the owner of the place; return the new ones."""
    missing: list[Path] = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for item in reversed(missing):
        item.mkdir()
        _give(item)
    return missing


def _give(folder: Path) -> None:
    """Give a folder that we have just made to the owner of the folder around it.

    By descriptors: what has its name meanwhile may be a link to something else.
    """
    if not hasattr(os, "fchown"):
        return
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    around = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        made = os.open(folder.name, flags, dir_fd=around)
        try:
            told = os.fstat(around)
            with contextlib.suppress(PermissionError):
                os.fchown(made, told.st_uid, told.st_gid)
        finally:
            os.close(made)
    finally:
        os.close(around)


def remove_folders(folders: list[Path]) -> None:
    """Remove folders that are empty, the deepest first."""
    for folder in sorted(folders, key=lambda item: len(item.parts), reverse=True):
        with contextlib.suppress(OSError), rights.of_master(folder):
            folder.rmdir()


def read_private(path: Path) -> bytes:
    """A file of our own."""
    with rights.of_master(path):
        return path.read_bytes()


def remove_private(path: Path) -> None:
    """Remove a file of our own."""
    with rights.of_master(path):
        path.unlink(missing_ok=True)


def write_private(path: Path, data: bytes) -> None:
    """A file that only its owner can read."""
    try:
        with rights.of_master(path.parent):
            _write_private(path, data)
    except PermissionError:
        raise errors.InvalidRequest(
            f"{path} cannot be written with the rights of the owner of {path.parent.parent}",
            hint="give the folders above it to the owner of the home, and run this again",
        ) from None


def _write_private(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)  # noqa: PTH108
        raise
