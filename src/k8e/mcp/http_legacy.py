"""K8E's older HTTP: answers in the body of a POST, and pushed on a stream that a GET opens.

The stream's first event is ``session`` with an id. A POST that names the id in ``Mcp-Session-Id``
has its answer pushed there too. There is no handshake that must come first.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from typing import Any

import anyio
import mcp_types as types
from mcp.server.connection import Connection
from mcp.server.lowlevel import Server
from mcp.server.runner import modern_error_data, serve_one
from mcp.shared.dispatcher import CallOptions
from mcp.shared.exceptions import NoBackChannelError
from mcp.shared.message import ServerMessageMetadata
from mcp.shared.transport_context import TransportContext
from mcp_types.version import LATEST_HANDSHAKE_VERSION
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from k8e.mcp.server import World
from k8e.mcp.stdio import completed, fields

PING_SECONDS = 15.0
MAX_QUEUED = 32
"""Messages that may wait for a stream's reader; more are dropped, as K8E does."""
NOTHING = b'{"jsonrpc":""}'
"""What K8E says to a notification."""
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]


class Streams:
    """All streams that are open, by id."""

    def __init__(self, server: Server[World], world: World) -> None:
        self._server = server
        self._world = world
        self._open: dict[str, asyncio.Queue[bytes]] = {}

    def __contains__(self, stream_id: object) -> bool:
        return stream_id in self._open

    async def stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a GET: send the id, then every pushed message, until the client leaves."""
        stream_id = secrets.token_hex(12)
        queue = self._open[stream_id] = asyncio.Queue[bytes](MAX_QUEUED)
        start = {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS}
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await send(start)
            await _event(send, b"event: session\ndata: " + stream_id.encode() + b"\n\n")
            while not leaving.done():
                getting = asyncio.ensure_future(queue.get())
                await asyncio.wait(
                    {getting, leaving}, timeout=PING_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if getting.done():
                    await _event(send, b"data: " + getting.result() + b"\n\n")
                    continue
                getting.cancel()
                if not leaving.done():
                    await _event(send, b": ping\n\n")
        finally:
            leaving.cancel()
            del self._open[stream_id]
            with anyio.CancelScope(shield=True):
                await self._world.leave(stream_id)

    async def post(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a POST: one message in, its answer back."""
        request = Request(scope)
        stream_id = request.headers.get("mcp-session-id", "")
        answering = asyncio.ensure_future(self._answer(body, request))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return  # no client waits for the answer any more, so its program is killed
            status, answer = answering.result()
        finally:
            leaving.cancel()
            answering.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait({answering, leaving})
                if (
                    stream_id not in self._open
                ):  # it ended meanwhile, so its messages are dropped here
                    await self._world.leave(stream_id)
        queue = self._open.get(stream_id)
        if queue is not None and answer != NOTHING and not queue.full():
            queue.put_nowait(answer)
        await Response(answer, status, media_type="application/json")(scope, receive, send)

    async def _answer(self, body: bytes, request: Request) -> tuple[int, bytes]:
        try:
            # Its own JSON, which accepts halves of characters as other parsers do.
            given = completed(fields(json.loads(body)))
            message = types.jsonrpc_message_adapter.validate_python(given, by_name=False)
        except (ValidationError, ValueError, RecursionError):
            return 400, _error(None, types.PARSE_ERROR, "the body is not one JSON-RPC message")
        if not isinstance(message, types.JSONRPCRequest):
            return 200, NOTHING
        queue = self._open.get(request.headers.get("mcp-session-id", ""))
        dispatch = _Dispatch(message, request, queue)
        connection = Connection.from_envelope(LATEST_HANDSHAKE_VERSION, None, None)
        try:
            result = await serve_one(
                self._server,
                dispatch,
                message.method,
                message.params,
                connection=connection,
                lifespan_state=self._world,
            )
        except Exception as error:
            told = modern_error_data(error)
            return 200, _error(message.id, told.code, told.message)
        return 200, _encode({"jsonrpc": "2.0", "id": message.id, "result": result})


class _Dispatch:
    """The SDK's context for one of our requests."""

    can_send_request = False

    def __init__(
        self, message: types.JSONRPCRequest, request: Request, queue: asyncio.Queue[bytes] | None
    ) -> None:
        self.transport = TransportContext(kind="k8e-http", can_send_request=False)
        self.request_id = message.id
        self.message_metadata = ServerMessageMetadata(request_context=request)
        self.cancel_requested = anyio.Event()
        self._queue = queue
        self._token = fields((message.params or {}).get("_meta")).get("progressToken")

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        raise NoBackChannelError(method)

    async def notify(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> None:
        if self._queue is not None and not self._queue.full():
            told = {"jsonrpc": "2.0", "method": method, "params": dict(params or {})}
            self._queue.put_nowait(_encode(told))

    async def progress(
        self, progress: float, total: float | None = None, message: str | None = None
    ) -> None:
        if self._token is not None:
            told = {"progressToken": self._token, "progress": progress, "message": message}
            await self.notify("notifications/progress", told)


def _encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def _error(request_id: Any, code: int, text: str) -> bytes:
    return _encode({"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": text}})


async def _event(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _left(receive: Receive) -> None:
    """The end of a client that sends no body."""
    while (await receive())["type"] != "http.disconnect":
        pass
