"""How the guest talks to the program of a context, by the language that this is for.

A talk turns a cell into the bytes that the program reads, and what the program says into messages:
``(kind, number of the cell, value)``. The program is hostile: what is malformed is a WireError.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from k8e.guest.records import check_shape
from k8e.guest.spawn import as_user
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

MAX_MESSAGE = 8 << 20  # bytes that a program may say at once
MAX_WORD = 512 << 10  # the same, of what has no content: that it is ready, how a cell ended
MAX_LINE = 256
RESULT_KEYS = 4  # those of a record, and whether the program waits for an answer
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
    """Where the programs of a packed guest are."""
    return os.path.splitext(sys.argv[0])[0].replace("guest-", "kernels-")


class FramedTalk:
    """With a program that speaks frames: Python's and Node's."""

    reads_stdin = False

    def __init__(self, argv: list[str]) -> None:
        self._argv = argv
        self._splitter = Splitter(MAX_MESSAGE)

    def command(self, control: int) -> list[str]:
        """What to start; ``control`` is the descriptor that it inherits."""
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
        """What stops a cell that waits; empty where a signal does."""
        return b""

    def finished(self) -> None:
        """A cell has ended."""


class NodeTalk(FramedTalk):
    """Node cannot tell for which cell a signal was that comes while one waits."""

    def interruption(self, number: int) -> bytes:
        return frame(CANCEL, number)


class BashTalk:
    """With an interactive bash: it reads lines from the socket, and its prompt says a cell's end.

    Only an interactive shell survives an interrupt, with all of its variables. The code is in a
    file, because bash reads what it is typed byte by byte.
    """

    reads_stdin = True

    def __init__(self, name: str) -> None:
        self._path = f"/tmp/.k8e-{name}-{os.urandom(4).hex()}"
        self._rest = b""
        self._ready = False

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
        line = f' __k8e_cell={number}; eval "$(<{self._path})" </dev/null 9>&-\n'
        return line.encode()

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
        if len(words) != 2 or not all(word.isdigit() and len(word) < 10 for word in words):
            raise WireError("not a word of a context")
        return (EXIT, int(words[0]), {"code": int(words[1])})

    def interruption(self, number: int) -> bytes:
        return b""

    def finished(self) -> None:
        try:
            with as_user():
                os.unlink(self._path)
        except OSError:
            pass


def _quote(text: bytes) -> bytes:
    """As a shell reads it back."""
    return b"'" + text.replace(b"'", b"'\\''") + b"'"


def talk_in(language: str, name: str) -> FramedTalk | BashTalk:
    folder = kernel_folder()
    if language == "bash":
        return BashTalk(name)
    if language == "node":
        return NodeTalk(["node", folder + "/node.js"])
    return FramedTalk(["python3", folder + "/python.py"])
