"""Archives of /workspace, made by tar in the sandbox, and the large files that hold them.

Not compressed: gzip -1 in the sandbox halves a usual workspace (17,000 files, 350 MiB), but takes
1.3 times as long in gVisor and ten times as long in a container; and a plain archive cannot grow
while it is unpacked.

All work on files is done in a thread: one for each open file, so that its steps follow each other
and closing waits for what is under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, Self, TypeVar

from k8e import errors
from k8e.model import new_id
from k8e.sessions import exchange
from k8e.sessions.exchange import Feed, Open, ProgramEnd, Tail, Take

TAR = "/usr/bin/tar"
SECONDS = 1800.0  # for packing or unpacking
PACK = [
    TAR,
    "--create",
    "--file=-",
    "--directory=/workspace",
    "--format=posix",  # for times below a second
    "--pax-option=delete=atime,delete=ctime",
    "--numeric-owner",
    "--sparse",
    "--verbose",
    ".",
]
UNPACK = [
    TAR,
    "--extract",
    "--file=-",
    "--directory=/workspace",
    "--preserve-permissions",
    "--no-same-owner",
    "--delay-directory-restore",
    "--warning=no-timestamp",
]
CHANGED = 1
"""tar's exit code where all went well but for files that changed while they were read."""
_FULL = ("No space left on device", "Disk quota exceeded", "Wrote only")
_MAX_LINE = 64 << 10  # a name has 4096 bytes, each of them four characters when it is quoted


class TarListing:
    """Reads tar's listing while it packs: counts the names, and keeps everything else."""

    def __init__(self) -> None:
        self.files = 0
        self.rest = Tail()
        self._line = bytearray()

    def add(self, data: bytes) -> None:
        head, newline, rest = data.rpartition(b"\n")
        if newline:
            self._count(bytes(self._line + head).split(b"\n"))
            self._line.clear()
        # Never copied as a whole: a sandbox may send it byte by byte.
        self._line += rest
        if len(self._line) > 2 * _MAX_LINE:
            del self._line[:-_MAX_LINE]

    def _count(self, lines: list[bytes]) -> None:
        for line in lines:
            if not line.startswith(b"./"):
                self.rest.add(line + b"\n")
            elif not line.endswith(b"/"):  # folders end so, and no name can; newlines are quoted
                self.files += 1


async def pack(
    opening: Open, take: Take, hear: Take, listing: TarListing, *, partly: bool = False
) -> str:
    """Pack the workspace; ``take`` gets the archive, ``hear`` the listing; return a warning or "".

    ``partly`` is for a broken workspace: unreadable files are left out, and reported.
    """

    async def listen(data: bytes) -> None:
        await hear(data)
        listing.add(data)

    with _starting():
        argv = [*PACK[:-1], "--ignore-failed-read", PACK[-1]] if partly else PACK
        ended = await exchange.run(opening, argv, seconds=SECONDS, take=take, hear=listen)
    if ended.code == CHANGED and not ended.timed_out:
        return f"some files changed while they were read: {listing.rest.text()}"
    _check(ended, "packing", listing.rest)
    return f"some files could not be read: {listing.rest.text()}" if listing.rest.text() else ""


async def unpack(opening: Open, feed: Feed) -> None:
    """Unpack an archive into an empty workspace."""
    tail = Tail()
    with _starting():
        ended = await exchange.run(opening, UNPACK, seconds=SECONDS, feed=feed, hear=tail.hear)
    _check(ended, "unpacking", tail)


@contextlib.contextmanager
def _starting() -> Generator[None]:
    try:
        yield
    except exchange.NotStarted as error:
        if error.missing:
            hint = "install tar where its root file system comes from"
            raise errors.ToolFailed(f"the sandbox has no {TAR}", hint=hint) from None
        raise errors.ToolFailed(f"tar cannot be started in the sandbox: {error}") from None


