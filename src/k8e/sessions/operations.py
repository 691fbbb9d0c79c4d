"""Operations on a session's guest: checked, started, relayed without being decoded, and noted.

Between the arrival of a client's frame and the guest, a call passes ``gateway/frames.py``, which
finds the session; this module, from ``GuestOperations.open_now`` on; and the link. ``journal.py``
decides what an operation leaves in the events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from k8e import errors
from k8e.audit import act as audit_act
from k8e.guest import context_runs, ports, spawn, wire
from k8e.link import Channel, FrameSink, Link, batch, request
from k8e.model import Limits, Principal, Session, check_env
from k8e.sessions import journal, refusals
from k8e.sessions.events import Events
from k8e.sessions.journal import Ended, ExecObserver, Intents
from k8e.sessions.limits import MAX_TIMEOUT
from k8e.sessions.live import Live
from k8e.sessions.network import Network

log = logging.getLogger(__name__)

CONTEXT_OPERATIONS = frozenset(
    "create_context list_contexts remove_context restart_context interrupt_context".split()
)
MAX_ID = 64
MAX_PATH = 4096
MAX_GRACE = 60.0
KNOWN = "known are python, bash and node"


def check_id(name: Any, what: str) -> None:
    """Refuse a malformed id; an empty one is chosen by the guest."""
    name = name or ""
    if (
        not isinstance(name, str)
        or len(name) > MAX_ID
        or not name.isascii()
        or (not name.replace("-", "a").isalnum() and name)
    ):
        raise errors.InvalidRequest(f"{what} has at most {MAX_ID} letters, digits and hyphens")


def check_context(call: dict[str, Any]) -> None:
    """Refuse an operation on contexts that is malformed."""
    op = call["op"]
    check_id(call.get("id"), "a context id")
    if not call.get("id") and op not in ("create_context", "list_contexts"):
        raise errors.InvalidRequest("the context id is missing")
    if op == "create_context":
        _check_new(call)
    grace = call.get("grace") or 0
    if not isinstance(grace, (int, float)) or not 0 <= grace <= MAX_GRACE:
        raise errors.InvalidRequest(f"grace must be 0 to {MAX_GRACE:g} seconds")


def _check_new(call: dict[str, Any]) -> None:
    language = call.get("language")
    if language is not None and language not in context_runs.CONTEXT_LANGUAGES:
        raise errors.InvalidRequest(f"there are no contexts for {str(language)[:80]!r}", hint=KNOWN)
    cwd = call.get("cwd") or ""
    if not isinstance(cwd, str) or len(cwd) > MAX_PATH or "\0" in cwd:
        raise errors.InvalidRequest("cwd must be a path")


def check_run(call: dict[str, Any]) -> None:
    """Refuse a run in a context that asks for options of a new program."""
    check_id(call["context"], "a context id")
    if not call["context"]:
        raise errors.InvalidRequest("the context id is missing")
    if "code" not in call:
        raise errors.InvalidRequest("a context runs code", hint="pass code, and no argv")
    for key in ("tty", "stdin"):
        if call.get(key):
            raise errors.InvalidRequest(
                f"code in a context has no {key}", hint="run it without a context"
            )
    make = call.get("make_context")
    if make and make is not True and make not in context_runs.CONTEXT_LANGUAGES:
        raise errors.InvalidRequest(f"there are no contexts for {str(make)[:80]!r}", hint=KNOWN)
    _check_new(call)


# Values from clients have no static type; everything is checked here.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false


OPERATIONS = frozenset(
    "exec attach transcript signal resize execs processes read write list stat remove rename "
    "mkdir symlink chmod connect ping foreground type dismiss".split()
).union(CONTEXT_OPERATIONS)
"""What a client may ask of a guest; ``bind`` is the gateway's alone."""
# The frame that ends each kind of operation, seen from the client: operations not named here are
# answered by their RESULT alone.
_STREAMS = {
    "exec": (wire.EXIT,),
    "attach": (wire.EXIT,),
    "transcript": (wire.EXIT,),
    "read": (wire.END,),
    "list": (wire.END,),
    "write": (),  # its second RESULT
    "connect": (),  # the same, when both directions have ended
}
_ENDED_TWICE = ("write", "connect")
_COUNTED = (wire.STDIN, wire.DATA)
# The frames that a client may send to each kind of operation; one wrong frame would cost all its
# link.
_EXEC_FEED = frozenset((wire.STDIN, wire.STDIN_END, wire.CREDIT))
_FROM_CLIENT = {
    "exec": _EXEC_FEED,
    "attach": _EXEC_FEED,
    "transcript": frozenset((wire.CREDIT,)),
    "write": frozenset((wire.DATA, wire.END)),
    "read": frozenset((wire.CREDIT,)),
    "list": frozenset((wire.CREDIT,)),
    "connect": frozenset((wire.DATA, wire.END, wire.CREDIT)),
}
MAX_VALUE = 256 << 10
"""Bytes of a packed value from a guest: a larger one would hold up the event loop."""
_VALUES = (wire.RESULT, wire.ERROR, wire.EXIT)
_FROM_GUEST = (
    wire.RESULT,
    wire.ERROR,
    wire.OUT,
    wire.ERR,
    wire.SHOW,
    wire.EXIT,
    wire.DATA,
    wire.END,
)
MIN_LIST_WINDOW = 64 << 10
MAX_WAIT = 3600.0
"""Seconds that a connection may wait for a server that does not listen yet."""
MAX_TYPED = 1 << 20
"""Bytes for a terminal in one call."""


