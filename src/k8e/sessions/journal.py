"""The journal: the entries that operations on a guest leave in the events of their session.

What a guest says about the end of an operation is checked here: it is hostile, and auditors read
this.

The end of a run is noted in the session's events, with what the gateway itself has observed, even
if the guest lies about that end or reports none: a guest is hostile, and auditors read this.

Noting an exec takes as long as everything else that a gateway does for a short command. So it is
done while the guest starts the command. Until then the call stays here: if the gateway is killed in
between, the next one notes it.
"""

from __future__ import annotations

import logging
import mmap
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

from k8e import errors
from k8e.audit.act import Act, AuditCaller
from k8e.guest import wire
from k8e.json_lines import MAX_ITEMS, MAX_TEXT
from k8e.model import Session
from k8e.sessions.events import Events
from k8e.sessions.live import Live
from k8e.sessions.network import Network


class ExecObserver:
    """Observes one exec from now until its end."""

    def __init__(self, network: Network, live: Live) -> None:
        self._network = network
        self._live = live
        self._mark = self._until = network.mark(live.session.sandbox_id)
        self._denials: list[dict[str, Any]] = []
        self._limits: list[dict[str, Any]] = []
        self._looked = False

    @property
    def saw_something(self) -> bool:
        """Whether it saw something that the guest could not tell the next gateway."""
        return self._until > self._mark or bool(self._limits)

    def amend(self, body: bytes) -> bytes:
        """Add the refusals since the start and the limits that were met to an EXIT."""
        self._look()
        lacks = self._network.lacks(self._live.session)
        body = self._network.add_denials(body, self._denials, lacks)
        body, self._limits = self._live.limits.examine(body)
        return body

    def note(self, events: Events, exec_id: str) -> None:
        """Note what was observed, once it is known how the exec ended."""
        if not self._looked:  # there was no EXIT
            self._look()
        live = self._live
        _note_refusals(self._network, events, live, self._mark)  # refusals that belong to no exec
        if self._until > self._mark:
            count = self._until - self._mark
            fields = {"exec_id": exec_id, "count": count, "denials": self._denials}
            events.write(live.session, "egress.denied", **fields)
        live.refusals_noted = max(live.refusals_noted, self._until)
        note_limits(events, live.session, self._limits, exec_id=exec_id)

    def _look(self) -> None:
        sandbox_id = self._live.session.sandbox_id
        self._denials = self._network.denials_since(sandbox_id, self._mark)
        self._until = self._network.mark(sandbox_id)
        self._looked = True


def note_limits(
    events: Events, session: Session, met: Iterable[dict[str, Any]], **fields: Any
) -> None:
    """Note each limit in a row of its own. The wording is the gateway's, not the guest's."""
    for item in met:
        events.write(session, "limit.reached", **fields, **item)


def note_rest(network: Network, events: Events, live: Live) -> None:
    """Note refusals that are in no row yet, before the session's last network is removed."""
    sandbox_id = live.session.sandbox_id
    network.take_in()
    _note_refusals(network, events, live, network.mark(sandbox_id))


def _note_refusals(network: Network, events: Events, live: Live, until: int) -> None:
    """Note refusals up to ``until`` that were not noted yet and belong to no known exec."""
    before = live.refusals_noted
    if until <= before:
        return
    live.refusals_noted = until
    denials = network.denials_since(live.session.sandbox_id, before, until)
    events.write(live.session, "egress.denied", count=until - before, denials=denials)


STATUSES = ("completed", "timed_out", "killed")
SHELL = ["/bin/sh", "-c"]

Ended = Callable[[int, bytes], None]
"""Called with the last frame of an operation; the kind is 0 if its caller left before."""


class JournalEntry(NamedTuple):
    """The functions that note the start and the end of an operation, where these are noted."""

    start: Callable[[], None] | None = None
    """To be called when it begins."""
    ended: Ended | None = None


def entry_for(
    events: Events, session: Session, call: dict[str, Any], observer: ExecObserver
) -> JournalEntry:
    """The entry of an operation; gives an exec or a context an id where it has none."""
    if call["op"] == "exec":
        exec_id = call["id"] = call.get("id") or os.urandom(8).hex()
        ended = partial(_exec_ended, events, session, exec_id, observer)
        return JournalEntry(partial(_exec_started, events, session, call), ended)
    if call["op"] == "attach":
        return JournalEntry(ended=partial(attached, events, session, str(call.get("id")), observer))
    note = _ENTRIES.get(call["op"])
    return JournalEntry(ended=note(events, session, call)) if note is not None else _NO_ENTRY


