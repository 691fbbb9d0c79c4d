"""What a client asks of a session's guest: checked here, then relayed without being decoded."""

# What clients send has no static type; everything is checked here.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from k8e import errors
from k8e.guest import languages, ports, wire
from k8e.link import Channel, FrameSink
from k8e.model import Limits, check_env
from k8e.sending import batch
from k8e.sessions import contexts

OPERATIONS = frozenset(
    "exec attach transcript signal resize execs processes read write list stat remove rename "
    "mkdir symlink chmod connect ping foreground type dismiss".split()
).union(contexts.OPERATIONS)
"""What a client may ask of a guest; ``bind`` is the gateway's alone."""
# What ends each kind of operation, seen from the client: operations not named here are answered
# by their RESULT alone.
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
# What a client may send to each kind of operation; one wrong frame would cost all its link.
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
MAX_TYPED = 1 << 20
"""Bytes for a terminal in one call."""
MAX_TIMEOUT = 7 * 24 * 3600.0


def check(call: dict[str, Any]) -> dict[str, Any]:
    """``call`` if a guest may see it; InvalidRequest otherwise."""
    op = call.get("op")
    if op not in OPERATIONS:
        raise errors.InvalidRequest(f"unknown operation {op!r}")
    window = call.get("window") or wire.WINDOW
    smallest = MIN_LIST_WINDOW if op == "list" else 1
    if not isinstance(window, int) or not smallest <= window <= wire.MAX_WINDOW:
        raise errors.InvalidRequest(f"window must be {smallest} to {wire.MAX_WINDOW} bytes")
    if op == "exec":
        _check_exec(call)
    elif op in contexts.OPERATIONS:
        contexts.check(call)
    elif op == "connect":
        check_target(call.get("host"), call.get("port"))
    elif op == "type":
        _check_typed(call)
    return call


def check_target(host: Any, port: Any) -> None:
    """Refuse what is not a port on a sandbox's own loopback; the guest does the same."""
    try:
        ports.check_port(port)
        ports.loopback_addresses(host)
    except OSError as error:
        raise errors.InvalidRequest(
            f"{error.strerror}: {host!r}, {port!r}"[:200],
            hint="the host is localhost, ::1 or an address that begins with 127.",
        ) from None


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
    contexts.check_id(call.get("id"), "an exec id")
    if "context" in call:
        contexts.check_run(call)
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
    what is kept and how long it runs, and what holds CPU, memory and disk does not ask.
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
    if language not in languages.ALIASES and "context" not in call:
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


class Operation:
    """One running call. Frames come to ``on_frame``; the last one is END, EXIT, ERROR or RESULT."""

    def __init__(
        self,
        op: str,
        on_frame: FrameSink,
        on_done: Callable[[int, bytes], None],
        amend_exit: Callable[[bytes], bytes],
        on_last: Callable[[int, bytes], None] | None = None,
    ) -> None:
        """``on_done`` gets the last frame, of kind 0 if the client left before it came.

        ``amend_exit`` adds to an EXIT what the guest does not know. ``on_last`` gets the same as
        ``on_done``, but before the client does: what was answered has been noted.
        """
        self.done = False
        self.told = b""
        """What the guest said first."""
        self._op = op
        self._on_frame = on_frame
        self._on_done = on_done
        self._on_last = on_last
        self._amend_exit = amend_exit
        self._channel: Channel | None = None
        self._results = 0
        self._heard_all = False  # the guest has ended its side of a connection
        self._upload = wire.WINDOW  # bytes that the client may still send

    def attach(self, channel: Channel) -> None:
        self._channel = channel

    @property
    def answered(self) -> bool:
        """Whether the guest has said anything yet."""
        return self._results > 0

    # From the guest.

    def receive(self, kind: int, body: bytes) -> None:
        """Pass a frame on; WireError where the guest sends what only fills a client's memory."""
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
            body = self._amend_exit(body)
        if self._ends(kind, body):
            self._close()
            if self._on_last is not None:
                self._on_last(kind, body)
            self._on_frame(kind, body)
            # What is left to do is not the client's to wait for.
            batch.afterwards(partial(self._on_done, kind, body))
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
        """The client is gone or no longer interested; what that means is the guest's to know."""
        if not self.done:
            if self._channel is not None:
                self._channel.send(wire.CANCEL)
            self._close()
            if self._on_last is not None:
                self._on_last(0, b"")
            self._on_done(0, b"")

    def _close(self) -> None:
        self.done = True
        if self._channel is not None:
            self._channel.close()
