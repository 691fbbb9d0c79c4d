"""Packing and unpacking /workspace, by tar, in the sandbox: the host only moves bytes.

Not compressed: gzip -1 in the sandbox halves a usual workspace (17,000 files, 350 MiB), but takes
1.3 times as long in gVisor and ten times as long in a container; and a plain archive cannot grow
while it is unpacked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from k8e import errors
from k8e.sessions import programs
from k8e.sessions.exchanges import Open
from k8e.sessions.programs import Ended, Feed, Tail, Take

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


class Listing:
    """What tar says while it packs: counts the names, and keeps all else."""

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
    opening: Open, take: Take, hear: Take, listing: Listing, *, partly: bool = False
) -> str:
    """Pack the workspace; ``take`` gets the archive, ``hear`` all else. What is worth a warning.

    ``partly`` is for a workspace that is broken: what cannot be read is left out, and told.
    """

    async def listen(data: bytes) -> None:
        await hear(data)
        listing.add(data)

    with _starting():
        argv = [*PACK[:-1], "--ignore-failed-read", PACK[-1]] if partly else PACK
        ended = await programs.run(opening, argv, seconds=SECONDS, take=take, hear=listen)
    if ended.code == CHANGED and not ended.timed_out:
        return f"some files changed while they were read: {listing.rest.text()}"
    _check(ended, "packing", listing.rest)
    return f"some files could not be read: {listing.rest.text()}" if listing.rest.text() else ""


async def unpack(opening: Open, feed: Feed) -> None:
    """Unpack an archive into an empty workspace."""
    tail = Tail()
    with _starting():
        ended = await programs.run(opening, UNPACK, seconds=SECONDS, feed=feed, hear=tail.hear)
    _check(ended, "unpacking", tail)


@contextlib.contextmanager
def _starting() -> Generator[None]:
    try:
        yield
    except programs.NotStarted as error:
        if error.missing:
            hint = "install tar where its root file system comes from"
            raise errors.ToolFailed(f"the sandbox has no {TAR}", hint=hint) from None
        raise errors.ToolFailed(f"tar cannot be started in the sandbox: {error}") from None


def _check(ended: Ended, what: str, tail: Tail) -> None:
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