_NO_ENTRY = JournalEntry()


# Execs.


def _exec_started(events: Events, session: Session, call: dict[str, Any]) -> None:
    what: dict[str, Any] = {"background": bool(call.get("background"))}
    if "code" in call:
        what |= {"language": call.get("language"), "size": len(call["code"])}
        if "context" in call:
            what["context"] = call["context"]
    else:
        what["command"] = command_text(call["argv"])
    if call.get("tty"):
        what["tty"] = True
    events.exec_started(session, call["id"], call, **what)


def recovered(events: Events, session: Session, call: dict[str, Any], *, after: int) -> None:
    """Note the start of an exec for a gateway that was killed, unless it has done so itself."""
    if not events.has_started(session, call["id"], after):
        _exec_started(events, session, call)


def can_be_asked_for(call: dict[str, Any], kind: int, observer: ExecObserver) -> bool:
    """Whether the guest can report all of this end again; what the gateway saw, it cannot."""
    return kind == wire.EXIT and not observer.saw_something and not call.get("tty")


def command_text(argv: list[str]) -> str:
    """A command as a user would type it."""
    if argv[:2] == SHELL and len(argv) == 3:
        return argv[2]
    return shlex.join(part[:MAX_TEXT] for part in argv[:MAX_ITEMS])


def attached(
    events: Events, session: Session, exec_id: str, observer: ExecObserver, kind: int, body: bytes
) -> None:
    if kind == wire.EXIT:
        _exec_ended(events, session, exec_id, observer, kind, body)


def _exec_ended(
    events: Events, session: Session, exec_id: str, observer: ExecObserver, kind: int, body: bytes
) -> None:
    first = False
    if kind == wire.EXIT:
        first = events.exec_finished(session, exec_id, **ending_of(_unpacked(body)))
    elif kind == wire.ERROR:
        first = events.exec_failed(session, exec_id, str(_unpacked(body).get("code")))
    if first:
        observer.note(events, exec_id)


def ending_of(told: dict[str, Any]) -> dict[str, Any]:
    """How an exec ended, in known words and plausible numbers only."""
    code, status, duration = told.get("code"), told.get("status"), told.get("duration_ms")
    if type(code) is not int or not 0 <= code < 1 << 16 or status not in STATUSES:
        return {"status": "failed", "error": errors.GuestFailed.code}
    if type(duration) is not int or duration < 0:
        duration = None
    return {
        "exit_code": code,
        "status": status,
        "duration_ms": duration,
        "background": bool(told.get("background")),
    }


def _unpacked(body: bytes) -> dict[str, Any]:
    try:
        return wire.unpack_dict(body)
    except wire.WireError:
        return {}


# Files.


def _written(events: Events, session: Session, call: dict[str, Any]) -> Ended:
    path, append = _text(call.get("path")), bool(call.get("append"))

    def ended(kind: int, body: bytes) -> None:
        if kind == wire.RESULT:
            size = _unpacked(body).get("size")
            size = size if type(size) is int and size >= 0 else None
            events.write(session, "file.written", path=path, size=size, append=append)

    return ended


def _read_end(events: Events, session: Session, call: dict[str, Any]) -> Ended:
    """Tell observers of a read; ``body`` is the guest's first answer."""
    path = _text(call.get("path"))

    def ended(kind: int, body: bytes) -> None:
        if kind != wire.ERROR:
            size = _unpacked(body).get("size") if body else None
            size = size if type(size) is int and size >= 0 else None
            events.tell(session, "file.read", path=path, size=size, complete=kind == wire.END)

    return ended


def _told(kind_of_event: str, *names: str) -> Callable[..., Ended]:
    """Tell observers of a change when the guest reports it as made."""

    def begin(events: Events, session: Session, call: dict[str, Any]) -> Ended:
        fields = {name: call.get(name) for name in names}

        def ended(kind: int, _: bytes) -> None:
            if kind == wire.RESULT:
                events.tell(session, kind_of_event, **fields)

        return ended

    return begin


