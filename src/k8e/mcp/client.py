"""The SDK's client, with the two ways to run programs that tools need: collected, and followed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from k8e.client import async_driver, endpoints, operations
from k8e.client.async_driver import Connector, Dial, LocalConnector
from k8e.client.asynchronous import AsyncSandboxClient
from k8e.client.endpoints import Endpoint
from k8e.client.results import ExecEvent, ExecResult


class ToolClient(AsyncSandboxClient):
    """Runs the calls of :mod:`k8e.client.requests`; a cancelled call kills its program."""

    endpoint = Endpoint()
    """Where the gateway is; by default this machine's own."""

    def _connector(
        self, endpoint: str | None, api_key: str | None, profile: str | None, /
    ) -> Connector:
        self.endpoint = endpoints.resolve(endpoint, api_key, profile)
        return async_driver.connector(self.endpoint)

    async def finish(self, call: Mapping[str, Any]) -> ExecResult:
        return await self._exec(call, None)

    async def follow(self, call: Mapping[str, Any]) -> AsyncGenerator[ExecEvent]:
        async with (
            self._killing(call),
            contextlib.aclosing(self._stream(operations.exec_events(call))) as events,
        ):
            async for event in events:
                yield event


class InsideClient(ToolClient):
    """The same inside a gateway, which has identified the caller and makes the connections."""

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        super().__init__()

    def _connector(self, *_: object) -> Connector:
        return LocalConnector("", self._dial)
