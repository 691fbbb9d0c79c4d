"""Queries and verification of the audit trail. All of it may take long: call it in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from k8e import errors
from k8e.audit import rows
from k8e.audit.rows import NO_HASH, ChainLink, Filter
from k8e.audit.segments import LONGEST_LINE, segments

BLOCK = 256 << 10  # bytes; between two blocks, other work gets its turn
MAX_PAGE = 4 << 20  # bytes of rows, without the last of them
MAX_READ = 32 << 20  # bytes that are read for one page of what follows
SLACK = 300.0  # seconds that a clock may have been set back
PRUNED = "audit.pruned"
_PRUNED = f'"action":"{PRUNED}"'.encode()
MAX_PROBLEMS = 20
_CURSOR = re.compile(r"([0-9]{1,18}):([0-9]{1,18})")


class Page(NamedTuple):
    """Some rows, as lines, oldest first."""

    lines: list[str]
    cursor: str
    """The cursor with which a query continues after them."""
    more: bool
    """Whether there may be further rows: before them when the newest were asked for, else after."""


class Newest:
    """Finds the newest matching rows, segment by segment."""

    def __init__(self, folder: Path, wanted: Filter, limit: int) -> None:
        self._folder = folder
        self._wanted = wanted
        self._found = _Found(limit)
        self._left: list[Path] | None = None
        self._cursor = ""

    def step(self) -> Page | None:
        """Search one more segment; return the page, once it is complete."""
        if self._left is None:
            self._left = segments(self._folder)
            if self._left:
                newest = self._left[-1]
                self._cursor = f"{int(newest.stem)}:{_whole(newest)}"
        if not self._left:
            return self._page(more=False)
        path, wanted = self._left.pop(), self._wanted
        for line in _lines_backwards(path, wanted.needles()):
            row = rows.parse(line)
            if row is not None and wanted.matches(row) and self._found.add(line):
                return self._page(more=True)
        if wanted.since and _began(path) < wanted.since - SLACK:
            return self._page(more=False)
        return None

    def _page(self, *, more: bool) -> Page:
        return Page(_texts(reversed(self._found.lines)), self._cursor, more=more)


class _Found:
    """Rows for one page, which is bounded by their number and their bytes."""

    def __init__(self, limit: int) -> None:
        self.lines: list[bytes] = []
        self._limit = limit
        self._bytes = 0

    def add(self, line: bytes) -> bool:
        """Add a row; return whether the page is full now."""
        self.lines.append(line)
        self._bytes += len(line)
        return len(self.lines) >= self._limit or self._bytes >= MAX_PAGE


def _lines_backwards(path: Path, needles: list[bytes]) -> Iterator[bytes]:
    """Lines that contain all needles, the last one first."""
    for block in _blocks_backwards(path):
        if all(needle in block for needle in needles):
            for line in reversed(block.splitlines()):
                if all(needle in line for needle in needles):
                    yield line


def following(folder: Path, wanted: Filter, cursor: str, limit: int) -> Page:
    """The matching rows after ``cursor``; an empty cursor means from the oldest on.

    A page may be empty and have more after it: one look reads only so much.
    """
    segment, offset = parse_cursor(cursor)
    found, read = _Found(limit), 0
    needles = wanted.needles()
    for path in segments(folder):
        number = int(path.stem)
        if number < segment:
            continue
        at = offset if number == segment else 0
        for line in _lines(path, at):
            at += len(line) + 1
            read += len(line) + 1
            full = _wanted(line, wanted, needles) is not None and found.add(line)
            if full or read >= MAX_READ:
                return Page(_texts(found.lines), f"{number}:{at}", more=True)
        segment, offset = number, at
    return Page(_texts(found.lines), f"{segment}:{offset}" if segment else "", more=False)


def parse_cursor(cursor: str) -> tuple[int, int]:
    found = _CURSOR.fullmatch(cursor or "0:0")
    if found is None:
        raise errors.InvalidRequest("this is not a cursor", hint="leave it out, and start again")
    return int(found[1]), int(found[2])


def _texts(lines: Iterator[bytes] | list[bytes]) -> list[str]:
    return [line.decode("ascii", "replace") for line in lines]


def _wanted(line: bytes, wanted: Filter, needles: list[bytes]) -> dict[str, Any] | None:
    if not all(needle in line for needle in needles):
        return None
    row = rows.parse(line)
    return row if row is not None and wanted.matches(row) else None


def _whole(path: Path) -> int:
    """The offset up to which a segment consists of whole lines."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - LONGEST_LINE)
        file.seek(start)
        return start + file.read().rfind(b"\n") + 1


def _began(path: Path) -> float:
    """The time of a segment's first row."""
    line = next(_lines(path, 0), b"")
    return float((rows.parse(line) or {}).get("at", 0))


def _blocks_backwards(path: Path) -> Iterator[bytes]:
    """A file from its end, in blocks of whole lines."""
    try:
        file = path.open("rb")
    except FileNotFoundError:  # removed meanwhile
        return
    with file:
        at = file.seek(0, os.SEEK_END)
        rest = b""
        while at > 0:
            size = min(BLOCK, at)
            at -= size
            file.seek(at)
            data = file.read(size) + rest
            cut = data.find(b"\n") + 1 if at else 0
            rest = data[:cut]
            yield data[cut:]


