"""Other sizes for the folders in memory of a sandbox that runs, from outside of it.

Only for one in which no program of a user's has run. Even so nothing on the way may be a link: the
paths are looked up below the sandbox's own root, by a kernel call that refuses links.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Generator, Iterable

from k8e.processes import start_time
from k8e.runtimes.bundle import MemoryFolder

# The numbers are the same on every architecture of Linux since 5.2.
_FSCONFIG, _FSPICK, _OPENAT2 = 431, 433, 437
_FSPICK_CLOEXEC, _FSPICK_EMPTY_PATH = 0x1, 0x8
_FSCONFIG_SET_STRING, _FSCONFIG_CMD_RECONFIGURE = 1, 7
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x2, 0x4, 0x8
_TMPFS = 0x01021994
_STATFS_BYTES = 512  # more than the structure has anywhere

_libc = ctypes.CDLL(None, use_errno=True)


def resize_folders(pid: int, started: int, folders: Iterable[MemoryFolder]) -> None:
    """Give folders of the sandbox whose first process is ``pid`` their sizes."""
    with _closing(os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
        if start_time(pid) != started:  # the root is another one's, perhaps this host's own
            raise ProcessLookupError(f"process {pid} is not the sandbox's any more")
        for folder in folders:
            with _closing(_open_beneath(root, folder.path.lstrip("/"))) as place:
                _resize(place, folder)


def _open_beneath(root: int, path: str) -> int:
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    resolve = _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH
    how = struct.pack("=QQQ", flags, 0, resolve)
    return _call(path, _OPENAT2, root, path.encode(), how, ctypes.c_size_t(len(how)))


def _resize(place: int, folder: MemoryFolder) -> None:
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(place, found) or struct.unpack_from("=l", found)[0] != _TMPFS:
        raise OSError(f"{folder.path} of the sandbox is no folder in memory")
    flags = _FSPICK_CLOEXEC | _FSPICK_EMPTY_PATH
    with _closing(_call(folder.path, _FSPICK, place, b"", flags)) as picked:
        for option in folder.bounds:
            name, _, value = option.encode().partition(b"=")
            _call(folder.path, _FSCONFIG, picked, _FSCONFIG_SET_STRING, name, value, 0)
        _call(folder.path, _FSCONFIG, picked, _FSCONFIG_CMD_RECONFIGURE, None, None, 0)


def _call(path: str, number: int, *arguments: object) -> int:
    result: int = _libc.syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"resizing failed: {os.strerror(code)}", path)
    return result


@contextlib.contextmanager
def _closing(fd: int) -> Generator[int]:
    try:
        yield fd
    finally:
        os.close(fd)
