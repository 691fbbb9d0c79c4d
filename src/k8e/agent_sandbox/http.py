"""The dialect's app: the Kubernetes routes that clients use, and the router, for one caller."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from starlette.types import Receive, Scope, Send

from k8e.agent_sandbox.claims import Claims
from k8e.agent_sandbox.client import InsideClient
from k8e.agent_sandbox.kubernetes import KubernetesApi
from k8e.agent_sandbox.router import LocalSandboxes, Router
from k8e.client.async_driver import Dial

PATH = "/agent-sandbox"
ROUTER = "/router"


class App:
    """Serves what is below ``/agent-sandbox``."""

    def __init__(self, dial: Dial) -> None:
        self._client = InsideClient(dial)
        self._claims = Claims(self._client)
        self._kubernetes = KubernetesApi(self._claims)
        self._router = Router(LocalSandboxes(self._client, self._claims))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Its connections end with the block; sessions stay."""
        try:
            yield
        finally:
            await self._claims.close()
            await self._client.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"].removeprefix(PATH)
        if path == ROUTER or path.startswith(f"{ROUTER}/"):
            await self._router(path.removeprefix(ROUTER) or "/", scope, receive, send)
        else:
            await self._kubernetes(path, scope, receive, send)


def mount(dial: Dial) -> App:
    """An app for one caller, on whose behalf ``dial`` connects to the gateway."""
    return App(dial)