def _lines(path: Path, offset: int) -> Iterator[bytes]:
    """The whole lines of a file from ``offset`` on, without their ends."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(offset)
        rest = b""
        while block := file.read(BLOCK):
            *whole, rest = (rest + block).split(b"\n")
            yield from whole


class Checked(NamedTuple):
    """The result of verifying the chain."""

    rows: int
    first: int
    last: int
    head: str
    problems: list[str]


class _Chain:
    """Rows, checked one after the other."""

    def __init__(self, expected: ChainLink | None, known: ChainLink | None) -> None:
        self.problems: list[str] = []
        self.first: ChainLink | None = None
        self.last = ChainLink(0, "", NO_HASH)
        self.rows = 0
        self._expected = expected
        self._known = known
        self._anchors: dict[int, str] = {}

    def add(self, line: bytes, where: str) -> None:
        found = rows.link(line)
        if found is None:
            self.problems.append(f"{where} has a line that is not a row")
            return
        if not rows.is_whole(line, found):
            self.problems.append(f"row {found.seq} is not what its hash says")
        if self.first is None:
            self.first = found
        elif (found.seq, found.prev) != (self.last.seq + 1, self.last.hash):
            self.problems.append(f"row {found.seq} does not follow row {self.last.seq}")
        if self._expected is not None and found[::2] == self._expected[::2]:
            self._expected = None
        known = self._known
        if known is not None and found.seq == known.seq and found.hash != known.hash:
            self.problems.append(f"row {found.seq} is another one than this gateway wrote")
        if _PRUNED in line:
            self._anchors |= _anchor(line)
        self.last, self.rows = found, self.rows + 1

    def close(self) -> None:
        if len(self.problems) >= MAX_PROBLEMS:
            return  # not all was read
        anchors = {1: NO_HASH, **self._anchors}
        first = self.first
        # The removal that a row announces may be under way or was cut short; then more is there.
        begun = first is not None and any(seq > first.seq for seq in self._anchors)
        if first is not None and not begun and anchors.get(first.seq) != first.prev:
            why = f"rows before {first.seq} are missing, and no row says that they were removed"
            self.problems.append(why)
        if self._expected is not None:
            self.problems.append(f"row {self._expected.seq}, as it was expected, is not there")


class Verifying:
    """A check of every row, segment by segment."""

    def __init__(
        self, folder: Path, expected: ChainLink | None = None, known: ChainLink | None = None
    ) -> None:
        """``expected`` is a row that the caller remembers, ``known`` the last that we wrote."""
        self._folder = folder
        self._chain = _Chain(expected, known)
        self._left: list[Path] | None = None

    def step(self) -> Checked | None:
        """Check one more segment; returns the result after the last one."""
        if self._left is None:
            self._left = segments(self._folder)
        chain = self._chain
        if self._left:
            path = self._left.pop(0)
            for line in _lines(path, 0):
                chain.add(line, path.name)
                if len(chain.problems) >= MAX_PROBLEMS:
                    self._left = []
                    break
            return None
        chain.close()
        first = chain.first.seq if chain.first else 0
        return Checked(chain.rows, first, chain.last.seq, chain.last.hash, chain.problems)


def _anchor(line: bytes) -> dict[int, str]:
    """The start of the trail after older rows were removed, from the row that says so."""
    detail: Any = (rows.parse(line) or {}).get("detail")
    try:
        return {int(detail["first"]): str(detail["prev"])}
    except (KeyError, TypeError, ValueError):
        return {}


MAX_LOOKS = 8  # of one principal at once, including those that wait for rows

T = TypeVar("T")


class Looks:
    """Admits readers one after the other, in the order of their arrival."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._of: Counter[str] = Counter()

    @contextlib.contextmanager
    def by(self, principal: str) -> Generator[None]:
        """Count a look; LimitExceeded if the principal has too many already."""
        if self._of[principal] >= MAX_LOOKS:
            raise errors.LimitExceeded(
                f"{MAX_LOOKS} calls of yours read the audit trail at once",
                hint="let one of them end, and try again",
            )
        self._of[principal] += 1
        try:
            yield
        finally:
            self._of[principal] -= 1
            if not self._of[principal]:
                del self._of[principal]

    async def read(self, function: Callable[..., T], *args: Any) -> T:
        """Do a bounded piece of reading in a thread.

        A caller who leaves does not stop the thread. The next one's turn comes when it has ended:
        otherwise callers that ask and leave would fill the threads that others need.
        """
        await self._turn.acquire()
        work = asyncio.ensure_future(asyncio.to_thread(function, *args))
        work.add_done_callback(self._ended)
        return await asyncio.shield(work)

    def _ended(self, work: asyncio.Future[Any]) -> None:
        self._turn.release()
        if not work.cancelled():
            work.exception()  # the caller was told, or has disconnected
