"""Templates in files: one each, named like its file, read again when the file has changed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from k8e import errors, templates
from k8e.templates import Template


class Stamp(NamedTuple):
    """Changes when somebody changes a file, or puts another in its place."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


def scan(folder: Path) -> dict[str, Stamp]:
    """The templates' files in a folder, by name; nothing where there is no folder.

    Raises:
        OSError: the folder cannot be read.
    """
    found: dict[str, Stamp] = {}
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(templates.ENDINGS) and not entry.name.startswith("."):
                found[entry.name] = _stamp(entry)
    return found


def _stamp(entry: os.DirEntry[str]) -> Stamp:
    try:
        info = entry.stat()
    except OSError:  # a link to nowhere: reading it will say so
        return Stamp(0, 0, 0, 0, 0)
    return Stamp(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def read(path: Path) -> Template:
    """The template in a file; InvalidRequest says what is wrong with it."""
    try:
        data = _content(path)
    except OSError as error:
        what = error.strerror or str(error)
        raise errors.InvalidRequest(f"{path.name}: it cannot be read: {what}") from None
    return templates.parse(templates.load(data, path.name), path.stem, path.name)


def _content(path: Path) -> bytes:
    # Whoever names a pipe like a template shall not make us wait for it.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise errors.InvalidRequest(f"{path.name}: it is not a file")
        # A template can name any path of this machine: nobody else may have a hand in it.
        if info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o022:
            raise errors.InvalidRequest(
                f"{path.name}: others can write to it, so it is not used",
                hint=f"chown it to the gateway's user, and chmod go-w {path.name}",
            )
        return b"".join(_chunks(fd))
    finally:
        os.close(fd)


def _chunks(fd: int) -> Iterator[bytes]:
    left = templates.MAX_FILE + 1
    while left > 0 and (data := os.read(fd, left)):
        left -= len(data)
        yield data