def check(call: dict[str, Any]) -> dict[str, Any]:
    """Return ``call`` if a guest may see it; raise InvalidRequest otherwise."""
    op = call.get("op")
    if op not in OPERATIONS:
        raise errors.InvalidRequest(f"unknown operation {op!r}")
    window = call.get("window") or wire.WINDOW
    smallest = MIN_LIST_WINDOW if op == "list" else 1
    if not isinstance(window, int) or not smallest <= window <= wire.MAX_WINDOW:
        raise errors.InvalidRequest(f"window must be {smallest} to {wire.MAX_WINDOW} bytes")
    if op == "exec":
        _check_exec(call)
    elif op in CONTEXT_OPERATIONS:
        check_context(call)
    elif op == "connect":
        check_target(call.get("host"), call.get("port"))
        _check_wait(call)
    elif op == "type":
        _check_typed(call)
    return call


def check_target(host: Any, port: Any) -> None:
    """Refuse addresses other than a port on the sandbox's own loopback; the guest does the same."""
    try:
        ports.check_port(port)
        ports.loopback_addresses(host)
    except OSError as error:
        raise errors.InvalidRequest(
            f"{error.strerror}: {host!r}, {port!r}"[:200],
            hint="the host is localhost, ::1 or an address that begins with 127.",
        ) from None


def _check_wait(call: dict[str, Any]) -> None:
    wait = call.get("wait") or 0
    if not isinstance(wait, (int, float)) or not 0 <= wait <= MAX_WAIT:
        raise errors.InvalidRequest(f"wait must be 0 to {MAX_WAIT:g} seconds")


def _check_typed(call: dict[str, Any]) -> None:
    data = call.get("data")
    if not isinstance(data, bytes):
        raise errors.InvalidRequest("data must be bytes")
    if len(data) > MAX_TYPED:
        raise errors.LimitExceeded(
            f"{len(data)} bytes for a terminal at once; the limit is {MAX_TYPED}",
            hint="write them in several pieces",
        )


def _check_exec(call: dict[str, Any]) -> None:
    timeout = call.get("timeout") or 0
    if not isinstance(timeout, (int, float)) or not 0 <= timeout <= MAX_TIMEOUT:
        raise errors.InvalidRequest(f"timeout must be 0 to {MAX_TIMEOUT:g} seconds")
    if env := call.get("env"):
        if not isinstance(env, dict) or not all(isinstance(v, str) for v in env.values()):
            raise errors.InvalidRequest("env must map names to text")
        check_env(env)
    _check_most_output(call)
    check_id(call.get("id"), "an exec id")
    if "context" in call:
        check_run(call)
    if "code" in call:
        _check_code(call)
        return
    argv: Any = call.get("argv")
    if not isinstance(argv, list) or not argv:
        raise errors.InvalidRequest("argv must be a list of at least one text")
    for part in argv:
        if not isinstance(part, str):
            raise errors.InvalidRequest("argv must be a list of at least one text")
        if "\0" in part:
            raise errors.InvalidRequest("an argument has a NUL byte")


