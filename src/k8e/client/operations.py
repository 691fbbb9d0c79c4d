"""Every operation of the SDK, written once, with no input or output of its own.

An operation is a generator. It yields requests, and a driver (blocking or asynchronous, over a
local socket or gRPC) fulfils them:

* :class:`Send`: send a frame;
* ``RECEIVE``: be given the next frame, as ``(kind, body)``;
* ``PULL``: be given the next bytes of what is being uploaded, empty at the end;
* anything else is an event for the caller.

What it returns is the result. A lost connection is thrown into it.

A script is a generator. It yields what it wants done, and is given what came of it:

* :class:`Do`: local work that may block, which an asynchronous client leaves to a thread;
* :class:`Ask`: an operation, with what it uploads;
* :class:`Fetch`: an operation whose chunks are to be written somewhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple, TypeVar, cast

from k8e import errors
from k8e.client import results
from k8e.client.records import Record
from k8e.client.results import Chunk, ExecEvent, ExecResult, Exit, FileEntry, Stderr, Stdout
from k8e.guest import wire

T = TypeVar("T")
CREDIT_STEP = 256 << 10  # consumed bytes are reported in steps, not for each frame
RETRY_DELAYS = (0.0, 0.1, 0.5)
"""Seconds before each new try to reach a gateway that went away; the first may meet a dying one."""
MOST_ENTRIES = 1 << 20  # of a listing


class Send(NamedTuple):
    """A frame to send."""

    kind: int
    body: bytes | memoryview = b""


class Want:
    """A request that only a driver can fulfil."""


RECEIVE = Want()
PULL = Want()

Operation = Generator[Any, Any, T]
Progress = Callable[[int, int | None], object]
"""Called with the bytes that have been moved, and how many it will be if that is known."""
Frame = tuple[int, bytes]


def call(fields: Mapping[str, Any]) -> Operation[dict[str, Any]]:
    """Ask, and get the answer."""
    yield Send(wire.CALL, wire.pack(fields))
    return (yield from _result())


def _result() -> Operation[dict[str, Any]]:
    while True:
        kind, body = yield from frame()
        if kind == wire.RESULT:
            result = wire.unpack_dict(body, len(body))  # a gateway may list thousands of sessions
            # A weaker runtime than usual is always reported; `doctor` has its own way to do that.
            if result.get("warning") and "runtimes" not in result:
                warnings.warn(str(result["warning"]), RuntimeWarning, stacklevel=1)
            return result


def frame() -> Operation[Frame]:
    """The next frame; an ERROR is raised."""
    frame: Frame = yield RECEIVE
    if frame[0] == wire.ERROR:
        raise errors.from_wire(wire.unpack_dict(frame[1]))
    return frame


class Consumed:
    """Counts bytes that were taken, and says when to grant new ones."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, count: int) -> Operation[None]:
        self._count += count
        if self._count >= CREDIT_STEP:
            yield Send(wire.CREDIT, wire.CREDIT_BODY.pack(self._count))
            self._count = 0


# Commands.


def exec_events(fields: Mapping[str, Any]) -> Operation[Exit]:
    """Run a command: emits Stdout and Stderr as they come, and Exit, which it also returns."""
    yield Send(wire.CALL, wire.pack(fields))
    result = yield from _result()
    session_id, exec_id = str(result["session_id"]), str(result["id"])
    consumed = Consumed()
    stdin = _Upload(wire.STDIN, wire.STDIN_END) if fields.get("stdin") else None
    try:
        while True:
            if stdin is not None:
                yield from stdin.push()
            kind, body = yield from frame()
            if kind in (wire.OUT, wire.ERR):
                yield output_event(kind, body)
                yield from consumed.add(len(body) - wire.SEQ.size)
            elif kind == wire.SHOW:  # of a context; callers that want results use executions.events
                yield from consumed.add(len(body) - wire.SEQ.size)
            elif kind == wire.CREDIT and stdin is not None:
                stdin.credit += wire.CREDIT_BODY.unpack(body)[0]
            elif kind == wire.EXIT:
                end = exit_event(wire.unpack_dict(body), session_id, exec_id)
                yield end
                return end
    except errors.GatewayUnreachable as error:
        raise lost_exec(error, session_id, exec_id) from None


