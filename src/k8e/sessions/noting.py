"""What operations leave in the events of their session: two rows for an exec, one for a change.

What a guest says about the end of an operation is checked here: it is hostile, and auditors read
this.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from k8e import errors, link
from k8e.guest import wire
from k8e.model import Session
from k8e.sessions.events import MAX_ITEMS, MAX_TEXT, Events
from k8e.sessions.live import Live
from k8e.sessions.operations import Operation
from k8e.sessions.witnessing import Witness

STATUSES = ("completed", "timed_out", "killed")
SHELL = ["/bin/sh", "-c"]
EVERYTHING = 1 << 62  # a number of a byte that no output reaches: its reader gets the exit alone
ANSWER_SECONDS = 15.0
MOST_WATCHED = 1024
"""Execs of one session that nobody waits for, and whose end is noted when it comes. That of further
ones is noted with the session's: a guest that never ends any must not fill the gateway."""

Ended = Callable[[int, bytes], None]
"""Called with the last frame of an operation; the kind is 0 if its caller left before."""


class Noted(NamedTuple):
    """What is noted of an operation."""

    start: Callable[[], None] | None = None
    """To be called when it begins."""
    ended: Ended | None = None


def begun(events: Events, session: Session, call: dict[str, Any], witness: Witness) -> Noted:
    """What to note of an operation; gives an exec or a context its id, where it has none."""
    if call["op"] == "exec":
        exec_id = call["id"] = call.get("id") or os.urandom(8).hex()
        ended = partial(_exec_ended, events, session, exec_id, witness)
        return Noted(partial(_exec_started, events, session, call), ended)
    if call["op"] == "attach":
        return Noted(ended=partial(_attached, events, session, str(call.get("id")), witness))
    note = _NOTED.get(call["op"])
    return Noted(ended=note(events, session, call)) if note is not None else _NOTHING


_NOTHING = Noted()


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


def can_be_asked_for(call: dict[str, Any], kind: int, witness: Witness) -> bool:
    """Whether the guest can tell all of this end again: what the gateway saw, it cannot."""
    return kind == wire.EXIT and not witness.saw_something and not call.get("tty")


def command_text(argv: list[str]) -> str:
    """A command as somebody would type it."""
    if argv[:2] == SHELL and len(argv) == 3:
        return argv[2]
    return shlex.join(part[:MAX_TEXT] for part in argv[:MAX_ITEMS])


def _attached(
    events: Events, session: Session, exec_id: str, witness: Witness, kind: int, body: bytes
) -> None:
    if kind == wire.EXIT:
        _exec_ended(events, session, exec_id, witness, kind, body)


def _exec_ended(
    events: Events, session: Session, exec_id: str, witness: Witness, kind: int, body: bytes
) -> None:
    first = False
    if kind == wire.EXIT:
        first = events.exec_finished(session, exec_id, **_ending(_unpacked(body)))
    elif kind == wire.ERROR:
        first = events.exec_failed(session, exec_id, str(_unpacked(body).get("code")))
    if first:
        witness.note(events, exec_id)


def _ending(told: dict[str, Any]) -> dict[str, Any]:
    """How an exec ended, in words that we know and numbers that can be."""
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


def watch(live: Live, connected: link.Link, exec_id: str, ended: Ended, witness: Witness) -> None:
    """Nobody waits for an exec any more: wait for its end, so that it is noted."""
    if live.watched >= MOST_WATCHED:
        return
    live.watched += 1

    def over(kind: int, body: bytes) -> None:
        live.watched -= 1
        ended(kind, body)

    def lost() -> None:
        if not waiting.done:
            live.watched -= 1

    waiting = Operation("attach", lambda kind, body: None, over, witness.amend)
    # Of its output it gets nothing, and it holds nothing up: an exec that was left is a ring.
    call = {"op": "attach", "id": exec_id, "seq": EVERYTHING, "window": 1}
    try:
        waiting.attach(connected.open(call, waiting.receive, lost))
    except errors.GuestFailed:  # it does not read; nobody will know
        lost()


async def catch_up(events: Events, live: Live, new_witness: Callable[[], Witness]) -> None:
    """Note what ended while no gateway ran, and wait for the background execs that go on."""
    session = live.session
    waiting = set(events.unfinished(session))
    if not waiting:
        return
    try:
        connected = await live.guest.connect()
        told: Any = await link.request(connected, {"op": "execs"}, seconds=ANSWER_SECONDS)
        for item in told["execs"]:
            if item["id"] not in waiting:
                continue
            waiting.discard(item["id"])  # a guest may tell of one many times
            if item["code"] is not None:
                events.exec_finished(session, item["id"], **_ending(item))
            elif item["background"] or item.get("ring") is True:  # others wait for their readers
                witness = new_witness()
                ended = partial(_attached, events, session, item["id"], witness)
                watch(live, connected, item["id"], ended, witness)
    except (errors.K8eError, OSError, KeyError, TypeError, AttributeError):
        return  # it answers nonsense or not at all; others look after that


# Files.


def _written(events: Events, session: Session, call: dict[str, Any]) -> Ended:
    path, append = _text(call.get("path")), bool(call.get("append"))

    def ended(kind: int, body: bytes) -> None:
        if kind == wire.RESULT:
            size = _unpacked(body).get("size")
            size = size if type(size) is int and size >= 0 else None
            events.write(session, "file.written", path=path, size=size, append=append)

    return ended


def _read(events: Events, session: Session, call: dict[str, Any]) -> Ended:
    """Of a read, observers are told; ``body`` is what the guest said first."""
    path = _text(call.get("path"))

    def ended(kind: int, body: bytes) -> None:
        if kind != wire.ERROR:
            size = _unpacked(body).get("size") if body else None
            size = size if type(size) is int and size >= 0 else None
            events.tell(session, "file.read", path=path, size=size, complete=kind == wire.END)

    return ended


def _told(kind_of_event: str, *names: str) -> Callable[..., Ended]:
    """Tell observers of a change when the guest says that it made it."""

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
    """Note a change when the guest says that it made it."""

    def begin(events: Events, session: Session, call: dict[str, Any]) -> Ended:
        fields = {name: _text(call.get(name)) for name in names}

        def ended(kind: int, _: bytes) -> None:
            if kind == wire.RESULT:
                events.write(session, kind_of_event, **fields)

        return ended

    return begin


_NOTED: dict[str, Callable[[Events, Session, dict[str, Any]], Ended]] = {
    "write": _written,
    "remove": _changed("file.removed", "path"),
    "rename": _changed("file.renamed", "path", "to"),
    "read": _read,
    "mkdir": _told("folder.made", "path"),
    "symlink": _told("file.linked", "path", "target"),
    "chmod": _told("file.mode", "path", "mode"),
    "signal": _told("exec.signalled", "id", "signal", "terminate"),
    "interrupt_context": _told("context.interrupted", "id"),
    "create_context": _context_created,
    "restart_context": _changed("context.restarted", "id"),
    "remove_context": _changed("context.removed", "id"),
}
