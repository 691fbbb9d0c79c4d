"""Events of many sessions as one list, in pages: the newest first page, then older ones.

Files are read one at a time, the newest first, and no more of them than a page needs.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from k8e import errors

_PLACE = re.compile(rb'^\{"at":([0-9]{1,12}\.[0-9]{6}),"seq":([0-9]{1,18}),')
_CURSOR = re.compile(r"([0-9]{1,12}\.[0-9]{6})/([0-9a-z-]{1,64})/([0-9]{1,18})")


class Place(NamedTuple):
    """Where an event belongs among those of all sessions."""

    at: float
    name: str
    """Of its file, which only decides between events of the same microsecond."""
    seq: int

    def cursor(self) -> str:
        return f"{self.at:.6f}/{self.name}/{self.seq}"


class Page(NamedTuple):
    """Some events, oldest first."""

    lines: list[str]
    cursor: str
    """Where the next page, of older events, ends; empty if there is none."""


def parse_cursor(text: str) -> Place | None:
    """Where a page ends; None for the newest page."""
    if not text:
        return None
    found = _CURSOR.fullmatch(text)
    if found is None:
        raise errors.InvalidRequest(
            "this is not a cursor of events", hint="pass what the page before it gave as cursor"
        )
    return Place(float(found[1]), found[2], int(found[3]))


def read_page(paths: Iterable[Path], count: int, before: Place | None) -> Page:
    """The newest ``count`` events of all files that are older than ``before``."""
    dated = sorted(((_modified(path), path) for path in paths), reverse=True)
    found: list[tuple[Place, bytes]] = []  # a heap: the oldest is first
    more = False
    for modified, path in dated:
        if len(found) > count and modified < found[0][0].at:
            break  # all that follow are older than what was found
        for item in _events(path, before):
            heapq.heappush(found, item)
            if len(found) > count + 1:  # one more, to know whether there are more
                heapq.heappop(found)
    if len(found) > count:
        more = True
        heapq.heappop(found)
    found.sort()
    lines = [line.decode("ascii", "replace") for _, line in found]
    return Page(lines, found[0][0].cursor() if more and found else "")


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _events(path: Path, before: Place | None) -> Iterable[tuple[Place, bytes]]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    name = path.stem
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        told = _PLACE.match(line)
        if told is None:
            continue
        place = Place(float(told[1]), name, int(told[2]))
        if before is not None and place >= before:
            continue
        yield place, line