def _check_most_output(call: dict[str, Any]) -> None:
    most = call.get("most_output") or 0
    if not isinstance(most, int) or most < 0:
        raise errors.InvalidRequest("most_output must be a number of bytes")
    if not most:
        call.pop("most_output", None)  # then it is the session's limit


def check_limits(call: dict[str, Any], limits: Limits) -> None:
    """Refuse a checked call that asks for more than its session may have.

    Of all that an exec can be asked for, only this is a limit of the session: the others bound
    what is kept and how long it runs, and the limits of CPU, memory and disk hold anyway.
    """
    if call.get("most_output", 0) > limits.output:
        raise errors.LimitExceeded(
            f"most_output is {call['most_output']}; the limit output of the session is "
            f"{limits.output} bytes",
            hint="create a session with more: --max-output, or limits={'output': …}",
        )


def _check_code(call: dict[str, Any]) -> None:
    code = call["code"]
    language = call.get("language")
    if language not in spawn.ALIASES and "context" not in call:
        raise errors.InvalidRequest(
            f"unknown language {language!r}", hint="known are bash, python, node and ts"
        )
    if not isinstance(code, bytes) or not code.strip():
        raise errors.InvalidRequest("the code is empty", hint="pass code as argument or on stdin")
    if len(code) > wire.MAX_CODE:
        raise errors.LimitExceeded(
            f"the code is {len(code)} bytes; the limit is {wire.MAX_CODE}",
            hint="write it to a file in the sandbox and run that",
        )


class Course:
    """The gateway's part in the end of an operation: three steps, always in this order."""

    def amend_exit(self, body: bytes) -> bytes:
        """First, and only for an EXIT: add what the guest cannot know."""
        return body

    def before_answer(self, operation: Operation, kind: int, body: bytes) -> None:
        """Then, before the client gets the last frame; ``kind`` is 0 if the client has left."""

    def after_answer(self, operation: Operation, kind: int, body: bytes) -> None:
        """At last, when the client has it."""


