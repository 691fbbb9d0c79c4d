"""Roots of sandboxes that are not the host's own: layers put together by overlayfs, read-only.

On top lies a small layer of ours, with the places that a sandbox mounts things on and the few files
in ``/etc`` that must tell of the sandbox, not of wherever the image was built. Whatever an image
has in these places, such as a link that leads elsewhere, is hidden by it.

    roots/KEY/top    our layer
    roots/KEY/root   where everything is mounted, once for all sandboxes that have the same
    roots/KEY/uses   the layers below, for when this gateway has been restarted
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import shutil
import stat
from pathlib import Path

from k8e import errors
from k8e.images.service import Content, Images
from k8e.runtimes import mounts, rootfs

FOLDERS = (
    "dev etc home opt/k8e/tools proc run/k8e/guest run/k8e/link run/k8e/python run/k8e/slot "
    "sys/devices/system/cpu sys/fs/cgroup tmp var/tmp workspace"
).split()
KEPT = ("hosts", "hostname", "resolv.conf")
"""Files of the host's root that are the same everywhere."""
EMPTY = ("ld.so.preload",)
"""Files in ``/etc`` that would bring an image's code into the guest: its loader reads them."""
MOST_BYTES = 1 << 18  # of an image's passwd or group
SYS_OPENAT2 = 437
RESOLVE_NO_XDEV, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = 1, 2, 4, 8
_libc = ctypes.CDLL(None, use_errno=True)


class Roots:
    """The mounted roots of one host, and which sandbox uses which."""

    def __init__(self, images: Images, folder: Path) -> None:
        self._images = images
        self._folder = folder
        self._users: dict[str, str] = {}

    def prepare(self, users: dict[str, str]) -> None:
        """Find again what sandboxes of an earlier gateway use, and remove what none does."""
        self._images.prepare()
        self._folder.mkdir(parents=True, exist_ok=True)
        for folder in (self._folder.parent, self._folder):
            folder.chmod(0o711)  # sandboxes pass through, to their own root
        mounts.make_private_mount(self._folder)
        self._users = dict(users)
        self.prune()

    def path(self, key: str) -> Path:
        return self._folder / key / "root"

    def take(self, sandbox_id: str, content: Content) -> str:
        """Have the root of this content mounted until the sandbox is gone; its key."""
        key = hashlib.sha256(f"{content.key} {_fingerprint()}".encode()).hexdigest()[:24]
        with self._images.store.lock:
            if not self.path(key).is_mount():  # sure for overlayfs, which is a device of its own
                self._mount(key, content)
            self._users[sandbox_id] = key
        return key

    def free(self, sandbox_id: str) -> None:
        """The sandbox is gone. What it used stays mounted: the next one may want the same."""
        self._users.pop(sandbox_id, None)

    def prune(self) -> list[str]:
        """Unmount what no sandbox uses, then remove the layers of no image; their digests."""
        with self._images.store.lock:
            used: set[Path] = set()
            for folder in self._folder.iterdir():
                if folder.name in self._users.values():
                    used |= _uses(folder)
                else:
                    _remove(folder)
            gone = self._images.store.prune(used)
        self._images.sweep()
        return gone

    def close(self) -> None:
        """Give everything back, if no sandbox needs it."""
        self._images.close()
        if not self._users and self._folder.exists():
            for folder in self._folder.iterdir():
                _remove(folder)
            mounts.unmount(self._folder)

    def _mount(self, key: str, content: Content) -> None:
        folder = self._folder / key
        _remove(folder)
        folder.mkdir()
        (folder / "root").mkdir()
        (folder / "uses").write_text(json.dumps([str(path) for path in content.folders]), "utf-8")
        with contextlib.ExitStack() as opened:
            below = [opened.enter_context(_opened(path)) for path in content.folders]
            _make_top(folder / "top", below)
            top = opened.enter_context(_opened(folder / "top"))
            # By descriptor: no character of a path means anything, and none is too long.
            layers = ":".join(f"/proc/self/fd/{fd}" for fd in [top, *below])
            flags = mounts.MS_RDONLY | mounts.MS_NOSUID | mounts.MS_NODEV
            try:
                mounts.mount(
                    "overlay", folder / "root", "overlay", flags, f"userxattr,lowerdir={layers}"
                )
            except OSError as error:
                raise errors.ImageUnusable(
                    f"the image's layers cannot be put together: {error.strerror}",
                    hint="k8e needs overlayfs in the kernel for roots other than the host's",
                ) from None
        folder.chmod(0o711)


@contextlib.contextmanager
def _opened(folder: Path):
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise errors.ImageNotFound(
            "the image was removed just now", hint="try again; it is fetched again"
        ) from None
    try:
        yield fd
    finally:
        os.close(fd)


def _uses(folder: Path) -> set[Path]:
    try:
        found: list[str] = json.loads((folder / "uses").read_text("utf-8"))
        return {Path(path) for path in found}
    except errors.UNREADABLE:
        return set()


def _remove(folder: Path) -> None:
    mounts.unmount(folder / "root")
    shutil.rmtree(folder, ignore_errors=True)


def _fingerprint() -> str:
    return repr((FOLDERS, EMPTY, sorted(rootfs.FILES.items()), rootfs.LINKS))


# Our layer.


def _make_top(top: Path, below: list[int]) -> None:
    for name in FOLDERS:
        (top / name).mkdir(parents=True)
    for name, target in rootfs.LINKS.items():
        (top / name).symlink_to(target)
    for name in KEPT:
        (top / "etc" / name).write_text(rootfs.FILES[name], "ascii")
    for name in EMPTY:
        (top / "etc" / name).touch()
    for name in ("passwd", "group"):
        theirs = _read(below, f"etc/{name}")
        (top / "etc" / name).write_bytes(merge_users(_ours(name), theirs))
    (top / "etc/mtab").symlink_to("../proc/self/mounts")
    rootfs.open_up(top)


def _ours(name: str) -> bytes:
    """Our lines of a file about users; bash may not be there."""
    return rootfs.FILES[name].replace("/bin/bash", "/bin/sh").encode()


def merge_users(ours: bytes, theirs: bytes) -> bytes:
    """Our lines first, so that they are found, then those of the image with other names."""
    known = {line.partition(b":")[0] for line in ours.splitlines()}
    kept = [
        line
        for line in theirs.splitlines()
        if line.count(b":") >= 3 and line.partition(b":")[0] not in known
    ]
    return ours + b"".join(line + b"\n" for line in kept)


def _read(below: list[int], path: str) -> bytes:
    """A small file of the topmost layer that has it; no link is followed, whoever made it."""
    for layer in below:
        try:
            fd = _open_beneath(layer, path)
        except FileNotFoundError:
            continue
        except OSError:
            return b""
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return b""
            return os.read(fd, MOST_BYTES)
        finally:
            os.close(fd)
    return b""


def _open_beneath(folder: int, path: str) -> int:
    resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    how = (ctypes.c_uint64 * 3)(flags, 0, resolve)
    size = ctypes.c_size_t(ctypes.sizeof(how))
    fd = _libc.syscall(SYS_OPENAT2, folder, path.encode(), ctypes.byref(how), size)
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number or errno.EIO, os.strerror(number), path)
    return fd
