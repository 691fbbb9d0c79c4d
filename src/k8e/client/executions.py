"""Code that runs in contexts: its results, and its end."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from k8e import errors
from k8e.client import operations, requests, results
from k8e.client.operations import Operation, Send
from k8e.client.records import Record, field, shortened
from k8e.client.results import Denial, Output, ReachedLimit, Stderr, Stdout, no_denials, no_limits
from k8e.guest import wire
from k8e.guest.results import ShowRecords

MAX_RESULTS = 1 << 16  # that are kept of one run


class Result(Record):
    """A value that code in a context displayed: the last expression, or what ``display`` got."""

    data: Mapping[str, str | bytes] = field(repr=False)
    """Every representation that it has, by media type; pictures and PDF as bytes."""
    is_main_result: bool
    """Whether it is the value of the last expression."""
    left_out: tuple[str, ...] = ()
    """Media types that were too large."""

    def formats(self) -> list[str]:
        """The media types that it has."""
        return list(self.data)

    def _text(self, kind: str) -> str | None:
        value = self.data.get(kind)
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

    def _bytes(self, kind: str) -> bytes | None:
        value = self.data.get(kind)
        return value.encode() if isinstance(value, str) else value

    @property
    def text(self) -> str | None:
        return self._text("text/plain")

    @property
    def html(self) -> str | None:
        return self._text("text/html")

    @property
    def markdown(self) -> str | None:
        return self._text("text/markdown")

    @property
    def svg(self) -> str | None:
        return self._text("image/svg+xml")

    @property
    def png(self) -> bytes | None:
        return self._bytes("image/png")

    @property
    def jpeg(self) -> bytes | None:
        return self._bytes("image/jpeg")

    @property
    def pdf(self) -> bytes | None:
        return self._bytes("application/pdf")

    @property
    def latex(self) -> str | None:
        return self._text("text/latex")

    @property
    def javascript(self) -> str | None:
        return self._text("application/javascript")

    @property
    def json(self) -> Any:
        """Its JSON as a Python value; None if it has none, or none that can be read."""
        try:
            return json.loads(self.data.get("application/json", "null"))
        except (ValueError, RecursionError):
            return None

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """The bundle for a notebook."""
        from k8e.client import notebook

        return notebook.bundle(self.data)

    def __repr__(self) -> str:
        return f"Result({shortened(self.text)}, formats={self.formats()})"


class ExecutionError(Record):
    """Why code in a context failed, in the words of its program."""

    name: str
    """The exception's class, ``KeyboardInterrupt`` after an interrupt, ``ContextEnded``."""
    value: str
    traceback: str
    """As the language shows it."""


def _no_results() -> list[Result]:
    return []


class Execution(Output):
    """The outcome of code in a context. Code that fails is a result, not an exception."""

    stdout_bytes: bytes = field(repr=False)
    stderr_bytes: bytes = field(repr=False)
    error: ExecutionError | None
    execution_count: int
    """How many runs the context has had, with this one."""
    exit_code: int
    """0, or 1 after an error, 130 after an interrupt, or what the program itself says."""
    status: str
    """``completed``, ``timed_out`` or ``killed``."""
    context_state: str
    """``ready`` for more, or ``ended``: then only a restart helps, and the variables are gone."""
    session_id: str
    context_id: str
    exec_id: str
    duration_ms: int
    truncated: bool
    """Whether output or results above a limit were dropped."""
    results: list[Result] = field(default_factory=_no_results)
    """What was shown, in order."""
    denials: list[Denial] = field(default_factory=no_denials)
    """What the session's policy refused meanwhile; usually nothing."""
    limits: list[ReachedLimit] = field(default_factory=no_limits)
    """The limits of the session that it met, if it failed; usually none."""

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """The bundle for a notebook: all results, below the output."""
        from k8e.client import notebook

        printed = self.stdout + self.stderr + (self.error.traceback if self.error else "")
        return notebook.joined(printed, [notebook.bundle(item.data) for item in self.results])

    @property
    def text(self) -> str | None:
        """The value of the last expression, as text."""
        return next((item.text for item in self.results if item.is_main_result), None)


class ContextInfo(Record):
    """A context of a session."""

    context_id: str
    session_id: str
    language: str
    cwd: str
    """Where it began."""
    state: str
    """``starting``, ``ready``, ``busy`` or ``ended``."""
    ended_because: str
    """Why, if it has ended."""
    execution_count: int
    waiting: int
    """Runs in line."""
    pid: int
    """Of its program; 0 if it has ended."""


ExecutionEvent = Stdout | Stderr | Result | Execution


# Requests.


def context_call(op: str, session_id: str, **fields: Any) -> dict[str, Any]:
    given = {key: value for key, value in fields.items() if value not in (None, "")}
    return {"op": op, "session": requests.by_id(session_id), **given}


def run_call(
    session: Mapping[str, Any],
    context_id: str,
    code: str | bytes,
    timeout: float,
    options: requests.ExecOptions,
    **more: Any,
) -> dict[str, Any]:
    """Run code in a context. It is interrupted when its caller disconnects."""
    if not context_id:
        raise errors.InvalidRequest("the context id is empty")
    options = {"kill_on_disconnect": True, **options}
    call = requests.code_call(
        session, code, language="", timeout=timeout, stdin=False, options=options
    )
    del call["language"]
    return {**call, "context": context_id, **more}


