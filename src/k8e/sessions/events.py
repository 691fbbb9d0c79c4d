"""Events of sessions, for people and audits: a file of JSON lines for each, read in pages.

A file is named after the
session's sandbox, which has an id that is never used twice: a later session with the same id gets
none of these events. Each event is one ``write(2)``, so a gateway that is killed loses none.
Numbers go up by one: what begins above 1 was cut, and a gap is an event that could not be written
(a full disk), which the log tells too.

Files are read one at a time, the newest first, and no more of them than a page needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import heapq
import logging
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from k8e import disk, errors
from k8e.json_lines import MAX_LINE, to_json
from k8e.model import Session

_PLACE = re.compile(rb'^\{"at":([0-9]{1,12}\.[0-9]{6}),"seq":([0-9]{1,18}),')
_CURSOR = re.compile(r"([0-9]{1,12}\.[0-9]{6})/([0-9a-z-]{1,64})/([0-9]{1,18})")


class EventPosition(NamedTuple):
    """The position of an event among those of all sessions."""

    at: float
    name: str
    """Of its file, which only decides between events of the same microsecond."""
    seq: int

    def cursor(self) -> str:
        return f"{self.at:.6f}/{self.name}/{self.seq}"


class EventPage(NamedTuple):
    """Some events, oldest first."""

    lines: list[str]
    cursor: str
    """Where the next page, of older events, ends; empty if there is none."""


def parse_cursor(text: str) -> EventPosition | None:
    """The position where a page ends; None for the newest page."""
    if not text:
        return None
    found = _CURSOR.fullmatch(text)
    if found is None:
        raise errors.InvalidRequest(
            "this is not a cursor of events", hint="pass what the page before it gave as cursor"
        )
    return EventPosition(float(found[1]), found[2], int(found[3]))


def read_page(paths: Iterable[Path], count: int, before: EventPosition | None) -> EventPage:
    """The newest ``count`` events of all files that are older than ``before``."""
    dated = sorted(((_modified(path), path) for path in paths), reverse=True)
    found: list[tuple[EventPosition, bytes]] = []  # a heap: the oldest is first
    more = False
    for modified, path in dated:
        if len(found) > count and modified < found[0][0].at:
            break  # all that follow are older than those that were found
        for item in _events(path, before):
            heapq.heappush(found, item)
            if len(found) > count + 1:  # one more, to know whether there are more
                heapq.heappop(found)
    if len(found) > count:
        more = True
        heapq.heappop(found)
    found.sort()
    lines = [line.decode("ascii", "replace") for _, line in found]
    return EventPage(lines, found[0][0].cursor() if more and found else "")


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _events(path: Path, before: EventPosition | None) -> Iterable[tuple[EventPosition, bytes]]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    name = path.stem
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        told = _PLACE.match(line)
        if told is None:
            continue
        place = EventPosition(float(told[1]), name, int(told[2]))
        if before is not None and place >= before:
            continue
        yield place, line


log = logging.getLogger(__name__)

MAX_BYTES = 1 << 20  # of one session's file; then its older half is dropped
DEFAULT_LIMIT = 500
MAX_LIMIT = 10_000
REMEMBERED = 256  # execs of one session that have ended …
UNFINISHED = 4096  # … and that have not
Observer = Callable[[Session, str, dict[str, Any], dict[str, Any] | None], None]
"""Gets the session, the kind, the fields, and the call of a client, where that says more."""
_ENVELOPE = frozenset(("at", "seq", "kind", "session_id"))
_SEQ = re.compile(rb'^\{"at":[0-9.]+,"seq":([0-9]{1,18}),')
# Quotes inside of texts are escaped, so no text can look like this.
_EXEC = re.compile(rb'"kind":"exec\.(started|finished)","session_id":"[^"]*","exec_id":"([^"]*)"')


class Log:
    """The file of one session, open for appending."""

    def __init__(self, path: Path) -> None:
        self.seq = 0
        self.execs: dict[str, bool] = {}
        """The newest execs, and whether each has ended."""
        self._path = path
        self._fd = -1
        self._size = 0
        try:
            self._begin()
        except OSError as error:  # the next write reports it again, or finds it repaired
            log.error("%s cannot be opened: %s", path.name, error)

    def _begin(self) -> None:
        self._fd = _open(self._path)
        self._size = os.fstat(self._fd).st_size
        if self._size:
            self._recover()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def _recover(self) -> None:
        """Find out where an earlier gateway stopped; half a line does not count."""
        data = os.pread(self._fd, self._size, 0)
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._fd, whole)
            self._size = whole
        if whole:
            last = data[data.rfind(b"\n", 0, whole - 1) + 1 : whole]
            self.seq = max(self.seq, _seq(last))
        for state, exec_id in _EXEC.findall(data, 0, whole):
            self.remember(exec_id.decode("ascii", "replace"), ended=state == b"finished")

    def remember(self, exec_id: str, *, ended: bool) -> None:
        self.execs[exec_id] = ended
        if len(self.execs) > REMEMBERED:
            # The end of a running exec is still to be noted, however many began after it.
            over = next((known for known, done in self.execs.items() if done), None)
            if over is not None or len(self.execs) > UNFINISHED:
                del self.execs[over or next(iter(self.execs))]

    def add(self, session_id: str, kind: str, fields: dict[str, Any]) -> None:
        """Add an event, whole or not at all."""
        self.seq += 1
        if self._fd < 0:
            self._begin()
        line = _line(self.seq, session_id, kind, fields)
        if self._size + len(line) > MAX_BYTES:
            self._drop_older_half()
        while (written := _append(self._fd, line)) < len(line):
            os.ftruncate(self._fd, self._size)
            if not disk.give_way():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += written

    def _drop_older_half(self) -> None:
        data = os.pread(self._fd, self._size, 0)
        newer = data[data.find(b"\n", self._size // 2) + 1 or len(data) :]
        scratch = self._path.with_suffix(".tmp")
        scratch.unlink(missing_ok=True)
        fd = _open(scratch)
        try:
            if os.write(fd, newer) < len(newer):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            scratch.rename(self._path)
        except OSError:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd, self._size = fd, len(newer)


class Events:
    """The events of all sessions of a gateway; used on its event loop alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Log] = {}  # of live sessions, by sandbox
        self._ahead: dict[str, Log] = {}  # of the sandboxes that wait for one
        self._reading = asyncio.Lock()  # when many files are read, one is read at a time
        self.observers: list[Observer] = []
        """Told of every event, and of what is none; the audit trail is one."""
        self.gates: list[Callable[[], None]] = []
        """Asked before something begins that leaves events; each may refuse it."""

    # Writing.

    def admit(self) -> None:
        """Refuse an operation that is about to begin, if its events could not be written down."""
        for gate in self.gates:
            gate()

    def write(self, session: Session, kind: str, /, **fields: Any) -> None:
        """Note that something happened in a session: ``write(session, "file.written", path=…)``.

        ``kind`` is a constant like ``noun.verb``. Texts are cut at 1 KiB, lists at 32 items. Never
        pass values of environment variables, contents of files or input. It does not fail: a disk
        that is full must not stop operations that make room.
        """
        if not _ENVELOPE.isdisjoint(fields):
            raise TypeError(f"an event has {', '.join(sorted(_ENVELOPE))} already")
        self._write(session, kind, fields)

    def tell(self, session: Session, kind: str, /, **fields: Any) -> None:
        """Tell observers of something that is not among the events that its owner reads."""
        for observe in self.observers:
            observe(session, kind, fields, None)

    def _write(
        self,
        session: Session,
        kind: str,
        fields: dict[str, Any],
        call: dict[str, Any] | None = None,
    ) -> None:
        for observe in self.observers:
            observe(session, kind, fields, call)
        opened = self._open.get(session.sandbox_id)
        try:
            if opened is not None:
                opened.add(session.session_id, kind, fields)
                return
            # The session does not live here, so no one would say when to close its file.
            with contextlib.closing(Log(self._path(session.sandbox_id))) as opened:
                opened.add(session.session_id, kind, fields)
        except OSError as error:
            log.error("event %s of session %s is lost: %s", kind, session.session_id, error)

    # Execs.

    def exec_started(
        self, session: Session, exec_id: str, call: dict[str, Any] | None = None, **fields: Any
    ) -> None:
        """Note the start of an exec, unless it runs already and a second client joins it.

        One that was seen before and has ended is noted ``again``: its guest gives the same result
        once more, or, if it has forgotten it, runs it.
        """
        opened = self._open.get(session.sandbox_id)
        if opened is not None:
            known = opened.execs.get(exec_id)
            if known is False:
                return
            opened.remember(exec_id, ended=False)
            if known:
                fields["again"] = True
        self._write(session, "exec.started", {"exec_id": exec_id, **fields}, call)

    def exec_finished(self, session: Session, exec_id: str, **fields: Any) -> bool:
        """Note the end of an exec, once; False if it was noted or never began."""
        opened = self._open.get(session.sandbox_id)
        if opened is None or opened.execs.get(exec_id, True):
            return False
        opened.execs[exec_id] = True
        self._write(session, "exec.finished", {"exec_id": exec_id, **fields})
        return True

    def exec_failed(self, session: Session, exec_id: str, error: str) -> bool:
        """Note that an exec did not start, or that its sandbox is gone; False if that was noted."""
        opened = self._open.get(session.sandbox_id)
        first = self.exec_finished(session, exec_id, status="failed", error=error)
        if first and opened:
            del opened.execs[exec_id]  # it can be tried again
        return first

    def seq(self, session: Session) -> int:
        """The number of the newest event of a live session."""
        opened = self._open.get(session.sandbox_id)
        return opened.seq if opened is not None else 0

    def has_started(self, session: Session, exec_id: str, after: int) -> bool:
        """Whether there is an event ``exec.started`` of this exec that is newer than ``after``."""
        lines, _ = _newest(self._path(session.sandbox_id), MAX_LIMIT)
        started = f'"kind":"exec.started","session_id":"{session.session_id}","exec_id":"{exec_id}"'
        return any(started in line and _seq(line.encode()) > after for line in lines)

    def unfinished(self, session: Session) -> list[str]:
        """The execs whose end was not noted."""
        opened = self._open.get(session.sandbox_id)
        return [exec_id for exec_id, ended in opened.execs.items() if not ended] if opened else []

    # Lives.

    def expect(self, sandbox_id: str) -> None:
        """Prepare the file of a waiting sandbox, so that its session need not wait for it."""
        self._ahead[sandbox_id] = Log(self._path(sandbox_id))

    def expect_no_more(self, sandbox_id: str) -> None:
        """Remove the file of a sandbox that ends without a session."""
        waiting = self._ahead.pop(sandbox_id, None)
        if waiting is not None:
            waiting.close()
            self._path(sandbox_id).unlink(missing_ok=True)

    def begin(self, session: Session) -> None:
        """Keep the file of a session open that lives in this gateway."""
        waiting = self._ahead.pop(session.sandbox_id, None)
        self._open[session.sandbox_id] = waiting or Log(self._path(session.sandbox_id))

    def end(self, session: Session, reason: str) -> None:
        """Close the file of a session that is over."""
        if session.sandbox_id not in self._open:  # it died with the gateway before us
            self.begin(session)
        for exec_id in self.unfinished(session):
            self.exec_failed(session, exec_id, "sandbox_died")
        self.write(session, "session.ended", reason=reason)
        self._close(session.sandbox_id)

    def forget(self, sandbox_id: str) -> None:
        """Remove the events of a session that can no longer be asked about."""
        self._close(sandbox_id)
        self._path(sandbox_id).unlink(missing_ok=True)

    def start(self, known: Iterable[str]) -> None:
        """Make the folder; remove files of sandboxes that are not ``known``."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        kept = {self._path(sandbox_id).name for sandbox_id in known}
        for path in self._folder.iterdir():
            if path.name not in kept:
                with contextlib.suppress(OSError):  # perhaps a folder of another program
                    path.unlink()

    def close(self) -> None:
        for sandbox_id in list(self._ahead):
            self.expect_no_more(sandbox_id)
        for sandbox_id in list(self._open):
            self._close(sandbox_id)

    def _close(self, sandbox_id: str) -> None:
        opened = self._open.pop(sandbox_id, None)
        if opened is not None:
            opened.close()

    def _path(self, sandbox_id: str) -> Path:
        # Searches for the remains of a sandbox, by its id, do not mean this file.
        return self._folder / f"{sandbox_id.removeprefix('sb-')}.jsonl"

    # Reading.

    async def read(self, session: Session, limit: int = 0) -> tuple[list[str], bool]:
        """The newest events as lines of JSON, oldest first, and whether there were older ones."""
        count = min(limit or DEFAULT_LIMIT, MAX_LIMIT)
        return await asyncio.to_thread(_newest, self._path(session.sandbox_id), count)

    async def read_all(
        self, sandboxes: Iterable[str], limit: int = 0, cursor: str = ""
    ) -> EventPage:
        """The newest events of many sessions; with the cursor of a page, those before it."""
        before = parse_cursor(cursor)
        paths = [self._path(sandbox_id) for sandbox_id in sandboxes]
        count = min(limit or DEFAULT_LIMIT, MAX_LIMIT)
        async with self._reading:
            return await asyncio.to_thread(read_page, paths, count, before)


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path, flags, 0o600)


def _append(fd: int, line: bytes) -> int:
    """Write a line; return how many bytes were written, which a full disk makes fewer."""
    try:
        return os.write(fd, line)
    except OSError as error:
        if error.errno not in disk.FULL:
            raise
        return 0


def _seq(line: bytes) -> int:
    found = _SEQ.match(line)
    return int(found[1]) if found else 0


def _newest(path: Path, count: int) -> tuple[list[str], bool]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], False
    lines = data[: data.rfind(b"\n") + 1].splitlines()[-count:]
    return [line.decode("ascii", "replace") for line in lines], bool(lines) and _seq(lines[0]) > 1


def _line(seq: int, session_id: str, kind: str, fields: dict[str, Any]) -> bytes:
    head = f'{{"at":{time.time():.6f},"seq":{seq},"kind":"{kind}","session_id":"{session_id}"'
    if not fields:
        return f"{head}}}\n".encode("ascii")
    rest = ",".join([f'"{key}":{to_json(value)}' for key, value in fields.items()])
    if len(rest) > MAX_LINE:
        rest = '"cut":true'
    return f"{head},{rest}}}\n".encode("ascii")
