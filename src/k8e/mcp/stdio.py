"""``k8e sandbox-mcp`` over stdin and stdout: one process is one connection.

First :mod:`k8e.mcp.stdio` answers, while a thread loads the SDK; then :mod:`k8e.mcp.stdio_server`
goes on with what was read so far. Our stdout is the client's, so whatever else prints in this
process goes to stderr, and programs that it starts get neither of the two pipes.

Importing the SDK takes longer than everything else that a server does before its first tool call.
So the handshake, and the list of tools that follows it, are answered from data; the SDK is loaded
meanwhile and then hears of the handshake too. A test holds that it would have said the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import threading
from typing import Any, cast

from k8e import _version
from k8e.mcp import catalog

TYPE_CHECKING = False

if TYPE_CHECKING:
    from k8e.mcp.options import McpOptions


HANDSHAKE_VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
MODERN_VERSIONS = ("2026-07-28",)
VERSION_KEY = "io.modelcontextprotocol/protocolVersion"
CAPABILITIES_KEY = "io.modelcontextprotocol/clientCapabilities"
SERVER_KEY = "io.modelcontextprotocol/serverInfo"
NOBODY = {"name": "unknown", "version": ""}
CAPABILITIES: dict[str, Any] = {
    "resources": {"subscribe": False, "listChanged": False},
    "tools": {"listChanged": False},
}


def server_info() -> dict[str, Any]:
    return {"name": catalog.NAME, "title": catalog.TITLE, "version": _version.__version__}


class FirstAnswers:
    """Answers what it surely knows; the rest is for the SDK."""

    def __init__(self) -> None:
        self.greeted: Any = None
        """The id of the handshake that was answered: the SDK's own answer to it is not sent."""
        self._initialized = False

    def answer(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """The reply to a message, or None if the SDK must see it to reply."""
        if not _is_request(message):
            return None
        method, params = message["method"], message.get("params")
        given = fields(params)
        meta = fields(given.get("_meta"))
        if method == "initialize" and not self._initialized and _is_handshake(given):
            self._initialized, self.greeted = True, message["id"]
            return _reply(message, _initialize(given["protocolVersion"]))
        if VERSION_KEY in meta:
            known = meta[VERSION_KEY] in MODERN_VERSIONS and _is_enveloped(meta)
            return _reply(message, _discover()) if known and method == "server/discover" else None
        plain = params is None or (isinstance(params, dict) and not given.keys() - {"_meta"})
        if method == "ping" and plain:
            return _reply(message, {})
        if method == "tools/list" and self._initialized and plain:
            return _reply(message, {"tools": catalog.listed()})
        return None

    def keeps(self, message: dict[str, Any]) -> bool:
        """Whether the SDK must see a message although it was answered."""
        return message.get("method") == "initialize"


def completed(message: dict[str, Any]) -> dict[str, Any]:
    """A handshake with all its parts: clients of K8E may omit everything."""
    params = message.get("params", {})
    if message.get("method") != "initialize" or not isinstance(params, dict):
        return message
    parts = {"protocolVersion": HANDSHAKE_VERSIONS[0], "capabilities": {}, "clientInfo": NOBODY}
    return {**message, "params": {**parts, **params}}


def fields(value: Any) -> dict[str, Any]:
    """A JSON object; empty for anything else."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _is_request(message: dict[str, Any]) -> bool:
    known = {"jsonrpc", "id", "method", "params"}
    return (
        message.get("jsonrpc") == "2.0"
        and type(message.get("id")) in (int, str)
        and isinstance(message.get("method"), str)
        and not message.keys() - known
    )


def _is_handshake(params: dict[str, Any]) -> bool:
    info = fields(params.get("clientInfo"))
    return (
        isinstance(params.get("protocolVersion"), str)
        and isinstance(params.get("capabilities"), dict)
        and isinstance(info.get("name"), str)
        and isinstance(info.get("version"), str)
    )


def _is_enveloped(meta: dict[str, Any]) -> bool:
    return isinstance(meta.get(CAPABILITIES_KEY), dict)


def _reply(message: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}


def _initialize(asked: str) -> dict[str, Any]:
    return {
        "protocolVersion": asked if asked in HANDSHAKE_VERSIONS else HANDSHAKE_VERSIONS[-1],
        "capabilities": CAPABILITIES,
        "serverInfo": server_info(),
        "instructions": catalog.INSTRUCTIONS,
    }


def _discover() -> dict[str, Any]:
    return {
        "resultType": "complete",
        "ttlMs": 0,
        "cacheScope": "private",
        "supportedVersions": list(MODERN_VERSIONS),
        "capabilities": CAPABILITIES,
        "instructions": catalog.INSTRUCTIONS,
        "_meta": {SERVER_KEY: server_info()},
    }


MAX_LINE = 16 << 20
"""Bytes of one message, here and in the body of an HTTP request."""


class TooLong(Exception):
    """A line is longer than any message may be; it was skipped."""


class MessageLines:
    """Cuts bytes into lines; of one that is too long, only that fact is kept."""

    def __init__(self, limit: int = MAX_LINE) -> None:
        self._limit = limit
        self._held = bytearray()
        self._skipping = False

    def feed(self, data: bytes) -> list[bytes | TooLong]:
        """The lines that are complete now, without their ends."""
        found: list[bytes | TooLong] = []
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._take(data[start:end], found)
            if self._skipping:
                self._skipping = False
            elif self._held.strip():
                found.append(bytes(self._held))
            self._held.clear()
            start = end + 1
        self._take(data[start:], found)
        return found

    def end(self) -> list[bytes | TooLong]:
        """The last line, if nothing ends it."""
        return self.feed(b"\n")

    def _take(self, piece: bytes, found: list[bytes | TooLong]) -> None:
        if self._skipping:
            return
        self._held += piece
        if len(self._held) > self._limit:
            self._held = bytearray()
            self._skipping = True
            found.append(TooLong(f"a message has more than {self._limit} bytes"))


CHUNK = 64 << 10
PARSE_ERROR, INVALID_REQUEST = -32700, -32600


class Opening:
    """The conversation before the SDK is loaded, and what it leaves for the SDK."""

    def __init__(self, reader: int, writer: int) -> None:
        self.reader = reader
        self.writer = writer
        self.lines = MessageLines()
        self.greeter = FirstAnswers()
        self.held: list[Any] = []
        """Messages that the SDK must see, in order."""
        self.ended = False

    def talk(self) -> None:
        """Answer whatever is possible until the SDK is loaded, or the client has left."""
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
            if isinstance(message, LineRefusal):
                write(self.writer, message.reply)
                continue
            reply = self.greeter.answer(message)
            if reply is not None:
                write(self.writer, encode(reply))
            if reply is None or self.greeter.keeps(message):
                self.held.append(message)


class LineRefusal:
    """A line that is not a message, and the error for it."""

    def __init__(self, code: int, text: str) -> None:
        error = {"code": code, "message": text}
        self.reply = encode({"jsonrpc": "2.0", "id": None, "error": error})


def decode(line: bytes | TooLong) -> Any:
    """The message in a line."""
    if isinstance(line, TooLong):
        return LineRefusal(INVALID_REQUEST, f"{line}; send large files in parts")
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        return LineRefusal(PARSE_ERROR, f"not JSON: {error}")
    if isinstance(message, dict):
        return completed(fields(message))
    return LineRefusal(INVALID_REQUEST, "a message is one JSON object; batches are not understood")


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
    """Import the SDK, and signal the end; a failure is raised where the SDK is needed."""
    try:
        with contextlib.suppress(ImportError):
            from k8e.mcp import stdio_server as stdio_server
    finally:
        with contextlib.suppress(OSError):  # the client may have left, and the waiter too
            os.write(loaded, b".")
        os.close(loaded)


def serve(options: McpOptions) -> int:
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
    from k8e.mcp import stdio_server

    return stdio_server.run(opening, options)
