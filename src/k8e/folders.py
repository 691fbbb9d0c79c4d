"""Folders that must be a user's own: nobody else may choose what is in them."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
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
    # A link is judged by where it is: its target may be ours, and chosen by somebody else.
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
        folder.chmod(0o700)


def _is_everybodys(found: os.stat_result) -> bool:
    """Whether everybody may rename and remove what others have in a folder."""
    is_open = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IWOTH
    return bool(is_open and not found.st_mode & stat.S_ISVTX)


def open_folder(folder: Path) -> int:
    """A descriptor of a folder, made for its user alone where there is none.

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
    """Write files that only their owner may read, each as a whole, and all or none of them."""
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
    """Make a file that only its owner may read, as a whole; False if there is one already."""
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
