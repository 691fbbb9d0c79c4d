"""Finding rows, and checking the chain. Everything here may take long: call it in a thread."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from k8e import errors
from k8e.audit import rows
from k8e.audit.files import LONGEST_LINE, segments
from k8e.audit.rows import NO_HASH, Filter, Link

BLOCK = 256 << 10  # bytes; between two of them, others may work
SLACK = 300.0  # seconds that a clock may have been set back
PRUNED = "audit.pruned"
_PRUNED = f'"action":"{PRUNED}"'.encode()
MAX_PROBLEMS = 20
_CURSOR = re.compile(r"([0-9]{1,18}):([0-9]{1,18})")


class Page(NamedTuple):
    """Some rows, as lines, oldest first."""

    lines: list[str]
    cursor: str
    """Where to go on for what comes after them."""
    more: bool
    """Whether there may be further rows: before them when the newest were asked for, else after."""


def newest(folder: Path, wanted: Filter, limit: int) -> Page:
    """The newest rows that are wanted."""
    known = segments(folder)
    cursor = f"{int(known[-1].stem)}:{_whole(known[-1])}" if known else ""
    found: list[bytes] = []
    for path in reversed(known):
        for line in _lines_backwards(path, wanted.needles()):
            row = rows.parse(line)
            if row is not None and wanted.matches(row):
                found.append(line)
            if len(found) == limit:
                return Page(_texts(reversed(found)), cursor, more=True)
        if wanted.since and _began(path) < wanted.since - SLACK:
            break
    return Page(_texts(reversed(found)), cursor, more=False)


def _lines_backwards(path: Path, needles: list[bytes]) -> Iterator[bytes]:
    """Lines that have all needles in them, the last one first."""
    for block in _blocks_backwards(path):
        if all(needle in block for needle in needles):
            for line in reversed(block.splitlines()):
                if all(needle in line for needle in needles):
                    yield line


def following(folder: Path, wanted: Filter, cursor: str, limit: int) -> Page:
    """The rows after ``cursor`` that are wanted; an empty one means from the oldest on."""
    segment, offset = parse_cursor(cursor)
    found: list[bytes] = []
    needles = wanted.needles()
    for path in segments(folder):
        number = int(path.stem)
        if number < segment:
            continue
        at = offset if number == segment else 0
        for line in _lines(path, at):
            at += len(line) + 1
            if _wanted(line, wanted, needles) is not None:
                found.append(line)
            if len(found) == limit:
                return Page(_texts(found), f"{number}:{at}", more=True)
        segment, offset = number, at
    return Page(_texts(found), f"{segment}:{offset}" if segment else "", more=False)


def parse_cursor(cursor: str) -> tuple[int, int]:
    found = _CURSOR.fullmatch(cursor or "0:0")
    if found is None:
        raise errors.InvalidRequest("this is no cursor", hint="leave it away, and begin anew")
    return int(found[1]), int(found[2])


def _texts(lines: Iterator[bytes] | list[bytes]) -> list[str]:
    return [line.decode("ascii", "replace") for line in lines]


def _wanted(line: bytes, wanted: Filter, needles: list[bytes]) -> dict[str, Any] | None:
    if not all(needle in line for needle in needles):
        return None
    row = rows.parse(line)
    return row if row is not None and wanted.matches(row) else None


def _whole(path: Path) -> int:
    """Up to where a segment consists of whole lines."""
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
    """What a check of the chain found."""

    rows: int
    first: int
    last: int
    head: str
    problems: list[str]


class _Chain:
    """Rows, checked one after the other."""

    def __init__(self, expected: Link | None) -> None:
        self.problems: list[str] = []
        self.first: Link | None = None
        self.last = Link(0, "", NO_HASH)
        self.rows = 0
        self._expected = expected
        self._anchors: dict[int, str] = {}

    def add(self, line: bytes, where: str) -> None:
        found = rows.link(line)
        if found is None:
            self.problems.append(f"{where} has a line that is no row")
            return
        if not rows.is_whole(line, found):
            self.problems.append(f"row {found.seq} is not what its hash says")
        if self.first is None:
            self.first = found
        elif (found.seq, found.prev) != (self.last.seq + 1, self.last.hash):
            self.problems.append(f"row {found.seq} does not follow row {self.last.seq}")
        if self._expected is not None and found[::2] == self._expected[::2]:
            self._expected = None
        if _PRUNED in line:
            self._anchors |= _anchor(line)
        self.last, self.rows = found, self.rows + 1

    def close(self) -> None:
        anchors = {1: NO_HASH, **self._anchors}
        first = self.first
        if first is not None and anchors.get(first.seq) != first.prev:
            why = f"rows before {first.seq} are missing, and no row says that they were removed"
            self.problems.append(why)
        if self._expected is not None:
            self.problems.append(f"row {self._expected.seq}, as it was expected, is not there")


def verify(folder: Path, expected: Link | None = None) -> Checked:
    """Check every row; ``expected`` is one that somebody remembers."""
    chain = _Chain(expected)
    for path in segments(folder):
        for line in _lines(path, 0):
            chain.add(line, path.name)
            if len(chain.problems) >= MAX_PROBLEMS:
                break
    chain.close()
    first = chain.first.seq if chain.first else 0
    return Checked(chain.rows, first, chain.last.seq, chain.last.hash, chain.problems)


def _anchor(line: bytes) -> dict[int, str]:
    """Where the trail begins since older rows were removed, as the row about that says."""
    detail: Any = (rows.parse(line) or {}).get("detail")
    try:
        return {int(detail["first"]): str(detail["prev"])}
    except (KeyError, TypeError, ValueError):
        return {}
