"""The SDK's client inside of a gateway, which knows already who calls."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from k8e.client import operations, requests, results
from k8e.client.async_driver import Connector, Dial, LocalConnector
from k8e.client.asynchronous import AsyncSandboxClient
from k8e.client.operations import Operation
from k8e.client.results import Chunk, FileEntry
from k8e.guest import wire


class InsideClient(AsyncSandboxClient):
    """A client whose connections the gateway makes, on behalf of one caller."""

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        super().__init__()

    def _connector(self, *_: object) -> Connector:
        return LocalConnector("", self._dial)

    async def open_file(self, session_id: str, path: str) -> AsyncGenerator[FileEntry | Chunk]:
        """A file: its description, and then its bytes."""
        call = requests.file_call("read", session_id, path)
        async with contextlib.aclosing(self._stream(_described(call))) as events:
            async for event in events:
                yield event


def _described(fields: Mapping[str, Any]) -> Operation[None]:
    """Read a file: emits its description before its bytes."""
    yield results.entry((yield from operations.call(fields)))
    consumed = operations.Consumed()
    while True:
        kind, body = yield from operations.frame()
        if kind == wire.DATA:
            yield Chunk(body)
            yield from consumed.add(len(body))
        elif kind == wire.END:
            return
