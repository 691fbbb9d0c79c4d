"""Large files that are written once, whole or not at all, and read while they may be deleted.

All work on files is done in a thread: one for each open file, so that its steps follow each other
and closing waits for what is under way.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, Self, TypeVar

from k8e.model import new_id

log = logging.getLogger(__name__)

STEP = 2 << 20  # bytes that are read or written at once: each time costs two changes of thread
_SCRATCH = ".part"

P = ParamSpec("P")
T = TypeVar("T")


class _Threaded:
    """A file that one thread works on."""

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
        """Of everything that was written or read so far."""
        return f"sha256:{self._hash.hexdigest()}"


class Writer(_Threaded):
    """A new blob; gone when the block ends, unless somebody said that it is ``kept``."""

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
        """Put it where it can be found, durably."""
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


class Reader(_Threaded):
    """A blob that is read from its beginning; it may be deleted meanwhile."""

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
    """Let a new or vanished name survive a power failure."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sweep(folder: Path, known: set[str]) -> set[str]:
    """Remove what nobody knows, also what is half written; the names that are left."""
    found = {path.name for path in folder.iterdir() if not path.is_dir()}
    for name in found - known:
        try:
            (folder / name).unlink()
        except OSError:  # no reason for a gateway not to start
            log.exception("%s could not be removed", name)
    return found & known
