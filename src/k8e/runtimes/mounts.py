"""mount(2), umount(2) and loop devices, without a subprocess."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
from pathlib import Path

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOATIME, MS_BIND = 0x1, 0x2, 0x4, 0x400, 0x1000
MS_REMOUNT = 0x20
LOOP_MAJOR = 7
MS_PRIVATE, MS_SHARED = 1 << 18, 1 << 20
MNT_DETACH = 2
LOOP_CTL_GET_FREE = 0x4C82
LOOP_CONFIGURE = 0x4C0A
LO_FLAGS_AUTOCLEAR = 4
_LOOP_TRIES = 20  # another process may take the free device between asking and using
# struct loop_config: fd, block size, then loop_info64 with the flags at offset 52, then reserved.
_LOOP_INFO_SIZE = 232
_LOOP_FLAGS_AT = 52

_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: Path, kind: str, flags: int, data: str = "") -> None:
    result = _libc.mount(
        source.encode(), bytes(target), kind.encode(), ctypes.c_ulong(flags), data.encode()
    )
    if result:
        number = ctypes.get_errno()
        raise OSError(
            number, f"mounting {kind or source} failed: {os.strerror(number)}", str(target)
        )


def make_private_mount(folder: Path) -> None:
    """Make ``folder`` a mount point whose mounts stay among k8e's own."""
    # os.path.ismount does not see a bind mount within one file system.
    if folder not in mounts_below(folder):
        mount(str(folder), folder, "", MS_BIND)
        mount("", folder, "", MS_PRIVATE)


def make_shared_mount(folder: Path) -> None:
    """Make ``folder`` a mount point that passes later mounts on to its slaves.

    It is a file system of its own, with next to no room: a sandbox can see it.
    """
    flags = MS_NOSUID | MS_NODEV
    mount("k8e-slot", folder, "tmpfs", flags, "size=16k,nr_inodes=8,mode=755")
    mount("", folder, "", MS_SHARED)


def bind(source: Path, target: Path) -> None:
    """Mount the file system of ``source`` on ``target`` too: the same one, not a copy.

    A ``source`` that is a link is refused: a sandbox may have had a hand in it.
    """
    with _opened(source, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW) as folder:
        mount(f"/proc/self/fd/{folder}", target, "", MS_BIND)


def unmount(target: Path) -> None:
    """Unmount everything stacked on ``target``; nothing happens where nothing is mounted."""
    for _ in range(16):
        if not _libc.umount2(bytes(target), 0):
            continue
        number = ctypes.get_errno()
        if number in (errno.EINVAL, errno.ENOENT):
            return
        if number == errno.EBUSY and not _libc.umount2(bytes(target), MNT_DETACH):
            continue
        raise OSError(number, f"unmounting failed: {os.strerror(number)}", str(target))


def unmount_top(target: Path) -> None:
    """Unmount what was mounted last on ``target``, whoever still uses it."""
    if _libc.umount2(bytes(target), MNT_DETACH):
        number = ctypes.get_errno()
        raise OSError(number, f"unmounting failed: {os.strerror(number)}", str(target))


def mounts_below(folder: Path) -> list[Path]:
    """Mount points at and below ``folder``, innermost first."""
    found: list[Path] = []
    prefix = str(folder)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            point = line.split(" ")[4].encode("latin-1", "replace").decode("unicode_escape")
            if point == prefix or point.startswith(prefix + "/"):
                found.append(Path(point))
    return found[::-1]


def mount_image(image: Path, target: Path, flags: int, options: str = "") -> None:
    """Mount an ext4 image through a loop device that frees itself when unmounted."""
    with _opened(image, os.O_RDWR) as backing, _attach_loop(backing) as device:
        mount(device, target, "ext4", flags, options)


def removed_images(folder: Path) -> dict[str, str]:
    """Images of ``folder`` that were removed but are still in use, each with its loop device."""
    found: dict[str, str] = {}
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):  # detached just now
            backing = file.read_text("utf-8", "surrogateescape").rstrip("\n")
            image = Path(backing.removesuffix(" (deleted)"))
            if image.parent == folder and not image.exists():
                found[image.name] = file.parts[3]
    return found


@contextlib.contextmanager
def _opened(path: Path | str, flags: int):
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _attach_loop(backing: int):
    """A loop device for ``backing``; it lives on only if it is mounted while we hold it."""
    config = bytearray(8 + _LOOP_INFO_SIZE + 64)
    struct.pack_into("=II", config, 0, backing, 0)
    struct.pack_into("=I", config, 8 + _LOOP_FLAGS_AT, LO_FLAGS_AUTOCLEAR)
    with _opened("/dev/loop-control", os.O_RDWR) as control:
        for _ in range(_LOOP_TRIES):
            device = f"/dev/loop{fcntl.ioctl(control, LOOP_CTL_GET_FREE)}"
            _make_node(device)
            with _opened(device, os.O_RDWR) as fd:
                try:
                    fcntl.ioctl(fd, LOOP_CONFIGURE, bytes(config))
                except OSError as error:
                    if error.errno == errno.EBUSY:
                        continue
                    raise
                yield device
                return
    raise OSError(errno.EBUSY, "no free loop device")


def _make_node(device: str) -> None:
    """Where no udev runs, the kernel's new loop device has no node yet."""
    with contextlib.suppress(FileExistsError):
        number = int(device.removeprefix("/dev/loop"))
        os.mknod(device, 0o600 | 0o060000, os.makedev(7, number))
