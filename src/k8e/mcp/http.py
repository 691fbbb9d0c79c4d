"""The HTTP app of the MCP server, alone or mounted in a gateway's.

It is a plain ASGI app with a lifespan, so that any server can carry it: ours, or a larger app that
mounts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, MutableMapping

from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from k8e import access, admission
from k8e.access import HostPolicy
from k8e.client.async_driver import Dial
from k8e.json_size import MAX_VALUES, JsonSize
from k8e.mcp import server
from k8e.mcp.client import InsideClient
from k8e.mcp.http_legacy import Streams
from k8e.mcp.server import World
from k8e.mcp.stdio import MAX_LINE, fields

PATH = "/mcp"
IDLE_SECONDS = 1800.0
"""How long an unused connection is kept."""
MAX_CONNECTIONS = 1000
MAX_HANDSHAKE = 64 << 10
"""Bytes of a message that may open the current protocol: larger ones are not read to find out."""
STREAM = b"text/event-stream"


class App:
    """Serves ``/mcp`` (or the path where it is mounted) to callers that the access rules admit."""

    def __init__(
        self, world: World, door: HostPolicy | None, *, path: str = PATH, idle: float = IDLE_SECONDS
    ) -> None:
        """Without access rules of its own, the application around it admits one caller."""
        self._world = world
        self._door = door
        self._path = path
        self._server = server.build(world, server.with_session)
        self._streams = Streams(self._server, world)
        self._manager = StreamableHTTPSessionManager(
            self._server,
            max_request_body_size=MAX_LINE,
            session_idle_timeout=idle,
            max_sessions=MAX_CONNECTIONS,
        )
        self._idle = idle
        self._busy: dict[str, int] = {}  # requests under way, by connection
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Run everything that lives as long as the app; its connections end with it."""
        try:
            async with self._manager.run():
                yield
        finally:
            for timer in self._timers.values():
                timer.cancel()
            if self._leaving:
                await asyncio.wait(self._leaving, timeout=server.CLOSE_SECONDS)
            await self._world.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if scope["type"] != "http":
            return
        refusal = access.judge(self._door, scope["headers"]) if self._door else None
        if refusal is not None:
            headers = {"www-authenticate": "Bearer"} if refusal.status == 401 else {}
            answer = PlainTextResponse(refusal.text + "\n", refusal.status, headers)
            await answer(scope, receive, send)
            return
        admission.admit_request(scope)
        if scope["path"].rstrip("/") != self._path.rstrip("/"):
            await PlainTextResponse(f"MCP is at {self._path}\n", 404)(scope, receive, send)
        else:
            await self._serve(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        async with self.running():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if [name for name, _ in scope["headers"]].count(b"mcp-session-id") > 1:
            await PlainTextResponse("Mcp-Session-Id was sent twice\n", 400)(scope, receive, send)
            return
        session = headers.get(b"mcp-session-id", b"").decode("latin-1")
        if scope["method"] == "GET" and not session:
            await self._streams.stream(scope, receive, send)
        elif scope["method"] == "POST":
            await self._post(headers, session, scope, receive, send)
        else:
            await self._modern(session, scope, receive, send)

    async def _post(
        self,
        headers: MutableMapping[bytes, bytes],
        session: str,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Handle a message; without a protocol version, it may be in K8E's older form."""
        try:
            body = await _body(receive)
        except TooLarge as error:
            await PlainTextResponse(f"{error}\n", 413)(scope, receive, send)
            return
        older = b"mcp-protocol-version" not in headers
        if older and (
            session in self._streams or (not session and not _is_handshake(headers, body))
        ):
            await self._streams.post(body, scope, receive, send)
        else:
            await self._modern(session, scope, _replayed(body, receive), send)

    async def _modern(self, session: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve streamable HTTP. A connection's sessions end with it, or if its client is away."""
        opened = session

        async def watched(message: Message) -> None:
            nonlocal opened
            if message["type"] == "http.response.start" and not opened:
                found = dict(message["headers"]).get(b"mcp-session-id", b"")
                opened = found.decode("latin-1")
            await send(message)

        self._enter(session)
        try:
            await self._manager.handle_request(scope, receive, watched)
        finally:
            self._leave(session, opened, ended=scope["method"] == "DELETE")

    def _enter(self, session: str) -> None:
        if session:
            self._busy[session] = self._busy.get(session, 0) + 1
            if timer := self._timers.pop(session, None):
                timer.cancel()

    def _leave(self, session: str, opened: str, *, ended: bool) -> None:
        if session:
            self._busy[session] -= 1
            if not self._busy[session]:
                del self._busy[session]
        if ended:
            self._end(opened)
        elif opened not in self._busy and opened in self._world.desks:
            loop = asyncio.get_running_loop()
            self._timers[opened] = loop.call_later(self._idle, self._end, opened)

    def _end(self, session: str) -> None:
        self._timers.pop(session, None)
        task = asyncio.ensure_future(self._world.leave(session))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


class TooLarge(Exception):
    """A body is larger than any message may be; the text says in which way."""


async def _body(receive: Receive) -> bytes:
    """The whole body. Its size is checked as it arrives, so a body too large is never parsed."""
    found, size = bytearray(), JsonSize()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return bytes(found)
        piece = message.get("body", b"")
        found += piece
        size.feed(piece)
        if len(found) > MAX_LINE:
            raise TooLarge(f"the body has more than {MAX_LINE} bytes")
        if size.too_large:
            raise TooLarge(f"the body has more than {MAX_VALUES} JSON values; send fewer")
        if not message.get("more_body"):
            return bytes(found)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Replay the body, and then whatever comes."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return first.pop() if first else await receive()

    return again


def _is_handshake(headers: MutableMapping[bytes, bytes], body: bytes) -> bool:
    """Whether the current protocol is opened: its clients can always read a stream."""
    if len(body) > MAX_HANDSHAKE or STREAM not in headers.get(b"accept", b""):
        return False
    try:
        message = fields(json.loads(body))
    except (ValueError, RecursionError):
        return False
    return message.get("method") == "initialize"


def mount(dial: Dial) -> App:
    """An app for one caller, on whose behalf ``dial`` connects to the gateway.

    Each caller has one of its own: so a caller cannot name a connection of another caller.
    """
    # The SDK logs the ids of connections, which are secrets.
    logging.getLogger("mcp").setLevel(logging.WARNING)
    return App(World(client=InsideClient(dial)), None)
