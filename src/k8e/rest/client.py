"""Calls of one caller to the gateway that REST is served by, each with the id of its request."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any, TypeVar, cast

from k8e.client import operations, requests, results
from k8e.client.async_caller import AsyncCaller
from k8e.client.async_driver import Dial, LocalConnector
from k8e.client.operations import Operation, Send
from k8e.client.requests import AsyncContent
from k8e.client.results import Chunk, ExecEvent, ExecResult, FileEntry
from k8e.guest import wire
from k8e.rest.bodies import Arriving

T = TypeVar("T")


class GatewayCalls(AsyncCaller):
    """Asks the gateway, on behalf of one caller."""

    def __init__(self, dial: Dial) -> None:
        super().__init__(LocalConnector("", dial))
        self.arriving = Arriving()

    async def close(self) -> None:
        await self._pool.close()

    async def ask(self, request_id: str, op: str, **fields: Any) -> dict[str, Any]:
        """One operation of the gateway, answered at once."""
        given = {name: value for name, value in fields.items() if value is not None}
        return await self._call(_ask({"op": op, **given, "request_ref": request_id}))

    async def on_file(self, request_id: str, op: str, session_id: str, **fields: Any) -> Any:
        """One operation of the guest on a file, answered at once."""
        call = {"op": op, "session": requests.by_id(session_id), **fields}
        return await self._call(_ask({**call, "request_ref": request_id}))

    async def run(self, request_id: str, call: Mapping[str, Any], stdin: str | None) -> ExecResult:
        """Run a program to its end."""
        return await self._exec({**call, "request_ref": request_id}, stdin)

    async def run_events(
        self, request_id: str, call: Mapping[str, Any], stdin: str | None
    ) -> AsyncGenerator[ExecEvent]:
        """Run a program; its output as it comes, and its exit."""
        operation = operations.exec_events({**call, "request_ref": request_id})
        async with contextlib.aclosing(self._stream(operation, stdin)) as events:
            async for event in events:
                yield event

    async def open_file(
        self, request_id: str, session_id: str, path: str
    ) -> AsyncGenerator[FileEntry | Chunk]:
        """A file: its description, and then its bytes."""
        call = requests.file_call("read", session_id, path, request_ref=request_id)
        async with contextlib.aclosing(self._stream(_described(call))) as events:
            async for event in events:
                yield event

    async def write_file(
        self, request_id: str, session_id: str, path: str, content: AsyncContent
    ) -> dict[str, Any]:
        """Write a file from what comes, piece by piece; its path and size."""
        call = requests.file_call("write", session_id, path, request_ref=request_id)
        return await self._call(operations.write(call), content)

    async def list_files(
        self, request_id: str, session_id: str, path: str, depth: int
    ) -> AsyncGenerator[list[FileEntry]]:
        """What is in a folder, as it comes; whoever has enough of it stops the guest."""
        call = requests.list_call(session_id, path, 0, depth)
        operation = _listed({**call, "request_ref": request_id})
        async with contextlib.aclosing(self._stream(operation)) as parts:
            async for part in parts:
                yield part


def _ask(fields: Mapping[str, Any]) -> Operation[dict[str, Any]]:
    """Ask, and get the answer; a warning in it is for the caller, not for this process."""
    yield Send(wire.CALL, wire.pack(fields))
    while True:
        kind, body = yield from operations.frame()
        if kind == wire.RESULT:
            return wire.unpack_dict(body, len(body))


def _listed(fields: Mapping[str, Any]) -> Operation[None]:
    """List a folder: emits some entries at a time."""
    yield from operations.call(fields)
    consumed = operations.Consumed()
    while True:
        kind, body = yield from operations.frame()
        if kind == wire.DATA:
            yield [results.entry(item) for item in cast("list[dict[str, Any]]", wire.unpack(body))]
            yield from consumed.add(len(body))
        elif kind == wire.END:
            return


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