def output_event(kind: int, body: bytes) -> Stdout | Stderr:
    seq = wire.SEQ.unpack_from(body)[0]
    return (Stdout if kind == wire.OUT else Stderr)(body[wire.SEQ.size :], seq)


def exit_event(data: dict[str, Any], session_id: str, exec_id: str) -> Exit:
    return Exit(
        exit_code=int(data["code"]),
        status=str(data["status"]),
        signal=int(data["signal"]),
        duration_ms=int(data["duration_ms"]),
        truncated=bool(data["truncated"]),
        session_id=session_id,
        exec_id=exec_id,
        denials=[results.denial(item) for item in data.get("denials") or ()],
        limits=results.reached(data.get("limits")),
    )


def exec_result(fields: Mapping[str, Any]) -> Operation[ExecResult]:
    """Run a command and collect its output."""
    output: dict[type[ExecEvent], list[bytes]] = {Stdout: [], Stderr: []}
    events = exec_events(fields)
    step = next(events)
    try:
        while True:
            if isinstance(step, (Stdout, Stderr)):
                output[type(step)].append(step.data)
                step = events.send(None)
            elif isinstance(step, Exit):
                return collected(step, b"".join(output[Stdout]), b"".join(output[Stderr]))
            else:
                try:
                    answer = yield step
                except errors.GatewayUnreachable as error:
                    step = events.throw(error)
                else:
                    step = events.send(answer)
    finally:
        events.close()


def collected(end: Exit, stdout: bytes, stderr: bytes) -> ExecResult:
    return ExecResult(
        stdout_bytes=stdout,
        stderr_bytes=stderr,
        exit_code=end.exit_code,
        session_id=end.session_id,
        duration_ms=end.duration_ms,
        truncated=end.truncated,
        status=end.status,
        exec_id=end.exec_id,
        denials=end.denials,
        limits=end.limits,
    )


def lost_exec(error: Exception, session_id: str, exec_id: str) -> Exception:
    """The error for a gateway that went away while a command ran."""
    if not isinstance(error, errors.GatewayUnreachable):
        return error
    lost = errors.ProgramLost(
        f"{error.message} while command {exec_id} ran in session {session_id}",
        hint="the command goes on in its sandbox until it ends or times out, and was not started "
        "again; the next call starts a gateway, which takes the session over, and "
        f"get_run('{session_id}.{exec_id}') comes back to it",
    )
    lost.session_id, lost.exec_id = session_id, exec_id
    return lost


# Files.


def read(fields: Mapping[str, Any], progress: Progress | None = None) -> Operation[FileEntry]:
    """Read a file: emits its bytes as Chunks, returns its description."""
    found = results.entry((yield from call(fields)))
    total = _to_come(found.size, fields)
    done = 0
    consumed = Consumed()
    while True:
        kind, body = yield from frame()
        if kind == wire.DATA:
            yield Chunk(body)
            done += len(body)
            if progress is not None:
                progress(done, total)
            yield from consumed.add(len(body))
        elif kind == wire.END:
            return found


def _to_come(size: int, fields: Mapping[str, Any]) -> int | None:
    """How much of a file will be read; files of the kernel do not know their size."""
    left = max(0, size - int(fields.get("offset") or 0))
    return min(left, int(fields.get("length", left))) if size else None


def write(
    fields: Mapping[str, Any], progress: Progress | None = None, total: int | None = None
) -> Operation[dict[str, Any]]:
    """Write the bytes from the driver into a file; return path and size."""
    yield from call(fields)
    upload = _Upload(wire.DATA, wire.END, progress, total)
    while True:
        yield from upload.push()
        kind, body = yield from frame()
        if kind == wire.CREDIT:
            upload.credit += wire.CREDIT_BODY.unpack(body)[0]
        elif kind == wire.RESULT:
            return wire.unpack_dict(body)