def _check(ended: ProgramEnd, what: str, tail: Tail) -> None:
    if ended.timed_out:
        raise errors.ToolFailed(f"{what} /workspace took longer than {SECONDS:g} s")
    if ended.code:
        text = tail.text()
        if any(words in text for words in _FULL):
            raise errors.LimitExceeded(
                f"the disk of the session is too small: {text}",
                hint="give it more: --disk, like 4G",
            )
        raise errors.ToolFailed(
            f"{what} /workspace failed: tar ended with {ended.code}: {text or 'it said nothing'}",
            hint="a file that its own user cannot read cannot be packed"
            if what == "packing"
            else "",
        )


log = logging.getLogger(__name__)

STEP = 2 << 20  # bytes that are read or written at once: each time costs two changes of thread
_SCRATCH = ".part"

P = ParamSpec("P")
T = TypeVar("T")


class _Threaded:
    """A file with a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="blob")
        self._hash = hashlib.sha256()
        self._fd = -1

    async def __aenter__(self) -> Self:
        try:
            self._fd = await self._do(self._open)
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            # Also if we are cancelled meanwhile; the thread's steps follow each other.
            await asyncio.shield(self._do(self._close))
        finally:
            self._thread.shutdown(wait=False)

    async def _do(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: work(*args, **kwargs))

    def _open(self) -> int:
        raise NotImplementedError

    def _close(self) -> None:
        os.close(self._fd)

    @property
    def digest(self) -> str:
        """The digest of all bytes that were written or read so far."""
        return f"sha256:{self._hash.hexdigest()}"


class Writer(_Threaded):
    """A new blob; removed when the block ends, unless it was marked as ``kept``."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.name = new_id("blob")
        self.size = 0
        self.kept = False
        self._path = folder / self.name
        self._scratch = folder / (self.name + _SCRATCH)
        self._pending: list[bytes] = []
        self._held = 0

    async def write(self, data: bytes) -> None:
        self._pending.append(data)
        self._held += len(data)
        self.size += len(data)
        if self._held >= STEP:
            await self._flush()

    async def commit(self) -> None:
        """Put it under its final name, durably."""
        await self._flush()
        await self._do(self._keep)

    async def _flush(self) -> None:
        pending, self._pending, self._held = self._pending, [], 0
        await self._do(self._write, pending)

    # In the thread.

    def _open(self) -> int:
        return os.open(self._scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def _write(self, parts: list[bytes]) -> None:
        for part in parts:
            self._hash.update(part)
            view = memoryview(part)
            while view:
                view = view[os.write(self._fd, view) :]

    def _keep(self) -> None:
        os.fsync(self._fd)
        self._scratch.rename(self._path)
        sync_folder(self._path.parent)

    def _close(self) -> None:
        super()._close()
        self._scratch.unlink(missing_ok=True)
        if not self.kept:
            self._path.unlink(missing_ok=True)


class BlobReader(_Threaded):
    """Reads a blob from its beginning; the blob may be deleted meanwhile."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.done = 0
        self._path = path
        self._held = memoryview(b"")

    async def read(self, count: int) -> bytes:
        """At most ``count`` bytes; nothing at the end."""
        if not self._held:
            self._held = memoryview(await self._do(self._read))
        data, self._held = bytes(self._held[:count]), self._held[count:]
        self.done += len(data)
        return data

    # In the thread.

    def _open(self) -> int:
        return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def _read(self) -> bytes:
        data = os.read(self._fd, STEP)
        self._hash.update(data)
        return data


def sync_folder(folder: Path) -> None:
    """Make new and removed names survive a power failure."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sweep(folder: Path, known: set[str]) -> set[str]:
    """Remove unknown and half-written blobs; return the names of the others."""
    found = {path.name for path in folder.iterdir() if not path.is_dir()}
    for name in found - known:
        try:
            (folder / name).unlink()
        except OSError:  # no reason for a gateway not to start
            log.exception("%s could not be removed", name)
    return found & known
