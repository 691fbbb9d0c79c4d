"""The SDK's server at two pipes.

A transport of our own: lines need a limit, and pipes need no threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
from collections.abc import AsyncGenerator
from typing import Any

import anyio
import mcp_types as types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

from k8e.mcp import server, stdio
from k8e.mcp.options import McpOptions
from k8e.mcp.server import World
from k8e.mcp.stdio import LineRefusal, Opening, TooLong

LAST_SECONDS = 1.0
"""How long the last requests may take once the client's input has ended: then it has left."""
ATOMIC = select.PIPE_BUF  # bytes that a pipe with room takes at once
Incoming = MemoryObjectSendStream[SessionMessage | Exception]
Outgoing = MemoryObjectReceiveStream[SessionMessage]


def run(opening: Opening, options: McpOptions) -> int:
    """Serve until the client leaves or we are stopped."""
    logging.basicConfig(level=logging.WARNING, format="k8e sandbox-mcp: %(message)s")
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_main(opening, options))
    return 0


async def _main(opening: Opening, options: McpOptions) -> None:
    world = World(client=options.client(), allowed_hosts=options.allowed_hosts)
    built = server.build(world, lambda _: "")
    to_server, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, from_server = anyio.create_memory_object_stream[SessionMessage](0)
    serving = asyncio.current_task()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, serving.cancel if serving else loop.stop)
    pipes = Pipes(opening)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pipes.read, to_server)
            tasks.start_soon(pipes.write, from_server)
            await built.run(incoming, outgoing, server.options(built))
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await world.close()


class Pipes:
    """Both directions of the client's pipes."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._lines = opening.lines
        self._swallow: Any = opening.greeter.greeted
        self._owed: set[Any] = set()  # ids of requests without an answer
        self._quiet = asyncio.Event()
        self._writing = asyncio.Lock()  # one line at a time: several tasks write

    async def read(self, to_server: Incoming) -> None:
        """Read the client's messages, until there are no more."""
        async with to_server:
            for message in self._opening.held:
                await self._pass_on(message, to_server)
            if not self._opening.ended:
                async for data in _chunks(self._opening.reader):
                    await self._take(self._lines.feed(data), to_server)
                await self._take(self._lines.end(), to_server)
            if self._owed:
                self._quiet.clear()
                with anyio.move_on_after(LAST_SECONDS):
                    await self._quiet.wait()

    async def _take(self, lines: list[bytes | TooLong], to_server: Incoming) -> None:
        for line in lines:
            await self._pass_on(stdio.decode(line), to_server)

    async def _pass_on(self, message: Any, to_server: Incoming) -> None:
        if isinstance(message, LineRefusal):
            await self._send(message.reply)
            return
        try:
            parsed = types.jsonrpc_message_adapter.validate_python(message, by_name=False)
        except ValidationError:
            refused = LineRefusal(
                stdio.INVALID_REQUEST, "this is not a request, an answer or a notification"
            )
            await self._send(refused.reply)
            return
        if isinstance(parsed, types.JSONRPCRequest):
            self._owed.add(parsed.id)
        await to_server.send(SessionMessage(parsed))

    async def write(self, from_server: Outgoing) -> None:
        """Write the server's messages, except the answer to a handshake that has one already."""
        async with from_server:
            async for item in from_server:
                message = item.message
                if self._swallow is not None and _answers(message, self._swallow):
                    self._swallow = None
                else:
                    # Not pydantic's own JSON: it fails at half a character, and we with it.
                    body = message.model_dump(by_alias=True, exclude_unset=True)
                    await self._send(stdio.encode(body))
                if isinstance(message, types.JSONRPCResponse | types.JSONRPCError):
                    self._owed.discard(message.id)
                if not self._owed:
                    self._quiet.set()

    async def _send(self, data: bytes) -> None:
        """Write a line; a client that does not read delays only its own answers."""
        writer = self._opening.writer
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its end is read, too
            async with self._writing:
                if len(data) <= ATOMIC and select.select([], [writer], [], 0)[1]:
                    os.write(writer, data)
                else:
                    await asyncio.to_thread(stdio.write, writer, data)


def _answers(message: Any, request_id: Any) -> bool:
    return isinstance(message, types.JSONRPCResponse) and message.id == request_id


async def _chunks(reader: int) -> AsyncGenerator[bytes]:
    """Bytes of a pipe, a terminal or a file, as they come."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    try:
        loop.add_reader(reader, readable.set)
    except PermissionError:  # a plain file is always readable, and epoll does not take it
        while data := os.read(reader, stdio.CHUNK):
            yield data
            await asyncio.sleep(0)
        return
    try:
        while True:
            await readable.wait()
            readable.clear()
            if not select.select([reader], [], [], 0)[0]:
                continue  # reported twice for the same bytes, and a read would wait for others
            data = os.read(reader, stdio.CHUNK)
            if not data:
                return
            yield data
    finally:
        loop.remove_reader(reader)