# Answers.


def describe_context(fields: Mapping[str, Any]) -> Operation[ContextInfo]:
    told = yield from operations.call(fields)
    return info(told, str(told["session_id"]))


def list_contexts(fields: Mapping[str, Any]) -> Operation[list[ContextInfo]]:
    told = yield from operations.call(fields)
    return [info(item, str(told["session_id"])) for item in told["contexts"]]


def interrupt_context(fields: Mapping[str, Any]) -> Operation[bool]:
    """Interrupt a context; return whether nothing runs any more."""
    return bool((yield from operations.call(fields))["stopped"])


def info(told: Mapping[str, Any], session_id: str) -> ContextInfo:
    return ContextInfo(
        context_id=str(told["id"]),
        session_id=session_id,
        language=str(told["language"]),
        cwd=str(told["cwd"]),
        state=str(told["state"]),
        ended_because=str(told["ended_because"]),
        execution_count=int(told["execution_count"]),
        waiting=int(told["waiting"]),
        pid=int(told["pid"]),
    )


def execution_events(fields: Mapping[str, Any]) -> Operation[Execution]:
    """Run code: emits Stdout, Stderr and Result as they come, and last the Execution."""
    begun = yield from operations.call(fields)
    session_id, exec_id = str(begun["session_id"]), str(begun["id"])
    gathered = Gathered(str(begun["context"]))
    records = ShowRecords()
    consumed = operations.Consumed()
    try:
        while True:
            kind, body = yield from operations.frame()
            if kind in (wire.OUT, wire.ERR):
                event = operations.output_event(kind, body)
                gathered.streams[kind] += event.data
                yield event
                yield from consumed.add(len(event.data))
            elif kind == wire.SHOW:
                for record in records.feed(*wire.numbered(body)):
                    shown = result(record)
                    gathered.keep(shown)
                    yield shown
                yield from consumed.add(len(body) - wire.SEQ.size)
            elif kind == wire.EXIT:
                done = gathered.execution(wire.unpack_dict(body), session_id, exec_id)
                yield done
                return done
    except errors.GatewayUnreachable as error:
        raise operations.lost_exec(error, session_id, exec_id) from None
    except wire.WireError as error:
        yield Send(wire.CANCEL)
        raise errors.GuestFailed(f"the context answered nonsense: {error}") from None


def result(record: Mapping[str, Any]) -> Result:
    return Result(record["data"], record["main"], tuple(record["left_out"]))


class Gathered:
    """The output and results of a run so far."""

    def __init__(self, context_id: str) -> None:
        self.streams = {wire.OUT: bytearray(), wire.ERR: bytearray()}
        self._results: list[Result] = []
        self._context_id = context_id
        self._dropped = False

    def keep(self, shown: Result) -> None:
        if len(self._results) < MAX_RESULTS:
            self._results.append(shown)
        else:
            self._dropped = True

    def execution(self, told: Mapping[str, Any], session_id: str, exec_id: str) -> Execution:
        error: Any = told.get("error")
        return Execution(
            stdout_bytes=bytes(self.streams[wire.OUT]),
            stderr_bytes=bytes(self.streams[wire.ERR]),
            error=None
            if error is None
            else ExecutionError(*(str(error[key]) for key in ("name", "value", "traceback"))),
            execution_count=int(told["execution_count"]),
            exit_code=int(told["code"]),
            status=str(told["status"]),
            context_state=str(told["context_state"]),
            session_id=session_id,
            context_id=self._context_id,
            exec_id=exec_id,
            duration_ms=int(told["duration_ms"]),
            truncated=bool(told["truncated"] or told.get("lost") or self._dropped),
            results=self._results,
            denials=[results.denial(item) for item in told.get("denials") or ()],
            limits=results.reached(told.get("limits")),
        )


OnOutput = Callable[[bytes], object]
OnResult = Callable[[Result], object]


class ContextHandle:
    """A context by its session and id."""

    def __init__(self, session_id: str, context_id: str) -> None:
        self.session_id = session_id
        self.context_id = context_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.session_id!r}, {self.context_id!r})"

    def _about(self, op: str, **fields: Any) -> dict[str, Any]:
        return context_call(op, self.session_id, id=self.context_id, **fields)

    def _run(
        self,
        code: str | bytes,
        timeout: float,
        env: Mapping[str, str] | None,
        exec_id: str,
        output_limit: int,
    ) -> Operation[Execution]:
        options: requests.ExecOptions = {
            "env": env or {},
            "exec_id": exec_id,
            "output_limit": output_limit,
        }
        session = requests.by_id(self.session_id)
        return execution_events(run_call(session, self.context_id, code, timeout, options))


def notify(
    event: ExecutionEvent,
    on_stdout: OnOutput | None,
    on_stderr: OnOutput | None,
    on_result: OnResult | None,
) -> None:
    if isinstance(event, Stdout) and on_stdout is not None:
        on_stdout(event.data)
    elif isinstance(event, Stderr) and on_stderr is not None:
        on_stderr(event.data)
    elif isinstance(event, Result) and on_result is not None:
        on_result(event)


def ended(done: Execution | None) -> Execution:
    if done is None:
        raise errors.GuestFailed("the code ended without saying how")
    return done
