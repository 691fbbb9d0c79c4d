"""The HTTP server itself: uvicorn, as a guest in the gateway's event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator

import uvicorn

from k8e import http_connections
from k8e.access import HostPolicy
from k8e.gateway.http.app import App
from k8e.gateway.service import Gateway

ANSWER_SECONDS = 3.0  # for answers under way when the gateway stops
CLOSE_SECONDS = 1  # for the last bytes of them


class UvicornServer(uvicorn.Server):
    """Serves until it is stopped; signals are the gateway's."""

    def __init__(self, gateway: Gateway, door: HostPolicy) -> None:
        self.told = asyncio.Event()
        self._app = App(gateway, door)
        config = uvicorn.Config(
            self._app,
            http=http_connections.protocol(),
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
