"""Connections of an HTTP server that anybody can open: uvicorn's, with a bounded number of them.

Whoever has shown no credential has a place among the strangers (:mod:`k8e.admission`); the app says
by :func:`k8e.admission.admit_request` that a request had one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Generator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from k8e.admission import ADMIT, Admission, UnknownConnection
from k8e.bounded_sockets import BoundedSocket, Gone
from k8e.http_headers import Headers
from k8e.http_messages import HttpConnection

MAX_STRANGERS = 512
MAX_STRANGERS_OF_ADDRESS = 512  # they are of this machine, or behind one proxy
MAX_CONNECTIONS = 1024
"""All of them together."""
CLOSE_SECONDS = 1  # for the last bytes of answers when the server stops
MAX_HEAD = 16 << 10
HEAD_SECONDS = 5.0
"""How long a connection may take until its first request is there."""
STRANGER_SECONDS = 30.0
"""How long it may take until one of its requests has a credential."""


SWITCH = "k8e.switch"
"""Where a request whose client asks for a WebSocket has a function, in its state: it answers 101
with the headers that it is given, and returns the connection, whose bytes are then the app's.
It raises Gone if the connection is lost.

The app ends the connection. ASGI's own WebSockets are not used: they are messages, and what only
passes a message on need not hold all of it."""

CUT_OFF = "k8e.cut_off"
"""Where a request has a function, in its state, that cuts its connection off: for an answer that
cannot be finished, so that its client notices and no log fills with what servers do wrong."""

GONE = "k8e.gone"
"""Where a request has an event, in its state, that is set when its connection is lost: for what
waits and has not read the body yet."""


class Protocol(H11Protocol):
    """One connection. Servers derive from this, and give it an ``admission``."""

    admission: Admission
    _stranger: UnknownConnection | None = None
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self._gone = asyncio.Event()
        super().connection_made(transport)
        self.conn = HttpConnection(h11.SERVER, MAX_HEAD)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
            return
        own = {ADMIT: self._admit, SWITCH: self._switch, CUT_OFF: self._cut_off, GONE: self._gone}
        self.app_state = {**self.app_state, **own}
        self._enter()

    def _enter(self) -> None:
        """Take a place among the strangers: nothing is known of the request that comes next."""
        address = self.client[0] if self.client else ""
        self._leave()
        self._stranger = self.admission.enter(address, self._evict)
        self._waiting = self.loop.call_later(HEAD_SECONDS, self._expect_head, self.scope)

    def _evict(self) -> None:
        """Give the place up at once: asyncio tells of lost connections later, a flood has many."""
        self.connections.discard(self)
        self.transport.abort()

    def _leave(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        if self._stranger is not None:
            self._stranger.leave()

    def _expect_head(self, before: object) -> None:
        if self.scope is before:
            self.transport.abort()
        else:
            rest = STRANGER_SECONDS - HEAD_SECONDS
            self._waiting = self.loop.call_later(rest, self._expect_credential)

    def _expect_credential(self) -> None:
        if self._stranger is not None and self._stranger.pool is not None:
            self.transport.abort()

    def _admit(self) -> None:
        if self._stranger is not None and self._stranger.pool is not None:
            self.admission.admit(self._stranger)

    def _cut_off(self) -> None:
        self.cycle.disconnected = True
        self.transport.abort()

    def _switch(self, headers: Headers) -> BoundedSocket:
        if self._gone.is_set():
            raise Gone
        phrase = b"Switching Protocols"
        event = h11.InformationalResponse(status_code=101, headers=headers, reason=phrase)
        self.transport.write(self.conn.send(event) or b"")
        self.cycle.disconnected = True  # there will be no answer
        switched = _Switched(self)
        switched.connection_made(self.transport)
        if self.flow.write_paused:
            switched.pause_writing()  # the transport has told it to us, and tells nobody twice
        if said := self.conn.trailing_data[0]:
            switched.data_received(said)
        self.transport.set_protocol(switched)
        self.flow.resume_reading()
        return switched

    def on_response_complete(self) -> None:
        """One that is open and asks nothing holds a place like any other that says nothing."""
        if not self.transport.is_closing():
            self._enter()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP; an answer that is under way ends with it."""
        if self.cycle is not None and not self.cycle.response_complete:  # pyright: ignore[reportUnnecessaryComparison]
            self.cycle.disconnected = True  # else its app would go on, and fail
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone.set()
        self._leave()
        super().connection_lost(exc)


class _Switched(BoundedSocket):
    """A connection that speaks HTTP no more; it keeps its place among the server's."""

    def __init__(self, before: Protocol) -> None:
        super().__init__()
        self._before = before

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._before.connection_lost(exc)


class Server(uvicorn.Server):
    """Serves one app until it is told to stop; signals are its program's."""

    def __init__(self, app: Any, context: ssl.SSLContext | None = None) -> None:
        """With a ``context``, it speaks TLS."""
        self.told = asyncio.Event()
        config = uvicorn.Config(
            app,
            http=protocol(),
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # what strangers send must not fill the log
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
        config.load()
        config.ssl = context
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def main_loop(self) -> None:
        """Wait; uvicorn's own would wake up ten times a second."""
        await self.told.wait()
        for server in self.servers:
            server.close()
        await self.close_app()

    async def close_app(self) -> None:
        """End what the app has open; connections end after it."""


def protocol() -> type[Protocol]:
    """The protocol of one server, with places of its own."""

    class Own(Protocol):
        admission = Admission(MAX_STRANGERS, MAX_STRANGERS_OF_ADDRESS)

    return Own