class Operation:
    """One running call. Frames come to ``on_frame``; the last one is END, EXIT, ERROR or RESULT."""

    def __init__(self, op: str, on_frame: FrameSink, course: Course | None = None) -> None:
        """``course`` is the gateway's part in its end; None for nothing."""
        self.done = False
        self.told = b""
        """What the guest said first."""
        self._op = op
        self._on_frame = on_frame
        self._course = course or Course()
        self._channel: Channel | None = None
        self._results = 0
        self._heard_all = False  # the guest has ended its side of a connection
        self._upload = wire.WINDOW  # bytes that the client may still send
        self._deadline: asyncio.TimerHandle | None = None

    def answer_within(self, seconds: float, error: errors.K8eError) -> None:
        """Fail with ``error`` unless the guest, which keeps the time itself, answers."""
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(seconds, self._give_up, error)

    def _give_up(self, error: errors.K8eError) -> None:
        if not self.done:
            if self._channel is not None:
                self._channel.send(wire.CANCEL)
            self.fail(error)

    def attach(self, channel: Channel) -> None:
        self._channel = channel

    @property
    def answered(self) -> bool:
        """Whether the guest has answered at all."""
        return self._results > 0

    # From the guest.

    def receive(self, kind: int, body: bytes) -> None:
        """Pass a frame on; WireError for frames that would only fill a client's memory."""
        if self.done:
            return
        if kind == wire.CREDIT:
            self._take_credit(body)
        elif kind not in _FROM_GUEST:
            raise wire.WireError(f"a guest does not send frames of kind {kind}")
        elif self._op == "connect" and kind in (wire.DATA, wire.END):
            if self._heard_all:
                raise wire.WireError("the guest went on after the end")
            self._heard_all = kind == wire.END
        elif kind in (wire.END, wire.EXIT) and kind not in _STREAMS.get(self._op, ()):
            raise wire.WireError(f"a guest does not send frame {kind} for {self._op}")
        elif kind in _VALUES and len(body) > MAX_VALUE:
            raise wire.WireError("the guest sent too large a value")
        if kind == wire.EXIT:
            body = self._course.amend_exit(body)
        if self._ends(kind, body):
            self._close()
            self._course.before_answer(self, kind, body)
            self._on_frame(kind, body)
            # The client need not wait for the rest.
            batch.afterwards(partial(self._course.after_answer, self, kind, body))
            return
        if kind == wire.RESULT and self._results > 1:
            raise wire.WireError("the guest answered twice")
        self._on_frame(kind, body)

    def _take_credit(self, body: bytes) -> None:
        if len(body) != wire.CREDIT_BODY.size:
            raise wire.WireError("malformed credit")
        count = wire.CREDIT_BODY.unpack(body)[0]
        self._upload += count
        if not count or self._upload > wire.WINDOW:
            raise wire.WireError("the guest gave credit for what it was not sent")

    def _ends(self, kind: int, body: bytes) -> bool:
        if kind == wire.ERROR:
            return True
        if kind == wire.RESULT:
            self._results += 1
            if self._results == 1:
                self.told = body
                self._cancel_deadline()
            return self._op not in _STREAMS or (self._op in _ENDED_TWICE and self._results == 2)
        return kind in _STREAMS.get(self._op, ())

    def fail(self, error: errors.K8eError) -> None:
        """End the operation from our side."""
        self.receive(wire.ERROR, wire.pack(error.to_wire()))

    # From the client.

    def send(self, kind: int, body: bytes = b"") -> None:
        """Pass the client's STDIN, STDIN_END, DATA, END or CREDIT on."""
        if self.done or self._channel is None:
            return
        if kind not in _FROM_CLIENT.get(self._op, ()):
            raise errors.InvalidRequest(f"frame {kind} does not belong to {self._op}")
        if kind in _COUNTED:
            self._upload -= len(body)
            if self._upload < 0:
                raise errors.InvalidRequest("the client sent more than it had credit for")
        self._channel.send(kind, body)

    def cancel(self) -> None:
        """Tell the guest that the client has left; what follows is the guest's decision."""
        if not self.done:
            if self._channel is not None:
                self._channel.send(wire.CANCEL)
            self._close()
            self._course.before_answer(self, 0, b"")
            self._course.after_answer(self, 0, b"")

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close(self) -> None:
        self.done = True
        self._cancel_deadline()
        if self._channel is not None:
            self._channel.close()


SAFER = ("attach", "interrupt_context", "remove", "remove_context", "signal")
"""Operations that end programs, make room or show what happened: done though no row can tell."""
EVERYTHING = 1 << 62  # a number that no output reaches: its reader gets the exit alone
ANSWER_SECONDS = 15.0
WAIT_GRACE = 5.0
"""Seconds that a guest has to report that no server came, after the time for that is over."""
MOST_WATCHED = 1024
"""Execs of one session whose end is waited for though their clients have left. That of further ones
is noted with the session's: a guest that never ends any must not fill the gateway."""


def _unanswered(call: dict[str, Any]) -> errors.TimedOut:
    return errors.TimedOut(
        f"the sandbox did not say whether port {call['port']} listens after {call['wait']:g} s",
        hint="check whether the session is paused, or too busy: get_session(session_id)",
    )


