"""Reads and replaces files of others: whole or not at all, with mode and owner, through links."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path
from typing import NamedTuple

from k8e import errors

MAX_SIZE = 64 << 20
PRIVATE = 0o600
PLAIN = 0o644
PRIVATE_FOLDER = 0o700


class Found(NamedTuple):
    """A file as it was when it was read; ``data`` is None if it was not there."""

    path: Path
    """What was asked for; it may be a link."""
    target: Path
    """What is to be replaced."""
    data: bytes | None


def read(path: Path, root: Path | None) -> Found:
    """Read a file. With a ``root`` (a project), it must not lead out of there."""
    target = _target(path, root)
    try:
        if not stat.S_ISREG(target.stat().st_mode):  # before it is opened: a pipe would wait
            raise errors.InvalidRequest(
                f"{path} is not a file", hint="move it away, and run this again"
            )
        with open(target, "rb") as file:
            data = file.read(MAX_SIZE + 1)
    except FileNotFoundError:
        return Found(path, target, None)
    if len(data) > MAX_SIZE:
        raise errors.InvalidRequest(
            f"{path} is larger than {MAX_SIZE >> 20} MiB", hint="add the entry by hand"
        )
    return Found(path, target, data)


def _target(path: Path, root: Path | None) -> Path:
    """Where a path leads. A link stays a link: what it points to is edited."""
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
            f"{path} is a link to {target}, which belongs to somebody else",
            hint="replace the link by a file of your own, and run this again",
        )
    return target


def replace(found: Found, data: bytes, *, private: bool = False) -> list[Path]:
    """Put new content in the place of what was read; which folders had to be made.

    Refuses if somebody changed the file since: an agent that runs writes its own file.
    """
    effective = os.access in os.supports_effective_ids
    if found.data is not None and not os.access(found.target, os.W_OK, effective_ids=effective):
        raise errors.InvalidRequest(
            f"{found.path} is read-only", hint="chmod u+w it if it may be changed"
        )
    made = make_folders(found.target.parent)
    try:
        _replace(found, data, private=private)
    except BaseException:
        remove_folders(made)
        raise
    return made


def _replace(found: Found, data: bytes, *, private: bool) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{found.target.name}.", dir=found.target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            _keep(file.fileno(), found.target, private=private)
            os.fsync(file.fileno())
        if _now(found.target) != found.data:
            raise errors.Conflict(
                f"{found.path} was changed by somebody else in this moment",
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


def make_folders(folder: Path) -> list[Path]:
    """Make a folder and those around it, for the owner of what is there; which were made."""
    missing: list[Path] = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for item in reversed(missing):
        item.mkdir()
        if hasattr(os, "chown"):
            told = item.parent.stat()
            with contextlib.suppress(PermissionError):
                os.chown(item, told.st_uid, told.st_gid)
    return missing


def remove_folders(folders: list[Path]) -> None:
    """Remove folders that are empty, the deepest first."""
    for folder in sorted(folders, key=lambda item: len(item.parts), reverse=True):
        with contextlib.suppress(OSError):
            folder.rmdir()


def write_private(path: Path, data: bytes) -> None:
    """A file of our own that nobody else can read."""
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
