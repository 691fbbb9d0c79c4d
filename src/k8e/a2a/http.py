"""HTTP for a handful of callers: one request after the other on a connection, all of it bounded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import NamedTuple

import h11

from k8e.admission import Admission, UnknownConnection
from k8e.http_messages import HttpConnection

MAX_BODY = 8 << 20
MAX_HEAD = 32 << 10
MAX_CONNECTIONS = 128  # of callers with a token
MAX_STRANGERS = 256
MAX_STRANGERS_OF_ADDRESS = 128
HANDSHAKE_SECONDS = 10.0
IDLE_SECONDS = 75.0
BODY_SECONDS = 30.0
WRITE_SECONDS = 30.0
_CHUNK = 64 << 10
_SAFE = [("X-Content-Type-Options", "nosniff"), ("Cache-Control", "no-store")]
logger = logging.getLogger(__name__)


class Head(NamedTuple):
    """The first line and the headers of a request; names are lower case."""

    method: str
    path: str
    headers: Mapping[str, str]


class HttpReply(NamedTuple):
    """An answer; an iterator of pieces is sent as they come."""

    status: int
    body: bytes | AsyncGenerator[bytes]
    kind: str = "application/json"
    extra: tuple[tuple[str, str], ...] = ()


class Problem(Exception):
    """A request that is answered with a status and a sentence, and ends its connection."""

    def __init__(self, status: int, text: str, *extra: tuple[str, str]) -> None:
        super().__init__(text)
        self.reply = HttpReply(status, f"{text}\n".encode(), "text/plain; charset=utf-8", extra)


Body = Callable[[], Awaitable[bytes]]
Handler = Callable[[Head, Body], Awaitable[HttpReply]]


class HttpServer:
    """Serves a handler on connections."""

    def __init__(self, handler: Handler, security: ssl.SSLContext | None = None) -> None:
        self._handler = handler
        self._security = security
        self._open: set[asyncio.Task[None]] = set()
        self._places = Admission(MAX_STRANGERS, MAX_STRANGERS_OF_ADDRESS)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """For ``asyncio.start_server``."""
        task = asyncio.current_task()
        address = str((writer.get_extra_info("peername") or [""])[0])
        if task is None:
            return
        place = [self._places.enter(address, task.cancel)]
        self._open.add(task)
        try:
            if self._security is not None:  # here, so that a silent handshake has a place as well
                await writer.start_tls(self._security, ssl_handshake_timeout=HANDSHAKE_SECONDS)
            connection = _Connection(reader, writer, self._handler)
            connection.admit = lambda: self._admit(place[0])
            connection.rest = lambda: self._rest(place, task.cancel)
            await connection.serve()
        except (OSError, TimeoutError, h11.ProtocolError):
            pass  # whoever was there has left, or does not speak HTTP
        except asyncio.CancelledError:
            pass  # the server ends, or somebody else needs the place
        except Exception:
            logger.exception("a connection failed for a reason that nobody thought of")
        finally:
            place[0].leave()
            self._open.discard(task)
            writer.close()

    def _admit(self, stranger: UnknownConnection) -> None:
        """A request had a token."""
        if stranger.pool is None:
            return
        if len(self._open) - len(self._places) >= MAX_CONNECTIONS:
            raise Problem(503, "too many connections are open; try again later")
        self._places.admit(stranger)

    def _rest(self, place: list[UnknownConnection], expel: Callable[[], object]) -> None:
        """Nothing is known of the next request: else one caller could keep all connections."""
        if place[0].pool is None:
            place[0] = self._places.enter(place[0].address, expel)

    async def close(self) -> None:
        for task in list(self._open):
            task.cancel()
        if self._open:
            await asyncio.wait(list(self._open), timeout=5)


class _Connection:
    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler
    ) -> None:
        self._reader, self._writer, self._handler = reader, writer, handler
        self._http = HttpConnection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        self.admit: Callable[[], object] = lambda: None
        """Called when a request had a token: nobody else gets to read its body."""
        self.rest: Callable[[], object] = lambda: None
        """Called when a request was answered, and another may follow."""

    async def serve(self) -> None:
        while True:
            try:
                async with asyncio.timeout(IDLE_SECONDS):
                    event = await self._next()
                if not isinstance(event, h11.Request):
                    return
                await self._reply(await self._handler(_head(event), self._body))
            except Problem as problem:
                await self._reply(problem.reply, last=True)
                return
            except h11.RemoteProtocolError as error:
                if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                    told = Problem(error.error_status_hint, "this is no HTTP request")
                    await self._reply(told.reply, last=True)
                return
            if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                return
            self._http.start_next_cycle()
            self.rest()

    async def _next(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                return event
            if self._http.they_are_waiting_for_100_continue:
                go = h11.InformationalResponse(status_code=100, headers=[])
                await self._send(go)
            self._http.receive_data(await self._reader.read(_CHUNK))

    async def _body(self) -> bytes:
        self.admit()
        found = bytearray()
        async with asyncio.timeout(BODY_SECONDS):
            while isinstance(event := await self._next(), h11.Data):
                found += event.data
                if len(found) > MAX_BODY:
                    raise Problem(413, f"the body is larger than {MAX_BODY >> 20} MiB")
        if not isinstance(event, h11.EndOfMessage):
            raise ConnectionResetError
        return bytes(found)

    async def _reply(self, reply: HttpReply, *, last: bool = False) -> None:
        headers = [("Content-Type", reply.kind), *_SAFE, *reply.extra]
        if last or self._http.their_state is h11.SEND_BODY:
            headers.append(("Connection", "close"))  # nobody will read the rest of its body
        if isinstance(reply.body, bytes):
            headers.append(("Content-Length", str(len(reply.body))))
            await self._send(_response(reply.status, headers))
            await self._send(h11.Data(data=reply.body))
        else:
            async with contextlib.aclosing(reply.body) as pieces:
                await self._send(_response(reply.status, headers))
                async for piece in pieces:
                    await self._send(h11.Data(data=piece))
        await self._send(h11.EndOfMessage())

    async def _send(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            self._writer.write(data)
        async with asyncio.timeout(WRITE_SECONDS):
            await self._writer.drain()


def _response(status: int, headers: list[tuple[str, str]]) -> h11.Response:
    return h11.Response(status_code=status, headers=headers)


def _head(event: h11.Request) -> Head:
    headers: dict[str, str] = {}
    for name, value in event.headers:
        key = name.decode("ascii", "replace").lower()
        if key in headers and key in ("host", "origin", "authorization"):
            raise Problem(400, f"the header {key} is there twice")
        headers[key] = value.decode("latin-1")
    target = event.target.decode("ascii", "replace")
    return Head(event.method.decode("ascii"), target.partition("?")[0], headers)
