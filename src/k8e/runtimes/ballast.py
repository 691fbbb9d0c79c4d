"""Blocks of a workspace that its sandbox cannot use, so that its image never grows beyond a bound.

The blocks in use do not bound the size of an image: a program that deletes files and writes new
ones gets other blocks, and those of the deleted files are given back to the disk later, when the
journal is written and the kernel finds the time. So the blocks that a workspace may not have belong
to a file that the sandbox cannot see, its *ballast*. However quickly a sandbox deletes and writes,
it gets the blocks that are left, again and again. The blocks of the ballast hold no data, neither
in the workspace nor in its image.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Generator
from pathlib import Path

from k8e.disk import FULL

_FIEMAP = 0xC020660B
_MAP = struct.Struct("=QQIIII")  # start, length, flags, extents found, room for extents, reserved
_EXTENT = struct.Struct("=QQQ2QI3I")  # logical, physical, length, reserved, flags, reserved
_EXTENTS = 256  # asked for at once
_LAST = 1  # FIEMAP_EXTENT_LAST
_PUNCH = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_HANDLE = struct.Struct("=Ii")  # size and kind of a file handle, which follows
_HANDLE_BYTES = 128
_AT_FDCWD = -100

_libc = ctypes.CDLL(None, use_errno=True)


def find_handle(path: Path) -> bytes:
    """The handle of a file within its file system, whatever part of that is mounted."""
    room = ctypes.create_string_buffer(_HANDLE.size + _HANDLE_BYTES)
    _HANDLE.pack_into(room, 0, _HANDLE_BYTES, 0)
    _check(_libc.name_to_handle_at(_AT_FDCWD, bytes(path), room, ctypes.byref(ctypes.c_int()), 0))
    return room.raw


class Ballast:
    """The ballast of one workspace; not held open, which would keep the workspace mounted."""

    def __init__(self, handle: bytes, *, target: str, image: str, device: int) -> None:
        self._handle = handle
        self._target = target
        self._image = image
        self._device = device
        with self._opened() as fd:
            self.size = os.fstat(fd).st_size
            """Bytes that it takes."""

    def resize(self, size: int) -> None:
        """Take ``size`` bytes, or as much of them as there is."""
        with self._opened() as fd:
            before = os.fstat(fd).st_size
            try:
                if size > before:
                    os.posix_fallocate(fd, before, size - before)
                elif size < before:
                    os.ftruncate(fd, size)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                os.ftruncate(fd, os.fstat(fd).st_size)  # some may be beyond the end
            finally:
                self.size = os.fstat(fd).st_size
            if self.size > before:
                self._give_back(fd, before)

    def _give_back(self, fd: int, start: int) -> None:
        """Give the disk back what its blocks from ``start`` on held, as files of the sandbox."""
        image = os.open(self._image, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            for offset, length in _extents(fd, start):
                _check(
                    _libc.fallocate64(image, _PUNCH, ctypes.c_int64(offset), ctypes.c_int64(length))
                )
        finally:
            os.close(image)

    @contextlib.contextmanager
    def _opened(self) -> Generator[int]:
        mount = os.open(self._target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if os.fstat(mount).st_dev != self._device:  # unmounted, or another's meanwhile
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            fd = _check(
                _libc.open_by_handle_at(mount, self._handle, os.O_RDWR | os.O_CLOEXEC),
            )
        finally:
            os.close(mount)
        try:
            yield fd
        finally:
            os.close(fd)


def _extents(fd: int, start: int) -> Generator[tuple[int, int]]:
    """The positions on its device of a file's bytes from ``start`` on, and the length of each."""
    while True:
        room = bytearray(_MAP.size + _EXTENTS * _EXTENT.size)
        _MAP.pack_into(room, 0, start, (1 << 63) - 1 - start, 0, 0, _EXTENTS, 0)
        fcntl.ioctl(fd, _FIEMAP, room)
        found = _MAP.unpack_from(room)[3]
        if not found:
            return
        for number in range(found):
            logical, physical, length, _, _, flags, *_ = _EXTENT.unpack_from(
                room, _MAP.size + number * _EXTENT.size
            )
            before = max(0, start - logical)
            yield physical + before, length - before
            start = logical + length
            if flags & _LAST:
                return


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
