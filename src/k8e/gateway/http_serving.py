"""The HTTP server itself: uvicorn, as a guest in the gateway's event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from k8e.doors import Door
from k8e.gateway.http_app import App
from k8e.gateway.service import Gateway

MAX_CONNECTIONS = 1024
HEAD_SECONDS = 5.0
"""How long a connection may take until its first request is there."""
ANSWER_SECONDS = 3.0  # for answers under way when the gateway stops
CLOSE_SECONDS = 1  # for the last bytes of them


class Protocol(H11Protocol):
    """One connection; anybody on this machine can open some, so they are bounded."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
            return
        self._waiting = self.loop.call_later(HEAD_SECONDS, self._lose_patience)

    def _lose_patience(self) -> None:
        if self.scope is None:  # pyright: ignore[reportUnnecessaryComparison]
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        super().connection_lost(exc)


class Server(uvicorn.Server):
    """Serves until it is told to stop; signals are the gateway's."""

    def __init__(self, gateway: Gateway, door: Door) -> None:
        self.told = asyncio.Event()
        self._app = App(gateway, door)
        config = uvicorn.Config(
            self._app,
            http=Protocol,
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
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def main_loop(self) -> None:
        """Wait; uvicorn's own would wake up ten times a second."""
        await self.told.wait()
        for server in self.servers:
            server.close()
        await self._app.close(ANSWER_SECONDS)