class GuestOperations:
    """Starts operations on the guests of all sessions."""

    def __init__(
        self,
        events: Events,
        network: Network,
        intents: Intents,
        *,
        own: Callable[[Principal, str], Live],
        on_dead: Callable[[Live, str], Awaitable[None]],
        on_lost: Callable[[Live, Operation], None],
    ) -> None:
        """The functions are its connection to the table of sessions.

        Args:
            events: where operations are noted.
            network: refuses connections; its refusals are reported with an exec's end.
            intents: execs that are being sent, for the next gateway.
            own: finds a caller's live session, or raises why there is none.
            on_dead: ends a session whose sandbox was found dead, before anything was started.
            on_lost: called with each operation whose link is gone.
        """
        self._events = events
        self._network = network
        self._intents = intents
        self._own = own
        self._on_dead = on_dead
        self._on_lost = on_lost

    async def open(
        self,
        principal: Principal,
        session_id: str,
        call: dict[str, Any],
        on_frame: FrameSink,
        *,
        own: bool = False,
    ) -> Operation:
        """Start an operation on a session's guest; its frames come to ``on_frame``.

        ``own`` says that the call is the gateway's, which the session's limits do not bind.
        """
        operation = self.open_now(principal, session_id, call, on_frame, own=own)
        while operation is None:
            live = self._own(principal, session_id)
            try:
                await live.guest.connect()
            except errors.SandboxDied as error:
                # Nothing was started, so this is as if the death had been noticed before.
                await self._on_dead(live, error.message)
            operation = self.open_now(principal, session_id, call, on_frame, own=own)
        return operation

    def open_now(
        self,
        principal: Principal,
        session_id: str,
        call: dict[str, Any],
        on_frame: FrameSink,
        *,
        own: bool = False,
    ) -> Operation | None:
        """``open`` without a task, for the hot path; None while the guest is dialling."""
        check(call)
        live = self._own(principal, session_id)
        if not own:
            call.pop("own", None)
            check_limits(call, live.session.spec.limits)
        if live.paused:
            raise refusals.paused(session_id)
        connected = live.guest.link
        if connected is None:
            return None
        connected.check_room()  # before an entry is noted that would never end
        return self.start(live, connected, call, on_frame)

    def start(
        self, live: Live, connected: Link, call: dict[str, Any], on_frame: FrameSink
    ) -> Operation:
        """Send a call that was checked to a session's guest.

        The order matters:

        1. The observer begins: refusals and met limits from here on belong to the exec.
        2. The journal says what it will note, and gives an exec its id.
        3. The operation is refused if its row in the audit trail could not be written.
        4. The session is in use: it is not idle, and its guest has to answer.
        5. The exec is written down as an intent, which outlives the gateway.
        6. The call is sent, and the guest starts the program.
        7. Meanwhile, at the end of the batch, its start is noted and the intent forgotten.
        """
        is_exec = call["op"] == "exec"
        if is_exec and "code" in call:
            call["shared"] = live.parent is not None or bool(live.children)
        observer = self.observe(live)
        entry = journal.entry_for(self._events, live.session, call, observer)
        if entry.ended is not None and call["op"] not in SAFER:
            self._events.admit()
        course = _SessionCourse(live, connected, call, observer, audit_act.kept(entry.ended))
        operation = Operation(call["op"], on_frame, course)
        live.has_background |= bool(call.get("background"))
        live.began(operation, float(call.get("timeout") or 0) if is_exec else 0)
        body = wire.pack(call)
        note = self._intend(live.session, call, body, entry.start)
        try:
            channel = connected.open(
                call, operation.receive, lambda: self._on_lost(live, operation), body
            )
        finally:
            if note is not None:
                batch.afterwards(note)
        operation.attach(channel)
        if call.get("wait") and not operation.done:  # of `connect`
            operation.answer_within(call["wait"] + WAIT_GRACE, _unanswered(call))
        return operation

    def _intend(
        self,
        session: Session,
        call: dict[str, Any],
        body: bytes,
        start: Callable[[], None] | None,
    ) -> Callable[[], None] | None:
        """Make sure that the exec will be noted, by this gateway or the next one.

        The result is to be called when the call was sent.
        """
        if start is None:
            return None
        if call.get("env"):  # values of variables must not be found in a file
            start()
            return None
        act, seq = audit_act.current(), self._events.seq(session)
        return self._intents.keep(act, session.session_id, seq, body, audit_act.kept(start))

    def observe(self, live: Live) -> ExecObserver:
        """An observer of an exec, from now on."""
        return ExecObserver(self._network, live)

    async def catch_up(self, live: Live) -> None:
        """Note execs that ended while no gateway was connected; keep waiting for the others."""
        await catch_up(self._events, live, partial(self.observe, live))

    def recover(self, find: Callable[[str], Session | None]) -> None:
        """Note the execs that a killed gateway may have sent, and did not note."""
        for intent in self._intents.left():
            session = find(intent.session_id)
            if session is None:
                continue
            audit_act.begin(intent.act)
            try:
                call = wire.unpack_dict(intent.body)
                journal.recovered(self._events, session, call, after=intent.seq)
            except (wire.WireError, OSError, KeyError, TypeError, ValueError):
                log.exception("an exec of session %s cannot be noted", intent.session_id)
            finally:
                audit_act.begin(None)
        self._intents.forget(journal.SIZE)


