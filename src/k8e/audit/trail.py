"""The audit trail of a gateway: writing rows, counting floods, changes without a row yet.

If a gateway is killed while a change is under way, a file of the change stays, and the next gateway
makes a row of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from k8e import access, errors
from k8e._version import __version__
from k8e.audit import act as audit_act
from k8e.audit import query, segments
from k8e.audit.act import Act, AuditCaller
from k8e.audit.query import Checked, Looks, Page
from k8e.audit.rows import ALLOWED, DENIED, AuditRow, ChainLink, Filter
from k8e.audit.segments import SegmentWriter
from k8e.json_lines import long_text, to_json
from k8e.model import Session

WINDOW = 60.0  # seconds
BURST = 20  # rows of one kind in a window; further ones are counted
GROUP_BURST = 500  # rows of a whole group of kinds
MAX_KINDS = 4096

Kind = tuple[str, ...]


@dataclass
class _Count:
    began: float
    rows: int = 0
    more: int = 0


class Folding:
    """Counts by kind; the kind that began longest ago is forgotten first."""

    def __init__(self) -> None:
        self._counts: OrderedDict[Kind, _Count] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    def admit(self, kind: Kind, now: float, group: Kind | None = None) -> bool:
        """Whether this one gets a row of its own; otherwise it is counted.

        Kinds that can be of any number belong to a ``group``, which has a bound too; further rows
        are counted for the group.
        """
        count = self._counts.get(kind)
        if count is not None and count.rows >= BURST:
            count.more += 1
            return False
        if group is not None:
            whole = self._counts.setdefault(group, _Count(now))
            if whole.rows >= GROUP_BURST:
                whole.more += 1
                return False
            whole.rows += 1
        if count is None:
            count = self._counts[kind] = _Count(now)
        count.rows += 1
        return True

    def over(self, now: float) -> Iterator[tuple[Kind, int]]:
        """Kinds whose window has ended, or that are surplus, each with its count."""
        while self._counts:
            kind, count = next(iter(self._counts.items()))
            if now < count.began + WINDOW and len(self._counts) <= MAX_KINDS:
                return
            del self._counts[kind]
            if count.more:
                yield kind, count.more


log = logging.getLogger(__name__)

FOLDER = "pending"
MAX_BYTES = 64 << 10


class Begun(NamedTuple):
    """A change that began, and may have ended."""

    act: Act
    action: str
    detail: dict[str, str]


class PendingChanges:
    """The changes of one trail."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER

    @contextlib.contextmanager
    def during(self, begun: Begun) -> Generator[None]:
        """Remember a change while the block runs, which writes its row.

        It does not fail, as rows do not: a full disk must not stop callers that could make room.
        """
        path = self._folder / f"{time.time_ns():020d}-{os.urandom(4).hex()}"
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            _write(path, json.dumps([begun.act.caller, begun.action, begun.detail]).encode())
        except OSError as error:
            log.error("nothing would tell of %s after a crash: %s", begun.action, error)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def left(self) -> Iterator[Begun]:
        """The unfinished changes of the gateway before; each is forgotten when handled."""
        paths = sorted(self._folder.iterdir()) if self._folder.is_dir() else []
        for path in paths:
            found = _read(path)
            if found is not None:  # else it was being written, and nothing had begun
                yield found
            path.unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if os.write(fd, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(fd)


def _read(path: Path) -> Begun | None:
    try:
        with path.open("rb") as file:
            told: Any = json.loads(file.read(MAX_BYTES))
        (principal, via, peer), action, detail = told
        texts = {str(name): json.dumps(json.loads(value)) for name, value in detail.items()}
        return Begun(Act(AuditCaller(str(principal), str(via), str(peer)), ""), str(action), texts)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None


CONTENTS = ("commands", "hashes", "all")
"""How commands and code are stored: commands as text and code as hash, both as hash, or both as
text."""
MAX_CODE = 8 << 10  # bytes of the text of code or of a command, where text is kept
SYNC_SECONDS = 1.0
PRUNE_SECONDS = 60.0
IDLE_SECONDS = 3600.0  # after which to look for old rows, where nothing happens
FOLLOW_SECONDS = 0.1
MAX_FOLLOWERS = 64  # waiting calls of all principals that are no admins
GATEWAY = AuditCaller("", "gateway")
_REFUSALS = frozenset(
    (
        "PERMISSION_DENIED",
        "UNAUTHENTICATED",
        "RESOURCE_EXHAUSTED",
        "NOT_FOUND",
        "ALREADY_EXISTS",  # perhaps another owner's
    )
)


_KEY = re.compile(r"(k8e-)[0-9a-f]{16,}")
"""A key that a caller put where a name belongs."""


class Trail:
    """Appends rows, in order, on the gateway's event loop."""

    def __init__(
        self, folder: Path, *, max_bytes: int, max_age: float, content: str = CONTENTS[0]
    ) -> None:
        if content not in CONTENTS:
            raise errors.InvalidRequest(
                f"K8E_AUDIT_CONTENT is {content!r}", hint=f"use one of {', '.join(CONTENTS)}"
            )
        self._folder = folder
        self._content = content
        self._writer = SegmentWriter(folder, max_bytes=max_bytes, max_age=max_age)
        self._pending = PendingChanges(folder)
        self._folding = Folding()
        self._lost = 0  # rows that could not be written
        self._synced = self._writer.seq
        self._busy = asyncio.Event()
        self._news = asyncio.Event()
        self._followers = 0
        self._looks = Looks()
        self._removals = 0  # begun and ended: odd while files of it are being removed

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Write while the block runs."""
        if self._writer.repaired:
            self.record("audit.repaired", bytes=self._writer.repaired)
        self.record("gateway.started", version=__version__, pid=os.getpid())
        self._tell_left()
        keeper = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            keeper.cancel()
            self._flush(time.monotonic() + 1e9)
            self.record("gateway.stopped")
            await self._sync()
            self._writer.close()

    # Writing.

    def record(
        self,
        action: str,
        *,
        outcome: str = ALLOWED,
        session: str = "",
        owner: str = "",
        act: Act | None = None,
        **detail: Any,
    ) -> None:
        """Write a row, on behalf of ``act`` or of the current caller.

        It does not fail: a full disk must not stop callers that could make room. Lost rows are
        counted, and the next row that can be written says so.
        """
        told = {name: to_json(value) for name, value in detail.items() if value is not None}
        self._record(action, outcome, session, owner, act or audit_act.current(), told)

    def admit(self) -> None:
        """Refuse an operation that is about to begin if its rows could not be written.

        Not called for operations that make things safer: keys are deleted, and sessions ended, all
        the same.
        """
        if not self._writer.has_room():
            raise errors.LimitExceeded(
                "disk is full: what is asked for could not be written into the audit trail, so it "
                "is not done",
                hint="make room on the disk of the gateway's data folder: destroy sessions, remove "
                "snapshots and images; deleting keys and ending sessions goes on",
            )

    def during(self, action: str, **detail: Any) -> contextlib.AbstractContextManager[None]:
        """A block in which the current caller changes something, and then writes its row.

        If the gateway is killed in between, the next one writes the row.
        """
        told = {name: to_json(value) for name, value in detail.items() if value is not None}
        act = audit_act.current() or Act(GATEWAY, "")
        return self._pending.during(Begun(act, action, told))

    def _tell_left(self) -> None:
        try:
            for act, action, detail in self._pending.left():
                self._record(action, ALLOWED, "", "", act, {**detail, "left": "true"})
        except OSError as error:
            log.error("what had begun cannot be read: %s", error)

    def _record(
        self,
        action: str,
        outcome: str,
        session: str,
        owner: str,
        act: Act | None,
        detail: dict[str, str],
    ) -> None:
        caller = act.caller if act is not None else GATEWAY._replace(principal=owner)
        other = owner if owner != caller.principal else ""
        if act is not None and act.request:
            detail = {**detail, "request": to_json(act.request)}
        row = AuditRow(
            action, outcome, caller.principal, caller.via, caller.peer, session, other, detail
        )
        try:
            if self._lost:
                self._writer.append(_lost(self._lost))
                self._lost = 0
            self._writer.append(row)
        except OSError as error:
            self._lost += 1
            log.error("audit row %s of %s is lost: %s", action, caller.principal, error)
            return
        self._busy.set()
        if self._followers:
            self._news.set()
            self._news = asyncio.Event()

    def event(
        self, session: Session, kind: str, fields: dict[str, Any], call: dict[str, Any] | None
    ) -> None:
        """Write the row of an event in a session; ``call`` is the request, if that matters."""
        detail = {name: to_json(value) for name, value in fields.items() if value is not None}
        if kind == "exec.started" and call is not None:
            detail |= self._asked(detail, call)
        outcome = DENIED if _is_denial(kind, fields) else ALLOWED
        self._record(kind, outcome, session.session_id, session.owner, audit_act.current(), detail)

    def _asked(self, detail: dict[str, str], call: dict[str, Any]) -> dict[str, str]:
        """The code and commands of a call, as rows have them; never their environment or input."""
        code = call.get("code")
        what = "code" if isinstance(code, bytes) else "command"
        data = code if isinstance(code, bytes) else _bytes(call)
        told: dict[str, str] = {}
        if self._content == "all":
            told[what] = long_text(_text(data, code, call), MAX_CODE)
        elif what == "command" and self._content == "commands":
            return told  # its text is there already
        else:
            detail.pop("command", None)
        told["sha256"] = f'"{hashlib.sha256(data).hexdigest()}"'
        told["size"] = str(len(data))
        return told

    def refused(self, error: BaseException, act: Act | None = None) -> None:
        """Write the row of a refusal; other errors leave no row."""
        if isinstance(error, errors.K8eError):
            if error.grpc_status not in _REFUSALS:
                return
            code, why = error.code, error.message
        else:
            code, why = "unauthenticated", str(error)
        act = act or audit_act.current() or Act(GATEWAY, "")
        caller = act.caller
        host = "" if caller.principal else _host(caller.peer)
        kind = (caller.principal, caller.via, host, code)
        # Unknown callers can come from any number of addresses.
        group = None if caller.principal else ("", caller.via, "*", code)
        self._busy.set()
        if self._folding.admit(kind, time.monotonic(), group):
            self.record(
                "call.refused",
                outcome=DENIED,
                session=_without_keys(act.session)[:64],
                act=act,
                call=_without_keys(act.call)[:64],
                code=code,
                why=_without_keys(why)[:300],
            )

    def _flush(self, now: float) -> None:
        for (principal, via, host, code), count in self._folding.over(now):
            act = Act(AuditCaller(principal, via, host), "")
            self.record("call.refused", outcome=DENIED, act=act, code=code, count=count)

    # Keeping.

    async def _keep(self) -> None:
        """Sync rows to the disk, and remove the oldest; neither blocks the event loop."""
        pruned = -PRUNE_SECONDS  # at once: the gateway before may have died while it pruned
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_SECONDS):
                    await self._busy.wait()
            self._busy.clear()
            await asyncio.sleep(SYNC_SECONDS)
            self._flush(time.monotonic())
            if len(self._folding):
                self._busy.set()  # their window ends soon
            try:
                if self._synced != self._writer.seq:
                    await self._sync()
                if time.monotonic() > pruned + PRUNE_SECONDS:
                    pruned = time.monotonic()
                    await self.prune()
            except OSError as error:
                log.error("the audit trail cannot be kept: %s", error)

    async def _sync(self) -> None:
        seq, written = (
            self._writer.seq,
            self._writer.written(),
        )  # here, between two rows
        await asyncio.to_thread(segments.sync, self._folder, written)
        self._synced = seq

    async def prune(self) -> None:
        """Remove rows that are too old or too many.

        First the row about it, on the disk, and then the files: a crash in between leaves too
        much, and never a gap that nothing explains.
        """
        excess = await asyncio.to_thread(self._writer.excess, time.time())
        if excess is None:
            return
        count = len(excess.paths)
        self.record(query.PRUNED, files=count, first=excess.first, prev=excess.prev)
        if self._lost:
            return  # the row could not be written
        await self._sync()
        self._removals += 1
        try:
            await asyncio.to_thread(excess.remove)
        finally:
            self._removals += 1

    # Reading.

    async def newest(self, wanted: Filter, limit: int, who: str = "") -> Page:
        """The newest rows; ``who`` asks for them."""
        with self._looks.by(who):
            search = query.Newest(self._folder, wanted, limit)
            while (page := await self._looks.read(search.step)) is None:
                pass
            return page

    async def following(
        self, wanted: Filter, cursor: str, limit: int, wait: float = 0, who: str = ""
    ) -> Page:
        """Rows after ``cursor``; waits up to ``wait`` seconds for the first of them."""
        query.parse_cursor(cursor)
        # Admins have a limit of their own, so that no other caller can lock them out.
        if wait and wanted.of and self._followers >= MAX_FOLLOWERS:
            raise errors.LimitExceeded(
                f"{MAX_FOLLOWERS} calls wait for rows of the audit trail", hint="try again later"
            )
        with self._looks.by(who):
            self._followers += 1
            try:
                return await self._follow(wanted, cursor, limit, wait)
            finally:
                self._followers -= 1

    async def _follow(self, wanted: Filter, cursor: str, limit: int, wait: float) -> Page:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        while True:
            news = self._news
            page = await self._looks.read(query.following, self._folder, wanted, cursor, limit)
            if page.lines or page.more or loop.time() >= deadline:
                return page
            cursor = page.cursor
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await news.wait()
                    await asyncio.sleep(FOLLOW_SECONDS)  # so that many rows take one look

    async def verify(self, expected: ChainLink | None = None, who: str = "") -> Checked:
        """Check the chain, also against what this gateway remembers of its end."""
        before, found = self._removals, await self._verify(expected, who)
        if found.problems and (before != self._removals or before % 2):
            # Files that went while they were read look like a gap; the next go in a minute.
            return await self._verify(expected, who)
        return found

    async def _verify(self, expected: ChainLink | None, who: str) -> Checked:
        known = ChainLink(self._writer.seq, "", self._writer.head)
        with self._looks.by(who):
            check = query.Verifying(self._folder, expected, known)
            while (found := await self._looks.read(check.step)) is None:
                pass
        if found.last < known.seq and len(found.problems) < query.MAX_PROBLEMS:
            missing = f"rows from {found.last + 1} to {known.seq} are missing at the end"
            return found._replace(problems=[*found.problems, missing])
        return found


def _host(peer: str) -> str:
    """A stranger's address without its port; one host may have many addresses of IPv6."""
    return access.group(peer.rpartition(":")[0].strip("[]"))


def _without_keys(text: str) -> str:
    return _KEY.sub(r"\1…", text)


def _lost(count: int) -> AuditRow:
    return AuditRow("audit.lost", ALLOWED, "", GATEWAY.via, "", "", "", {"count": str(count)})


def _is_denial(kind: str, fields: dict[str, Any]) -> bool:
    return kind == "egress.denied" or (
        kind == "approval.decided" and fields.get("status") == "rejected"
    )


def _bytes(call: dict[str, Any]) -> bytes:
    """A command's arguments, each with the NUL that ends it."""
    argv: list[str] = call.get("argv") or []
    return b"".join(part.encode("utf-8", "surrogateescape") + b"\0" for part in argv)


def _text(data: bytes, code: object, call: dict[str, Any]) -> str:
    if code is not None:
        return data[: 2 * MAX_CODE].decode("utf-8", "replace")
    return " ".join(call.get("argv") or [])[: 2 * MAX_CODE]
