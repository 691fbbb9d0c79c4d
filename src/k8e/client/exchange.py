"""The exchange with an interactive program.

Its methods are generators, as in :mod:`k8e.client.operations`: they yield :class:`Send`, or
``MORE`` when they cannot go on before another frame has come. The driver gives each frame to
:meth:`Exchange.receive`, whichever of them waits for it.

Output is taken from the connection only while a call waits for something. So a program whose output
is not read is slowed down, and one that is written to and read from in turns never blocks: output
that arrives while something else is waited for is kept, up to ``MOST_KEPT`` bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping
from typing import Any

from k8e import errors
from k8e.client import operations, requests, results
from k8e.client.operations import CREDIT_STEP, Operation, Send
from k8e.client.results import ExecResult, Exit, Foreground, Stderr, Stdout
from k8e.guest import wire

MOST_KEPT = 64 << 20
"""Bytes of output that are kept while something else is waited for."""


class More:
    """A request for another frame."""


MORE = More()
Steps = Generator[Send | More, None, Any]


class Exchange:
    """One program's output that was taken in and not read, and the input that it may get."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.run_id = requests.run_id(fields["session"]["id"], fields["id"])
        self.begun = False
        self.exit: Exit | None = None
        self._fields = fields
        self._failure: Exception | None = None
        self._events: dict[type[Stdout | Stderr], deque[Stdout | Stderr]] = {
            Stdout: deque(),
            Stderr: deque(),
        }
        self._kept = 0
        self._owed = 0  # bytes taken in that were not reported yet
        self._room = wire.WINDOW
        self._stdin_open = bool(fields.get("stdin") or fields.get("tty"))
        self._exit_told = False
        self._result: ExecResult | None = None

    # From the gateway.

    @property
    def over(self) -> bool:
        """Whether no more frames will come."""
        return self.exit is not None or self._failure is not None

    def receive(self, kind: int, body: bytes) -> None:
        if kind in (wire.OUT, wire.ERR):
            event = operations.output_event(kind, body)
            self._events[type(event)].append(event)
            self._kept += len(event.data)
            self._owed += len(event.data)
        elif kind == wire.SHOW:  # only contexts send these, and they are not talked to
            self._owed += len(body) - wire.SEQ.size
        elif kind == wire.CREDIT:
            self._room += wire.CREDIT_BODY.unpack(body)[0]
        elif kind == wire.EXIT:
            data = wire.unpack_dict(body)
            self.exit = operations.exit_event(data, *requests.split_run_id(self.run_id))
        elif kind == wire.RESULT:
            self.begun = True
        elif kind == wire.ERROR:
            self._failure = errors.from_wire(wire.unpack_dict(body))

    def fail(self, error: Exception) -> None:
        """The connection was lost."""
        if self.begun:
            error = operations.lost_exec(error, *requests.split_run_id(self.run_id))
        self._failure = error

    def _more(self) -> Steps:
        """Wait for a frame, and let the program print as many bytes again as it did."""
        if self._failure is not None:
            raise self._failure
        if self._kept >= MOST_KEPT:
            raise errors.LimitExceeded(
                f"{self._kept} bytes of output wait to be read",
                hint="read them between writes, or in another thread or task",
            )
        yield MORE
        if self._owed >= CREDIT_STEP and not self.over:
            owed, self._owed = self._owed, 0
            yield Send(wire.CREDIT, wire.CREDIT_BODY.pack(owed))

    # Starting and writing.

    def begin(self) -> Steps:
        yield Send(wire.CALL, wire.pack(self._fields))
        while not self.begun:
            yield from self._more()

    def write(self, data: str | bytes) -> Steps:
        if not self._stdin_open:
            raise ValueError("the stdin of this program is closed")
        for part in requests.cut(data):
            while self._room < len(part) and self.exit is None:
                yield from self._more()
            if self.exit is not None:
                raise BrokenPipeError(32, "the program has ended")
            if self._failure is not None:
                raise self._failure
            self._room -= len(part)
            yield Send(wire.STDIN, part)

    def close_stdin(self) -> Steps:
        if self._stdin_open and not self.over:
            yield Send(wire.STDIN_END)
        self._stdin_open = bool(self._fields.get("tty"))  # there it is a key, and no end

    # Reading.

    def _take(self, kind: type[Stdout | Stderr]) -> Stdout | Stderr:
        event = self._events[kind].popleft()
        self._kept -= len(event.data)
        return event

    def _put_back(self, event: Stdout | Stderr) -> None:
        if event.data:
            self._events[type(event)].appendleft(event)
            self._kept += len(event.data)

    def next_event(self) -> Steps:
        """The oldest unread event; None after the exit."""
        while True:
            heads = [queue[0] for queue in self._events.values() if queue]
            if heads:
                return self._take(type(min(heads, key=lambda event: event.seq)))
            if self.exit is not None:
                told, self._exit_told = self._exit_told, True
                return None if told else self.exit
            yield from self._more()

    def read(self, count: int) -> Steps:
        """Some bytes of stdout as soon as there are any; all up to the end if ``count`` < 0."""
        found: list[bytes] = []
        stdout = self._events[Stdout]
        while count:
            while stdout:
                event = self._take(Stdout)
                if count < 0:
                    found.append(event.data)
                    continue
                self._put_back(Stdout(event.data[count:], event.seq + count))
                return event.data[:count]
            if self.exit is not None:
                break
            yield from self._more()
        return b"".join(found)

    def read_until(self, marker: bytes) -> Steps:
        """Stdout up to and with ``marker``; no output is lost if it never comes."""
        if not marker:
            raise ValueError("the marker is empty")
        found = bytearray()
        seq = -1
        try:
            while True:
                while not self._events[Stdout]:
                    if self.exit is not None:
                        raise EOFError(f"the program ended before it printed {marker!r}")
                    yield from self._more()
                event = self._take(Stdout)
                seq = event.seq if seq < 0 else seq
                searched = max(0, len(found) - len(marker) + 1)
                found += event.data
                at = found.find(marker, searched)
                if at >= 0:
                    end = at + len(marker)
                    rest = bytes(found[end:])
                    del found[end:]
                    done, found = bytes(found), bytearray()
                    self._put_back(Stdout(rest, event.seq + len(event.data) - len(rest)))
                    return done
        finally:
            self._put_back(Stdout(bytes(found), seq))

    def wait(self) -> Steps:
        """The result of the program, with the unread output."""
        while self.exit is None:
            yield from self._more()
        if self._result is None:
            rest = {
                kind: b"".join(event.data for event in queue)
                for kind, queue in self._events.items()
            }
            self._clear()
            self._exit_told = True
            self._result = operations.collected(self.exit, rest[Stdout], rest[Stderr])
        return self._result

    def drain(self) -> Steps:
        """Wait for the end, and discard the output."""
        while not self.over:
            self._clear()
            yield from self._more()

    def _clear(self) -> None:
        for queue in self._events.values():
            queue.clear()
        self._kept = 0


def open_call(
    session_id: str, command: Any, *, timeout: float, stdin: bool, options: requests.ExecOptions
) -> dict[str, Any]:
    """Start an interactive program. It ends with us: no other client knows what to tell it."""
    options = {"output_limit": 0, "kill_on_disconnect": True, **options}
    return requests.command_call(
        requests.by_id(session_id), command, timeout=timeout, stdin=stdin, options=options
    )


def terminal_programs(program: Any) -> list[Any]:
    """The programs to try on a terminal, in this order."""
    return [["bash"], ["sh"]] if program is None else [program]


def foreground_group(fields: Mapping[str, Any]) -> Operation[Foreground]:
    return results.foreground((yield from operations.call(fields)))
