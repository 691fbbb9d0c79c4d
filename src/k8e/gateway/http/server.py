"""The HTTP server itself: uvicorn, as a guest in the gateway's event loop."""

from __future__ import annotations

import ssl

from k8e import http_connections
from k8e.access import HostPolicy
from k8e.gateway.http.app import App
from k8e.gateway.service import Gateway

ANSWER_SECONDS = 3.0  # for answers under way when the gateway stops


class UvicornServer(http_connections.Server):
    """Serves the gateway's app."""

    def __init__(
        self, gateway: Gateway, door: HostPolicy, context: ssl.SSLContext | None = None
    ) -> None:
        """With a ``context``, it speaks TLS."""
        self._app = App(gateway, door)
        super().__init__(self._app, context)

    async def close_app(self) -> None:
        await self._app.close(ANSWER_SECONDS)