class _SessionCourse(Course):
    """The end of an operation that a client has started."""

    def __init__(
        self,
        live: Live,
        connected: Link,
        call: dict[str, Any],
        observer: ExecObserver,
        ended: Ended | None,
    ) -> None:
        self._live = live
        self._connected = connected
        self._call = call
        self._observer = observer
        self._ended = ended
        self._is_exec = call["op"] == "exec"

    def amend_exit(self, body: bytes) -> bytes:
        return self._observer.amend(body)

    def before_answer(self, operation: Operation, kind: int, body: bytes) -> None:
        """Note the end, so that an answered operation is always noted.

        Except for ends that the guest can also report to the next gateway, should this one die
        before.
        """
        if self._ended is None:
            return
        if self._is_exec and journal.can_be_asked_for(self._call, kind, self._observer):
            return
        self._ended(kind, operation.told if self._call["op"] == "read" else body)

    def after_answer(self, operation: Operation, kind: int, body: bytes) -> None:
        self._live.finished(operation)
        if self._ended is None or not self._is_exec:
            return
        if kind:
            self._ended(kind, body)  # no more than once: the events know which execs have ended
        else:
            watch(self._live, self._connected, str(self._call["id"]), self._ended, self._observer)


class _WatchCourse(Course):
    """The end of an exec whose clients have left."""

    def __init__(self, live: Live, ended: Ended, observer: ExecObserver) -> None:
        self._live = live
        self._ended = ended
        self._observer = observer

    def amend_exit(self, body: bytes) -> bytes:
        return self._observer.amend(body)

    def after_answer(self, operation: Operation, kind: int, body: bytes) -> None:
        self._live.watched -= 1
        self._ended(kind, body)


def watch(live: Live, connected: Link, exec_id: str, ended: Ended, witness: ExecObserver) -> None:
    """Wait for the end of an exec whose clients have left, so that it is noted."""
    if live.watched >= MOST_WATCHED:
        return
    live.watched += 1

    def lost() -> None:
        if not waiting.done:
            live.watched -= 1

    waiting = Operation("attach", lambda kind, body: None, _WatchCourse(live, ended, witness))
    # It gets none of the output, and blocks nothing: an exec without clients is a ring.
    call = {"op": "attach", "id": exec_id, "seq": EVERYTHING, "window": 1}
    try:
        waiting.attach(connected.open(call, waiting.receive, lost))
    except errors.GuestFailed:  # it does not read, so its end stays unknown
        lost()


async def catch_up(events: Events, live: Live, new_witness: Callable[[], ExecObserver]) -> None:
    """Note execs that ended while no gateway ran, and wait for the background execs that go on."""
    session = live.session
    waiting = set(events.unfinished(session))
    if not waiting:
        return
    try:
        connected = await live.guest.connect()
        told: Any = await request(connected, {"op": "execs"}, seconds=ANSWER_SECONDS)
        for item in told["execs"]:
            if item["id"] not in waiting:
                continue
            waiting.discard(item["id"])  # a guest may report an end many times
            if item["code"] is not None:
                events.exec_finished(session, item["id"], **journal.ending_of(item))
            elif item["background"] or item.get("ring") is True:  # others wait for their readers
                witness = new_witness()
                ended = partial(journal.attached, events, session, item["id"], witness)
                watch(live, connected, item["id"], ended, witness)
    except (errors.K8eError, OSError, KeyError, TypeError, AttributeError):
        return  # it answers nonsense or not at all, which its lifetime watch deals with
