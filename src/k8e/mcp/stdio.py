"""``k8e sandbox-mcp`` over stdin and stdout: one process is one connection.

First :mod:`k8e.mcp.greeting` answers, while a thread loads the SDK; then :mod:`k8e.mcp.piping`
goes on with what was read so far. Our stdout is the client's, so whatever else prints in this
process goes to stderr, and programs that it starts get neither of the two pipes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import threading

from k8e.mcp.greeting import Greeter, completed, fields
from k8e.mcp.lines import Lines, TooLong

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from k8e.mcp.options import Options

CHUNK = 64 << 10
PARSE_ERROR, INVALID_REQUEST = -32700, -32600


class Opening:
    """The conversation before the SDK is there, and what it leaves behind."""

    def __init__(self, reader: int, writer: int) -> None:
        self.reader = reader
        self.writer = writer
        self.lines = Lines()
        self.greeter = Greeter()
        self.held: list[Any] = []
        """Messages that the SDK must see, in order."""
        self.ended = False

    def talk(self) -> None:
        """Answer what can be answered until the SDK is loaded, or the client has left."""
        ready, loaded = os.pipe2(os.O_CLOEXEC)
        loader: threading.Thread | None = None
        try:
            while not self.ended:
                readable, _, _ = select.select([self.reader, ready], [], [])
                if ready in readable:
                    break
                self.take(os.read(self.reader, CHUNK))
                if loader is None:
                    # Not before: two threads that both run Python slow each other down.
                    loader = threading.Thread(target=_load, args=[loaded], daemon=True)
                    loader.start()
            if loader is not None and not self.ended:
                loader.join()
        finally:
            os.close(ready)

    def owes(self) -> bool:
        """Whether a client that has left may still read answers which only the SDK can give."""
        greeted = self.greeter.greeted
        return any("method" in item and item.get("id", greeted) != greeted for item in self.held)

    def take(self, data: bytes) -> None:
        self.ended = not data
        for line in self.lines.feed(data) if data else self.lines.end():
            message = decode(line)
            if isinstance(message, Refused):
                write(self.writer, message.reply)
                continue
            reply = self.greeter.answer(message)
            if reply is not None:
                write(self.writer, encode(reply))
            if reply is None or self.greeter.keeps(message):
                self.held.append(message)


class Refused:
    """A line that is no message, and what to say to it."""

    def __init__(self, code: int, text: str) -> None:
        error = {"code": code, "message": text}
        self.reply = encode({"jsonrpc": "2.0", "id": None, "error": error})


def decode(line: bytes | TooLong) -> Any:
    """The message in a line."""
    if isinstance(line, TooLong):
        return Refused(INVALID_REQUEST, f"{line}; send large files in parts")
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Refused(PARSE_ERROR, f"not JSON: {error}")
    if isinstance(message, dict):
        return completed(fields(message))
    return Refused(INVALID_REQUEST, "a message is one JSON object; batches are not understood")


def encode(message: dict[str, Any]) -> bytes:
    return (
        json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
        + b"\n"
    )


def write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _load(loaded: int) -> None:
    """Import what takes long, and say so; who needs it gets the error if it fails."""
    try:
        with contextlib.suppress(ImportError):
            from k8e.mcp import piping as piping
    finally:
        with contextlib.suppress(OSError):  # the client may have left, and who waited too
            os.write(loaded, b".")
        os.close(loaded)


def serve(options: Options) -> int:
    """Serve the client at our stdin and stdout until it leaves; the exit code."""
    reader, writer = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    opening = Opening(reader, writer)
    try:
        opening.talk()
    except (BrokenPipeError, ConnectionResetError):
        return 0
    if opening.ended and not opening.owes():
        return 0
    from k8e.mcp import piping

    return piping.run(opening, options)
