"""Workspaces with a disk limit: sparse ext4 images, copied from a prepared one and loop-mounted.

Without root on the machine there are no loop devices; a workspace is a file system in memory then.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import subprocess
import threading
from collections.abc import Generator
from pathlib import Path

from k8e import disk, errors
from k8e.runtimes import ballast, mounts
from k8e.runtimes.growth import Growth

log = logging.getLogger(__name__)

_FLAGS = mounts.MS_NOSUID | mounts.MS_NODEV | mounts.MS_NOATIME
# ext4 writes a file out at once when it is renamed over another one, so that a power failure leaves
# the old or the new content. A workspace is not worth that wait: each write of 100 MiB would stand
# in line behind the disk. What is deleted inside is given back to the disk, and inodes that nobody
# uses are not written: a workspace holds as much of the disk as its files do.
_OPTIONS = "noauto_da_alloc,discard,noinit_itable"
# What is in an image: the folder that a sandbox sees, and what its growth is bounded with.
FILES, BALLAST = "files", "ballast"
_LAYOUT = 2  # images of older releases are all files
MKFS_SECONDS = 60
REPAIR_SECONDS = 60
_MENDED = 3  # e2fsck's bits for what was found and repaired; all others mean that it was not
JOURNAL_MIB = 4  # the smallest that ext4 takes
SMALLEST_WITH_JOURNAL = 64 << 20
SIZE_STEP = 64 << 20
BYTES_PER_INODE = 8192  # source trees and node_modules have many small files
LEAST_PER_INODE = 512  # bytes: more inodes than that leave no room for files
KEEP_EMPTY = 16  # prepared images; clients choose sizes, so there may be any number of them


def round_up(size: int) -> int:
    """The actual size of a workspace of ``size``."""
    return size if size <= SIZE_STEP else -(-size // SIZE_STEP) * SIZE_STEP


class Workspaces:
    """The images below one folder, named after their sandboxes."""

    def __init__(
        self, folder: Path, *, in_memory: bool = False, growth: Growth | None = None
    ) -> None:
        """``in_memory`` is for gateways that may not mount images: its size is limited too."""
        self._folder = folder
        self._in_memory = in_memory
        self.growth = growth if growth is not None else Growth(folder)
        self._making = threading.Lock()  # of empty images: two at once would share a scratch file

    def image(self, sandbox_id: str) -> Path:
        return self._folder / f"{sandbox_id}.img"

    def mount(
        self, sandbox_id: str, target: Path, *, size: int, owner: int, inodes: int = 0
    ) -> None:
        """Make the workspace if it does not exist, and mount it with ``owner`` as its owner."""
        if self._in_memory:
            size = round_up(size)
            bounds = f"size={size},nr_inodes={inodes or size // BYTES_PER_INODE},mode=755"
            mounts.mount("k8e-workspace", target, "tmpfs", _FLAGS, bounds)
            os.chown(target, owner, owner)
            return
        image = self.image(sandbox_id)
        if not image.exists():
            _copy_sparse(self._template(size, inodes), image)
        self._mount_image(sandbox_id, target)
        os.chown(target, owner, owner)

    def adopt(self, sandboxes: Path) -> None:
        """Take over workspaces below ``sandboxes`` that an earlier gateway mounted."""
        for point in mounts.mounts_below(sandboxes):
            sandbox_id = point.relative_to(sandboxes).parts[0] if point != sandboxes else ""
            image = self.image(sandbox_id)
            if sandbox_id and image.exists() and os.major(point.stat().st_dev) == mounts.LOOP_MAJOR:
                with contextlib.suppress(OSError):  # one of an older release gives nothing back
                    mounts.mount("", point, "", mounts.MS_REMOUNT | _FLAGS, _OPTIONS)
                self.growth.add(sandbox_id, image, point, self._find_ballast(image, point))

    def replace(
        self, sandbox_id: str, target: Path, *, size: int, owner: int, inodes: int = 0
    ) -> None:
        """Mount an empty workspace of another size in place of an unused one."""
        self.growth.forget(sandbox_id)
        mounts.unmount_top(target)
        self.remove(sandbox_id)
        self.mount(sandbox_id, target, size=size, owner=owner, inodes=inodes)

    def heal(self, sandbox_id: str, target: Path) -> None:
        """Mount a repaired copy in place of a workspace whose file system has failed.

        The kernel lets nothing be written to a file system that it gave up, remounted or not, and
        may still write parts of it out: so the image is copied before e2fsck looks at it, and the
        old one is gone when the last program lets go of it. Nothing may run in the sandbox.
        """
        image = self.image(sandbox_id)
        copy = image.with_suffix(".healed")
        try:
            disk.refuse_if_full(
                self._folder, self.growth.kept() + image.stat().st_blocks * 512, "a repair needs"
            )
            _copy_sparse(image, copy)
            _repair(copy)
            self.growth.forget(sandbox_id)
            mounts.unmount_top(target)
            copy.rename(image)
        finally:
            copy.unlink(missing_ok=True)
        self._mount_image(sandbox_id, target)

    def finish_heal(self, sandbox_id: str, target: Path) -> None:
        """Mount a workspace that a gateway was repairing when it was killed.

        One that is still mounted is the broken one, which is repaired again; one that is not has
        a repaired copy, perhaps already under its own name.
        """
        image = self.image(sandbox_id)
        copy = image.with_suffix(".healed")
        if os.major(target.stat().st_dev) == mounts.LOOP_MAJOR:
            copy.unlink(missing_ok=True)
            return
        if copy.exists():
            copy.rename(image)
        self._mount_image(sandbox_id, target)

    def remove(self, sandbox_id: str) -> None:
        self.growth.forget(sandbox_id)
        image = self.image(sandbox_id)
        for path in (image, image.with_suffix(".tmp"), image.with_suffix(".healed")):
            path.unlink(missing_ok=True)
        _remove_mount(image.with_suffix(".mnt"))

    def in_use(self) -> dict[str, str]:
        """Removed sandboxes whose workspace is still mounted by another program.

        A program that made a mount namespace meanwhile, such as a service of the host, has a copy
        of all mounts in there; the room on the disk is free again when it ends.
        """
        found = mounts.removed_images(self._folder.resolve())
        return {Path(name).stem: device for name, device in found.items()}

    def names(self) -> list[str]:
        """The sandboxes that have an image, including half-copied ones."""
        return sorted({path.stem for path in self._folder.glob("sb-*")})

    def sweep(self) -> None:
        """Remove what a killed gateway left of images that it was making or mounting."""
        for folder in self._folder.glob("*.mnt"):
            _remove_mount(folder)
        for image in self._folder.glob("empty-*.tmp"):
            image.unlink()

    def _mount_image(self, sandbox_id: str, target: Path) -> None:
        """Mount the files of a workspace, without the rest of its image."""
        image = self.image(sandbox_id)
        with _whole(image.with_suffix(".mnt")) as whole:
            mounts.mount_image(image, whole, _FLAGS, _OPTIONS)
            handle = _ballast_of(whole)
            mounts.bind(whole / FILES if handle else whole, target)
        self.growth.add(sandbox_id, image, target, handle)

    def _find_ballast(self, image: Path, target: Path) -> bytes | None:
        """The ballast of a mounted workspace, which is visible only in the whole image."""
        device = f"/dev/loop{os.minor(target.stat().st_dev)}"
        try:
            with _whole(image.with_suffix(".mnt")) as whole:
                mounts.mount(device, whole, "ext4", _FLAGS)
                return _ballast_of(whole)
        except OSError as error:  # its file system has failed, or it is just being removed
            log.warning("the ballast of %s cannot be found: %s", image.name, error)
            return None

    def _template(self, size: int, inodes: int) -> Path:
        """An empty file system to copy; there are few, because sizes are rounded up."""
        size = round_up(size)
        inodes = min(inodes, size // LEAST_PER_INODE)
        name = f"empty-{_LAYOUT}-{size}" + (f"-{inodes}" if inodes else "")
        template = self._folder / f"{name}.ext4"
        with self._making:
            if template.exists():
                os.utime(template)  # what is in use is the last to be forgotten
                return template
            self._folder.mkdir(parents=True, exist_ok=True)
            self._forget_oldest()
            scratch = self._folder / f"{name}.{os.getpid()}.tmp"
            try:
                _make_filesystem(scratch, size, inodes)
                scratch.rename(template)
            finally:
                scratch.unlink(missing_ok=True)
            return template

    def _forget_oldest(self) -> None:
        """Make room for one more."""
        known = sorted(self._folder.glob("empty-*.ext4"), key=lambda path: path.stat().st_mtime)
        for path in known[: max(0, len(known) - KEEP_EMPTY + 1)]:
            path.unlink()


@contextlib.contextmanager
def _whole(folder: Path) -> Generator[Path]:
    """A folder to mount a whole image on for a moment."""
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        yield folder
    finally:
        _remove_mount(folder)


def _remove_mount(folder: Path) -> None:
    if folder.exists():
        mounts.unmount(folder)
        folder.rmdir()


def _ballast_of(whole: Path) -> bytes | None:
    """The handle of the ballast in an image; None in one of an older release.

    All that there is in such a one is its sandbox's, which may have given anything any name.
    """
    for name, kind in ((FILES, stat.S_IFDIR), (BALLAST, stat.S_IFREG)):
        with contextlib.suppress(FileNotFoundError):
            found = (whole / name).lstat()
            if stat.S_IFMT(found.st_mode) == kind and (name == FILES or found.st_uid == 0):
                continue
        return None
    return ballast.find_handle(whole / BALLAST)


def _make_filesystem(image: Path, size: int, inodes: int) -> None:
    with open(image, "wb") as file:
        file.truncate(size)
    argv = ["mkfs.ext4", "-q", "-F", "-m", "0", "-b", "4096"]
    argv += ["-N", str(inodes)] if inodes else ["-i", str(BYTES_PER_INODE)]
    # Without a journal, ext4 does not reuse an inode for a minute, and looks for others one by
    # one: making files again that were deleted gets thirty times slower.
    journal = ["-J", f"size={JOURNAL_MIB}"] if size >= SMALLEST_WITH_JOURNAL else []
    features = "^resize_inode" if journal else "^has_journal,^resize_inode"
    extended = "lazy_itable_init=1,lazy_journal_init=1,nodiscard"
    argv += [*journal, "-O", features, "-E", extended, str(image)]
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    try:
        subprocess.run(
            argv, check=True, capture_output=True, timeout=MKFS_SECONDS, env={"PATH": path}
        )
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", b"") or str(error).encode()
        raise errors.RuntimeUnusable(
            f"making a workspace of {size} bytes failed: {detail.decode(errors='replace').strip()}",
            hint="install e2fsprogs (mkfs.ext4) and check the free space of the data folder",
        ) from None
    with _whole(image.with_suffix(".mnt")) as folder:
        mounts.mount_image(image, folder, _FLAGS)
        with contextlib.suppress(FileNotFoundError):
            (folder / "lost+found").rmdir()  # each may have few inodes
        (folder / FILES).mkdir(mode=0o755)
        (folder / BALLAST).touch(mode=0o600)


def _repair(image: Path) -> None:
    """Replay the journal of a file system, and repair it."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    done = subprocess.run(
        ["e2fsck", "-f", "-y", str(image)],
        capture_output=True,
        timeout=REPAIR_SECONDS,
        env={"PATH": path},
    )
    if done.returncode & ~_MENDED:
        said = done.stderr.decode(errors="replace").strip()
        raise errors.RuntimeUnusable(f"e2fsck cannot repair {image.name}: {said[-200:]}")


def _copy_sparse(source: Path, target: Path) -> None:
    """Copy only data; a gigabyte of empty file system is about a megabyte."""
    scratch = target.with_suffix(".tmp")
    with open(source, "rb") as reader, open(scratch, "wb") as writer:
        size = os.fstat(reader.fileno()).st_size
        writer.truncate(size)
        offset = 0
        while offset < size:
            try:
                start = os.lseek(reader.fileno(), offset, os.SEEK_DATA)
            except OSError:  # ENXIO: only holes from here on
                break
            offset = os.lseek(reader.fileno(), start, os.SEEK_HOLE)
            while start < offset:
                copied = os.copy_file_range(
                    reader.fileno(), writer.fileno(), offset - start, start, start
                )
                if not copied:
                    raise OSError(errno.EIO, "the empty image shrank while it was copied")
                start += copied
    scratch.chmod(0o600)
    scratch.rename(target)