class _Upload:
    """Sends the bytes from the driver, never more than there is credit for."""

    def __init__(
        self, kind: int, end: int, progress: Progress | None = None, total: int | None = None
    ) -> None:
        self.credit = wire.WINDOW
        self._kind = kind
        self._end = end
        self._progress = progress
        self._total = total
        self._sent = 0
        self._held: bytes | memoryview = b""
        self._ended = False

    def push(self) -> Operation[None]:
        """Send until there is no more credit, or nothing more to send."""
        while not self._ended and self.credit >= len(self._held):
            if self._held:
                self.credit -= len(self._held)
                yield Send(self._kind, self._held)
                self._sent += len(self._held)
                if self._progress is not None:
                    self._progress(self._sent, self._total)
            self._held = yield PULL
            if not self._held:
                self._ended = True
                yield Send(self._end)


def listing(fields: Mapping[str, Any]) -> Operation[list[FileEntry]]:
    """List a folder."""
    yield from call(fields)
    found: list[FileEntry] = []
    consumed = Consumed()
    while True:
        kind, body = yield from frame()
        if kind == wire.DATA:
            entries = cast("list[dict[str, Any]]", wire.unpack(body))
            found.extend(map(results.entry, entries))
            if len(found) > MOST_ENTRIES:
                raise errors.LimitExceeded(f"there are more than {MOST_ENTRIES} files")
            yield from consumed.add(len(body))
        elif kind == wire.END:
            return found


def stat(fields: Mapping[str, Any]) -> Operation[FileEntry]:
    return results.entry((yield from call(fields)))


# Sessions.


def session(fields: Mapping[str, Any]) -> Operation[results.SessionInfo]:
    """An operation that is answered with one session."""
    return results.session((yield from call(fields))["session"])


def sessions(fields: Mapping[str, Any]) -> Operation[list[results.SessionInfo]]:
    return [results.session(item) for item in (yield from call(fields))["sessions"]]


def update_allowed_hosts(fields: Mapping[str, Any]) -> Operation[list[str]]:
    return list((yield from call(fields))["hosts"])


def egress(fields: Mapping[str, Any]) -> Operation[results.Egress]:
    return results.egress((yield from call(fields)))


def execs(fields: Mapping[str, Any]) -> Operation[list[results.ExecInfo]]:
    return [results.exec_info(item) for item in (yield from call(fields))["execs"]]


def processes(fields: Mapping[str, Any]) -> Operation[list[results.ProcessInfo]]:
    return [results.process(item) for item in (yield from call(fields))["processes"]]


Skipped = Callable[[str, str], object]


class Do(NamedTuple):
    """Local work."""

    work: Callable[[], Any]


class Ask(NamedTuple):
    """One operation, and what is uploaded by it."""

    operation: Operation[Any]
    source: Any = None


class Fetch(NamedTuple):
    """One download, and the function that writes each piece of it, which may block."""

    operation: Operation[Any]
    write: Callable[[bytes], object]


Step = Do | Ask | Fetch
Script = Generator[Step, Any, T]


class Copied(Record, frozen=False):
    """A count of what was copied."""

    bytes: int = 0
    files: int = 0
    folders: int = 0
    links: int = 0
    skipped: int = 0
    """What cannot be copied: FIFOs, sockets, devices, and links that lead out."""
    failed: int = 0
    """Files that could not be read, of which ``on_skip`` was told."""


class Tally:
    """Counts copied files, and reports progress."""

    def __init__(self, progress: Progress | None, on_skip: Skipped | None) -> None:
        self.copied = Copied()
        self.total: int | None = None
        self._progress = progress
        self._on_skip = on_skip

    def part(self) -> Progress:
        """Progress of one file among others."""
        before = self.copied.bytes

        def progress(done: int, total: int | None) -> None:
            self.copied.bytes = before + done
            if self._progress is not None:
                self._progress(self.copied.bytes, total if self.total is None else self.total)

        return progress

    def skip(self, path: str, why: str) -> None:
        """Skip something that cannot be copied. Without a listener, that is a warning."""
        self.copied.skipped += 1
        if self._on_skip is not None:
            self._on_skip(path, why)
        else:
            warnings.warn(f"{path!r} is not copied: {why}", RuntimeWarning, stacklevel=1)

    def fail(self, path: str, error: OSError) -> None:
        """Report a failure to copy something. Without a listener, it ends the copy."""
        self.copied.failed += 1
        if self._on_skip is None:
            raise error
        self._on_skip(path, error.strerror or str(error))
