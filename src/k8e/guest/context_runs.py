"""Runs of code in a context, and the protocol of each language's program.

A talk turns a cell into the bytes that the program reads, and what the program says into messages:
``(kind, number of the cell, value)``. The program is hostile: malformed messages raise WireError.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from k8e.guest.execs import Exec
from k8e.guest.loop import Loop
from k8e.guest.results import MAX_RECORD, MAX_TYPE, MAX_WAYS, check_shape, pack_record
from k8e.guest.spawn import as_user
from k8e.guest.streams import CHUNK_COST
from k8e.guest.wire import (
    CALL,
    CANCEL,
    EXIT,
    HELLO,
    SHOW,
    Splitter,
    WireError,
    frame,
    pack,
    unpack_dict,
)

# What the program of a context says has no static type.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false


STOP_GRACE = 3.0  # seconds between an interrupt and the end of the context
MAX_UNREAD_SHOWN = 16 << 20  # bytes of results that wait for a reader
ERROR_TEXT = {"name": 1 << 10, "value": 16 << 10, "traceback": 80 << 10}  # characters at most


class CellExec(Exec):
    """A run in a context: it waits in line, runs and ends; with the operations of an exec."""

    def __init__(self, loop: Loop, exec_id: str, spec: dict[str, Any], context: Any) -> None:
        super().__init__(loop, {}, exec_id, dict(spec, tty=None))
        self.context = context
        self.number = 0
        self.source: bytes = spec["code"]
        self.variables: dict[str, str] = dict(spec.get("env") or {})
        self.error: dict[str, str] | None = None
        self.pid = context.pid

    def set_deadline(self) -> None:
        """Start the clock of its time-out."""
        if self._timeout and self.code is None:
            self._deadline = self._loop.later(self._timeout, self._time_out)

    @property
    def is_waiting(self) -> bool:
        """Whether other runs come before it."""
        return self.code is None and self.context.current is not self

    # Output.

    def show(self, value: dict[str, Any]) -> None:
        """Take a result. Unreadable or oversized ones are left out, and the output says so."""
        record = checked_record(value)
        if record is None or self.output.held > MAX_UNREAD_SHOWN:
            self.output.truncated = True
            return
        self.output.add(SHOW, pack_record(record))

    def _resume(self) -> None:
        self.context.listen()

    # Ending.

    def abandon(self) -> None:
        """Stop it because its result is no longer wanted; the context stays."""
        if self.is_waiting:
            self.end(128 + signal.SIGINT, status="killed")
        elif self.code is None:
            self.context.interrupt()

    def terminate(self, status: str) -> None:
        """Interrupt it; if that does not help, end the whole context."""
        if self.code is not None:
            return
        if self.status == "running":
            self.status = status
        if self.is_waiting:
            self.end(128 + signal.SIGINT)
            return
        self.context.interrupt()
        self._loop.later(STOP_GRACE, self.kill_now)

    def kill_now(self) -> None:
        if self.code is None:
            self.context.kill("its code did not stop when it was interrupted")

    def send_signal(self, number: int) -> None:
        if self.code is not None or self.is_waiting:
            return
        if number == signal.SIGINT:
            self.context.interrupt()
        else:
            os.killpg(self.context.pid, number)

    def end(
        self, code: int, *, error: dict[str, str] | None = None, status: str = "completed"
    ) -> None:
        """End it with an error from its program or from the guest."""
        if self.code is not None:
            return
        self.context.drop(self)
        self.code, self.error = code, error
        if self.status == "running":
            self.status = status
        self.ended = time.monotonic()
        if code:
            words = (error or {}).get("value", "")  # an exception is not printed
            self._find_limits(words.encode("utf-8", "replace"))
        if self._deadline is not None:
            self._deadline.cancel()
        for tell in self.on_exit:
            tell()
        self._say_all()

    def introduce(self) -> dict[str, Any]:
        told = super().introduce()
        return dict(told, context=self.context.id, execution_count=self.number)

    def describe(self, parts: int = 16, part_size: int = 200) -> dict[str, Any]:
        self.argv = [self.context.language]
        return super().describe(parts, part_size)

    def _describe_end(self) -> dict[str, Any]:
        told = super()._describe_end()
        told["context"] = self.context.id
        told["context_state"] = self.context.state
        told["execution_count"] = self.number
        if self.error is not None:
            told["error"] = self.error
        return told


def checked_record(value: dict[str, Any]) -> bytes | None:
    """The record of a result to pass on; None if it is malformed."""
    data: Any = value.get("data")
    left_out: Any = value.get("left_out")
    if not isinstance(data, dict) or len(data) > MAX_WAYS:
        return None
    for kind, content in data.items():
        if len(kind) > MAX_TYPE or not isinstance(content, (str, bytes)):
            return None
    kept: list[str] = []
    if isinstance(left_out, list):
        kept = [kind[:MAX_TYPE] for kind in left_out[:MAX_WAYS] if isinstance(kind, str)]
    if not data and not kept:
        return None
    record = pack({"data": data, "main": value.get("main") is True, "left_out": kept})
    return record if len(record) <= MAX_RECORD else None


def checked_error(value: dict[str, Any]) -> dict[str, str] | None:
    """The error of a cell as its program reported it; None if it is malformed."""
    if not isinstance(value.get("name"), str):
        return None
    found = {key: value.get(key) for key in ERROR_TEXT}
    return {
        key: text[: ERROR_TEXT[key]] if isinstance(text, str) else "" for key, text in found.items()
    }


def between_cost(data: bytes) -> int:
    return len(data) + CHUNK_COST


MAX_MESSAGE = 8 << 20  # bytes of one message of a program
MAX_WORD = 512 << 10  # the same, for messages without content: ready, end of a cell
MAX_LINE = 256
BEGINS = "begins"  # what bash prints once it has read the whole line of a cell
RESULT_KEYS = 4  # keys of a record, and whether the program waits for an answer
CONTEXT_LANGUAGES = {
    "python": "python",
    "python3": "python",
    "py": "python",
    "bash": "bash",
    "sh": "bash",
    "shell": "bash",
    "node": "node",
    "nodejs": "node",
    "js": "node",
    "javascript": "node",
}


def kernel_folder() -> str:
    """The folder with the programs of a packed guest."""
    return os.path.splitext(sys.argv[0])[0].replace("guest-", "kernels-")


class FramedTalk:
    """Talks to programs that speak frames: Python's and Node's."""

    reads_stdin = False
    stops_by_word = False  # whether the program stops a cell on a message alone, without a signal

    def __init__(self, argv: list[str]) -> None:
        self._argv = argv
        self._splitter = Splitter(MAX_MESSAGE)

    def command(self, control: int) -> list[str]:
        """The command to start; it inherits the descriptor ``control``."""
        return [*self._argv, str(control)]

    def request(self, number: int, code: bytes, env: dict[str, str]) -> bytes:
        return frame(CALL, number, pack({"code": code, "env": env}))

    def feed(self, data: bytes) -> list[tuple[int, int, dict[str, Any]]]:
        told: list[tuple[int, int, dict[str, Any]]] = []
        for kind, number, body in self._splitter.feed(data):
            if kind not in (HELLO, SHOW, EXIT):
                raise WireError(f"frame {kind} from a context")
            if kind == SHOW:
                check_shape(body, RESULT_KEYS)
            elif len(body) > MAX_WORD:
                raise WireError(f"frame {kind} of {len(body)} bytes from a context")
            told.append((kind, number, unpack_dict(body)))
        return told

    def interruption(self, number: int) -> bytes:
        """The message that tells the program, before any signal, which cell is interrupted."""
        return frame(CANCEL, number)

    def has_begun(self, number: int) -> bool:
        """Whether a signal from now on is for this cell."""
        return True

    def finished(self) -> None:
        """Note that a cell has ended."""


class NodeTalk(FramedTalk):
    """Node cannot tell which cell a signal was for, and one at the wrong moment would end it."""

    stops_by_word = True


class BashTalk:
    """Talks to an interactive bash: it reads lines from the socket; its prompt marks a cell's end.

    Only an interactive shell survives an interrupt, with all of its variables. The code is in a
    file, because bash reads what it is typed byte by byte.
    """

    reads_stdin = True
    stops_by_word = False

    def __init__(self, name: str) -> None:
        self._path = f"/tmp/.k8e-{name}-{os.urandom(4).hex()}"
        self._rest = b""
        self._ready = False
        self._begun = 0

    def command(self, control: int) -> list[str]:
        script = kernel_folder() + "/bash.sh"
        return ["bash", "--noprofile", "--noediting", "--rcfile", script, "-i"]

    def request(self, number: int, code: bytes, env: dict[str, str]) -> bytes:
        if b"\0" in code:
            raise ValueError("the code has a NUL byte")
        if env:
            given = [name.encode() + b"=" + _quote(os.fsencode(env[name])) for name in env]
            code = b" ".join([*given, b"eval", _quote(code)])
        self.finished()
        with as_user():
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = os.open(self._path, flags, 0o600)
            try:
                view = memoryview(code)
                while view:
                    view = view[os.write(fd, view) :]
            finally:
                os.close(fd)
        # The space is for bash to lose: an interrupt that comes after the end of a cell can be
        # noted right before bash waits for a line, and then costs the first byte of it.
        # It says when it has read the whole line: an interrupt before that would cost a part of it,
        # and stop nothing.
        begin = f'__k8e_cell={number}; printf "{number} {BEGINS}\\n" >&9'
        return f' {begin}; eval "$(<{self._path})" </dev/null 9>&-\n'.encode()

    def feed(self, data: bytes) -> list[tuple[int, int, dict[str, Any]]]:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_LINE:
            raise WireError("a long line from a context")
        return [self._message(line) for line in lines]

    def _message(self, line: bytes) -> tuple[int, int, dict[str, Any]]:
        words = line[:MAX_LINE].split()
        if not self._ready and words == [b"0"]:
            self._ready = True
            return (HELLO, 0, {})
        begins = len(words) == 2 and words[1] == BEGINS.encode()
        numbers = words[:1] if begins else words
        known = len(words) == 2 and all(word.isdigit() and len(word) < 10 for word in numbers)
        if not known:
            raise WireError("not a word of a context")
        if begins:
            self._begun = int(words[0])
            return (CALL, self._begun, {})
        return (EXIT, int(words[0]), {"code": int(words[1])})

    def interruption(self, number: int) -> bytes:
        return b""

    def has_begun(self, number: int) -> bool:
        return self._begun == number

    def finished(self) -> None:
        try:
            with as_user():
                os.unlink(self._path)
        except OSError:
            pass


def _quote(text: bytes) -> bytes:
    """Quote for a shell."""
    return b"'" + text.replace(b"'", b"'\\''") + b"'"


def talk_in(language: str, name: str) -> FramedTalk | BashTalk:
    folder = kernel_folder()
    if language == "bash":
        return BashTalk(name)
    if language == "node":
        return NodeTalk(["node", folder + "/node.js"])
    return FramedTalk(["python3", folder + "/python.py"])
