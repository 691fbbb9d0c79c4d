"""How an operation on a guest begins and ends: what is noted of it, who is told, in which order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from k8e.audit import acting
from k8e.guest import wire
from k8e.link import FrameSink, Link
from k8e.model import Session
from k8e.sending import batch
from k8e.sessions import noting
from k8e.sessions.events import Events
from k8e.sessions.intents import SIZE, Intents
from k8e.sessions.live import Live
from k8e.sessions.network import Network
from k8e.sessions.operations import Operation
from k8e.sessions.witnessing import Witness

log = logging.getLogger(__name__)

SAFER = ("attach", "interrupt_context", "remove", "remove_context", "signal")
"""What ends programs, makes room or shows what happened: done though no row can tell of it."""


class Opener:
    """Starts operations; ``on_lost`` is told of each whose link is gone."""

    def __init__(
        self,
        events: Events,
        network: Network,
        intents: Intents,
        on_lost: Callable[[Live, Operation], None],
    ) -> None:
        self._events = events
        self._network = network
        self._intents = intents
        self._on_lost = on_lost

    def open(
        self, live: Live, connected: Link, call: dict[str, Any], on_frame: FrameSink
    ) -> Operation:
        """Send a call that was checked to a session's guest."""
        is_exec = call["op"] == "exec"
        witness = self.witness(live)
        noted = noting.begun(self._events, live.session, call, witness)
        if noted.ended is not None and call["op"] not in SAFER:
            self._events.admit()
        ended = acting.kept(noted.ended)

        def last(kind: int, body: bytes) -> None:
            # What is answered has been noted, but for what the guest can tell the next gateway as
            # well, should this one die before.
            if ended is not None and not (is_exec and noting.can_be_asked_for(call, kind, witness)):
                ended(kind, operation.told if call["op"] == "read" else body)

        def done(kind: int, body: bytes) -> None:
            live.finished(operation)
            if ended is None or not is_exec:
                return
            if kind:
                ended(kind, body)  # no more than once: the events know which execs have ended
            else:
                noting.watch(live, connected, str(call["id"]), ended, witness)

        operation = Operation(call["op"], on_frame, done, witness.amend, last)
        live.has_background |= bool(call.get("background"))
        live.began(operation, float(call.get("timeout") or 0) if is_exec else 0)
        body = wire.pack(call)
        note = self._before(live.session, call, body, noted.start)
        try:
            channel = connected.open(
                call, operation.receive, lambda: self._on_lost(live, operation), body
            )
        finally:
            if note is not None:
                batch.afterwards(note)
        operation.attach(channel)
        return operation

    def _before(
        self,
        session: Session,
        call: dict[str, Any],
        body: bytes,
        start: Callable[[], None] | None,
    ) -> Callable[[], None] | None:
        """See to it that whatever runs will have been noted; what is left to do afterwards."""
        if start is None:
            return None
        if call.get("env"):  # values of variables are nobody's to find
            start()
            return None
        act, seq = acting.current(), self._events.seq(session)
        return self._intents.keep(act, session.session_id, seq, body, acting.kept(start))

    def witness(self, live: Live) -> Witness:
        """What looks at an exec from now on."""
        return Witness(self._network, live)

    def recover(self, find: Callable[[str], Session | None]) -> None:
        """Note what a gateway before us had sent, perhaps, and not noted."""
        for intent in self._intents.left():
            session = find(intent.session_id)
            if session is None:
                continue
            acting.begin(intent.act)
            try:
                call = wire.unpack_dict(intent.body)
                noting.recovered(self._events, session, call, after=intent.seq)
            except (wire.WireError, OSError, KeyError, TypeError, ValueError):
                log.exception("an exec of session %s cannot be noted", intent.session_id)
            finally:
                acting.begin(None)
        self._intents.forget(SIZE)
