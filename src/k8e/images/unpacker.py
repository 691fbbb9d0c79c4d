"""Unpacks one archive into one folder, which it cannot leave. A program of its own.

Archives are hostile, and may take over the code that reads them. So this runs in namespaces of its
own, with the target as its whole file system, no network, no other process and no capability; that,
and not a check of each path, is why nothing can be written elsewhere.

    unpacker.py FOLDER MAX_BYTES MAX_ENTRIES < archive

It prints one JSON object: what was unpacked, or ``error``. Nothing of k8e is imported: after the
first lines there is no file left to import from.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import os
import resource
import shutil
import signal
import stat
import sys
import tarfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

_zstd: Any
try:
    _zstd = importlib.import_module("compression.zstd")
except ImportError:  # before Python 3.14
    _zstd = None

USER = 1000  # the sandbox's user
CHUNK = 1 << 18
MOST_DEPTH, MOST_NAME = 128, 4000
RESERVE = 256 << 20  # bytes of the disk that are left to others
LEAST_READ = 1 << 20  # of an archive, however little it may unpack
MOST_MEMORY = 1 << 30
MOST_SECONDS = 3600  # of CPU
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CAPABILITY_VERSION = 0x20080522
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41}


class ArchiveRefusal(Exception):
    """The archive is not what it should be; the message says why."""


# Getting confined.


def confine(folder: str, max_bytes: int) -> None:
    """Make ``folder`` the whole file system, and keep no right but that of writing into it."""
    libc = ctypes.CDLL(None, use_errno=True)

    def must(what: str, result: int) -> None:
        if result < 0:
            number = ctypes.get_errno()
            raise ArchiveRefusal(f"the unpacker cannot be confined: {what}: {os.strerror(number)}")

    os.nice(10)  # sandboxes that run have precedence
    os.setgroups([])
    spaces = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    user, group = os.geteuid(), os.getegid()
    must("namespaces", libc.unshare(spaces))
    # Files belong to our own user, who has no meaning in here.
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"0 {user} 1"),
        ("gid_map", f"0 {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)
    must("propagation", libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None))
    place = os.fsencode(folder)
    flags = MS_BIND | MS_NOSUID | MS_NODEV | MS_NOEXEC
    must("folder", libc.mount(place, place, None, ctypes.c_ulong(flags), None))
    os.chdir(folder)
    must("root", libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b"."))
    must("old root", libc.umount2(b".", MNT_DETACH))
    os.chdir("/")
    _continue_as_only_process(libc)
    for limit, value in (
        (resource.RLIMIT_AS, MOST_MEMORY),
        (resource.RLIMIT_CPU, MOST_SECONDS),
        (resource.RLIMIT_FSIZE, max_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(limit, (value, value))
    must("no new privileges", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    header, nothing = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    must("capabilities", libc.capset(header, nothing))
    os.umask(0)


def _continue_as_only_process(libc: Any) -> None:
    """Continue as the first process of the new namespace; the outer one ends as this one does."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    pid = os.fork()
    if pid == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        return
    _, status = os.waitpid(pid, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


# Reading.


class Inflated:
    """The archive without its compression: counted, bounded and hashed on the way."""

    def __init__(self, source: BinaryIO, limit: int) -> None:
        self._pieces = _inflate(source)
        self._limit = limit
        self._held = b""
        self.size = 0
        self.digest = hashlib.sha256()

    def read(self, size: int) -> bytes:
        while len(self._held) < size:
            piece = next(self._pieces, None)
            if piece is None:
                break
            self.size += len(piece)
            if self.size > self._limit:
                raise ArchiveRefusal(f"it has more than {self._limit} bytes when it is unpacked")
            self.digest.update(piece)
            self._held += piece
        data, self._held = self._held[:size], self._held[size:]
        return data

    def drain(self) -> None:
        """Read the bytes behind the archive's end: they are part of the digest."""
        while self.read(CHUNK):
            pass


def _inflate(source: BinaryIO) -> Iterator[bytes]:
    """Decompress in pieces of at most ``CHUNK`` bytes, however small their compressed form is."""
    start = source.read(CHUNK)
    if start.startswith(GZIP):
        yield from _gunzip(source, start)
    elif start.startswith(ZSTD):
        if _zstd is None:
            raise ArchiveRefusal(
                "it is compressed with zstd, which Python reads from 3.14 on; "
                "build the image with gzip layers"
            )
        yield from _unzstd(source, start)
    else:
        while start:
            yield start
            start = source.read(CHUNK)


def _gunzip(source: BinaryIO, pending: bytes) -> Iterator[bytes]:
    while pending.strip(b"\0"):  # one stream may follow another
        decoder = zlib.decompressobj(31)
        while not decoder.eof:
            pending = pending or source.read(CHUNK)
            if not pending:
                yield decoder.flush()
                if decoder.eof:
                    break
                raise ArchiveRefusal("it ends in the middle")
            yield decoder.decompress(pending, CHUNK)
            pending = decoder.unconsumed_tail
        pending = decoder.unused_data or source.read(CHUNK)


def _unzstd(source: BinaryIO, pending: bytes) -> Iterator[bytes]:
    while pending:
        decoder = _zstd.ZstdDecompressor()
        while not decoder.eof:
            if decoder.needs_input and not pending:
                pending = source.read(CHUNK)
                if not pending:
                    raise ArchiveRefusal("it ends in the middle")
            yield decoder.decompress(pending, CHUNK)
            pending = b""
        pending = decoder.unused_data or source.read(CHUNK)


# Writing.


class Unpacker:
    """Writes the members of an archive as files below ``/``."""

    def __init__(
        self, source: Inflated, max_bytes: int, max_entries: int, reserve: int = RESERVE
    ) -> None:
        self._source = source
        self._reserve = reserve
        self._left, self._max_bytes = max_bytes, max_bytes
        self._max_entries = max_entries
        self._parent = ""  # the last one that was found not to be too deep
        self.entries = 0
        self.size = 0
        self.skipped = 0
        """Devices and the like, which nothing in a sandbox could use."""

    def unpack(self) -> None:
        reader: Any = self._source
        with tarfile.open(fileobj=reader, mode="r|", bufsize=CHUNK, errorlevel=2) as archive:
            for member in archive:
                self.entries += 1
                if self.entries > self._max_entries:
                    raise ArchiveRefusal(f"it has more than {self._max_entries} entries")
                self._make(archive, member)
                cast("Any", archive).members.clear()  # or it would remember them all
        self._source.drain()

    def _make(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        path = _safe(member.name)
        if path == "/":
            if member.isdir():
                os.chmod("/", _mode(member))
            return
        parent, name = os.path.split(path)
        if parent != self._parent:
            os.makedirs(parent, 0o755, exist_ok=True)
            _check_depth(parent)
        # An entry that is no file may change where the same names lead.
        self._parent = parent if member.isreg() else ""
        if name == OPAQUE:
            os.setxattr(parent, "user.overlay.opaque", b"y")
        elif name.startswith(WHITEOUT):
            self._hide(parent, name[len(WHITEOUT) :])
        elif member.isdir():
            self._make_folder(path, member)
        elif member.isreg() or member.issym() or member.islnk():
            _clear(path)
            self._make_file(archive, member, path)
        else:
            self.skipped += 1

    def _hide(self, parent: str, name: str) -> None:
        """Leave the mark by which overlayfs hides an entry of a lower layer; our own marks stay."""
        if name in ("", ".", "..") or name.startswith(WHITEOUT):
            self.skipped += 1  # of older tools, about their own files
            return
        path = os.path.join(parent, name)
        if not os.path.lexists(path):
            os.mknod(path, stat.S_IFCHR, 0)

    def _make_folder(self, path: str, member: tarfile.TarInfo) -> None:
        if not stat.S_ISDIR(_kind(path)):
            _clear(path)
            os.mkdir(path)
        os.chmod(path, _mode(member))

    def _make_file(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        if member.issym():
            os.symlink(member.linkname, path)
        elif member.islnk():
            target = _safe(member.linkname)
            if not stat.S_ISREG(_kind(target)) and not stat.S_ISLNK(_kind(target)):
                raise ArchiveRefusal(
                    f"{_shown(member.name)} is a second name of a file that is not there"
                )
            os.link(target, path, follow_symlinks=False)
            return
        else:
            self._write(archive, member, path)
        seconds = max(0.0, min(float(member.mtime), 1e11))
        os.utime(path, (seconds, seconds), follow_symlinks=False)

    def _write(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        self._left -= member.size
        if member.size < 0 or self._left < 0:
            raise ArchiveRefusal(f"its files have more than {self._max_bytes} bytes")
        content = archive.extractfile(member)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb", buffering=0) as file:
            while content is not None and (data := content.read(CHUNK)):
                self.size += len(data)
                _refuse_if_full(self._reserve)
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
            os.fchmod(fd, _mode(member))


def _refuse_if_full(reserve: int) -> None:
    """Refuse, whatever the image may have: others, unpacked at the same time, need the disk."""
    found = os.statvfs("/")
    if found.f_bavail * found.f_frsize < reserve:
        raise ArchiveRefusal("the disk is nearly full")


def _safe(name: str) -> str:
    """An absolute path. In here it cannot lead outside, but an image that tries to is refused."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ArchiveRefusal(f"the path {_shown(name)} leads upwards")
    if len(parts) > MOST_DEPTH or len(name) > MOST_NAME or "\0" in name:
        raise ArchiveRefusal(f"the path {_shown(name)} is too long")
    return "/" + "/".join(parts)


def _check_depth(folder: str) -> None:
    """Links of the archive's own may lead deeper than names: such a tree could not be removed."""
    if os.path.realpath(folder).count("/") > MOST_DEPTH:
        raise ArchiveRefusal(f"the path {_shown(folder)} leads too deep")


def _shown(name: str) -> str:
    return repr(name if len(name) < 100 else name[:97] + "...")


def _kind(path: str) -> int:
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return 0


def _clear(path: str) -> None:
    """Make room for a later entry of the archive with the same name."""
    kind = _kind(path)
    if stat.S_ISDIR(kind):
        shutil.rmtree(path)
    elif kind:
        os.unlink(path)


def _mode(member: tarfile.TarInfo) -> int:
    """The mode, with the rights of the sandbox's user given to all users.

    All files belong to root on the host, and to nobody in the sandbox's user namespace, so that
    only the rights of others count there. Writing needs no right: the root is read-only, and on
    the host no other program should. Nor does a program get rights by being started.
    """
    shift = 6 if member.uid == USER else 3 if member.gid == USER else 0
    others = member.mode >> shift & 0o5
    return (member.mode & 0o700) | (0o700 if member.isdir() else 0o400) | others << 3 | others


def main() -> int:
    folder, (max_bytes, max_entries, reserve) = sys.argv[1], map(int, sys.argv[2:5])
    try:
        confine(folder, max_bytes)
        source = Inflated(sys.stdin.buffer, 2 * max_bytes + LEAST_READ)
        unpacker = Unpacker(source, max_bytes, max_entries, reserve)
        unpacker.unpack()
        told: dict[str, Any] = {
            "diff_id": "sha256:" + source.digest.hexdigest(),
            "size": unpacker.size,
            "entries": unpacker.entries,
            "skipped": unpacker.skipped,
        }
    except ArchiveRefusal as error:
        told = {"error": str(error)}
    except (tarfile.TarError, zlib.error, EOFError) as error:
        told = {"error": f"it is damaged or no tar archive ({error})"}
    except MemoryError:
        told = {"error": "reading it takes too much memory"}
    except (OSError, ValueError, RecursionError) as error:
        told = {"error": f"it cannot be unpacked: {error}"}
    print(json.dumps(told), flush=True)  # noqa: T201 - the answer
    return 0


if __name__ == "__main__":
    sys.exit(main())