def _context_created(events: Events, session: Session, call: dict[str, Any]) -> Ended:
    call["id"] = call.get("id") or f"ctx-{os.urandom(8).hex()}"
    return _changed("context.created", "id", "language")(events, session, call)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _changed(kind_of_event: str, *names: str) -> Callable[..., Ended]:
    """Note a change when the guest reports it as made."""

    def begin(events: Events, session: Session, call: dict[str, Any]) -> Ended:
        fields = {name: _text(call.get(name)) for name in names}

        def ended(kind: int, _: bytes) -> None:
            if kind == wire.RESULT:
                events.write(session, kind_of_event, **fields)

        return ended

    return begin


_ENTRIES: dict[str, Callable[[Events, Session, dict[str, Any]], Ended]] = {
    "write": _written,
    "remove": _changed("file.removed", "path"),
    "rename": _changed("file.renamed", "path", "to"),
    "read": _read_end,
    "mkdir": _told("folder.made", "path"),
    "symlink": _told("file.linked", "path", "target"),
    "chmod": _told("file.mode", "path", "mode"),
    "signal": _told("exec.signalled", "id", "signal", "terminate"),
    "interrupt_context": _told("context.interrupted", "id"),
    "create_context": _context_created,
    "restart_context": _changed("context.restarted", "id"),
    "remove_context": _changed("context.removed", "id"),
}


log = logging.getLogger(__name__)

SIZE = 64 << 10
_USED = Struct("=Q")
_ENTRY = Struct("=II")  # bytes of its head and of its body
_SEPARATOR = "\0"


class Intent(NamedTuple):
    """An exec that may have been sent."""

    act: Act | None
    """On whose behalf."""
    session_id: str
    seq: int
    """The number of the newest event of the session by then."""
    body: bytes
    """The call, as the guest gets it."""


class Intents:
    """The execs of all sessions of a gateway; used on its event loop alone."""

    def __init__(self, path: Path) -> None:
        self._memory: mmap.mmap | None = None
        self._end = _USED.size
        self._waiting = 0
        try:
            self._memory = _map(path)
        except OSError as error:  # then everything is noted before it is sent
            log.warning("execs begin a little later: %s cannot be had: %s", path, error)
            return
        self._end = min(max(_USED.unpack_from(self._memory)[0], _USED.size), SIZE)

    def left(self) -> Iterator[Intent]:
        """Execs that an earlier gateway did not note; call ``forget`` when they are noted."""
        at, end = _USED.size, self._end
        while self._memory is not None and at + _ENTRY.size <= end:
            head, body = _ENTRY.unpack_from(self._memory, at)
            at += _ENTRY.size + head + body
            if at > end:
                return
            told = self._memory[at - head - body : at - body].decode("utf-8", "replace")
            yield _read_intent(told, self._memory[at - body : at])

    def forget(self, end: int = 0) -> None:
        """Erase all intents, and users' code with them; up to ``end`` if given."""
        if self._memory is not None:
            end = end or self._end
            _USED.pack_into(self._memory, 0, _USED.size)
            self._memory[_USED.size : end] = bytes(end - _USED.size)
            self._end = _USED.size

    def keep(
        self, act: Act | None, session_id: str, seq: int, body: bytes, note: Callable[[], None]
    ) -> Callable[[], None]:
        """Keep a call until the answer is called, which notes it; note a long one at once."""
        told = _SEPARATOR.join((session_id, str(seq), *(act.caller if act is not None else ())))
        head = told.encode("utf-8", "replace")
        entry = _ENTRY.pack(len(head), len(body)) + head + body
        at, end = self._end, self._end + len(entry)
        if self._memory is None or end > SIZE:
            note()
            return _nothing
        self._memory[at:end] = entry
        # Only now, so that every call that is counted is whole.
        _USED.pack_into(self._memory, 0, end)
        self._end = end
        self._waiting += 1

        def noted() -> None:
            try:
                note()
            finally:
                self._waiting -= 1
                if not self._waiting:
                    self.forget()

        return noted

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _map(path: Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(fd, SIZE)
        os.posix_fallocate(fd, 0, SIZE)  # a full disk must not become a signal later
        return mmap.mmap(fd, SIZE)
    finally:
        os.close(fd)


def _nothing() -> None:
    pass


def _read_intent(told: str, body: bytes) -> Intent:
    session_id, _, rest = told.partition(_SEPARATOR)
    seq, *who = rest.split(_SEPARATOR)
    act = (
        Act(AuditCaller(*who), "exec", session_id) if len(who) == len(AuditCaller._fields) else None
    )
    return Intent(act, session_id, int(seq) if seq.isdecimal() and len(seq) < 19 else 0, body)
