"""Programs that are talked to while they run, for the asynchronous SDK.

What they do is explained in :mod:`k8e.client.interactive`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Unpack

from k8e import errors
from k8e.client import async_driving, exchange, operations, requests
from k8e.client.callers import AsyncCaller
from k8e.client.exchange import MORE, Exchange, Steps
from k8e.client.handles import Handle
from k8e.client.operations import Operation, Send
from k8e.client.requests import ExecOptions
from k8e.client.results import ExecEvent, ExecResult, Foreground

END_SECONDS = 10.0  # how long leaving the block waits for the end of the program


class AsyncInteractive(AsyncCaller):
    """What a client can do with programs that it talks to."""

    _pool: async_driving.Pool

    async def open(
        self,
        session_id: str,
        command: str | Sequence[str],
        timeout: float = 0,
        *,
        stdin: bool = True,
        **options: Unpack[ExecOptions],
    ) -> AsyncProcess:
        requests.check_exec_options(self.open, options)
        call = exchange.open_call(
            session_id, command, timeout=timeout, stdin=stdin, options=options
        )
        process = AsyncProcess(Exchange(call), self._pool, self._call)
        await process.begin()
        self._pool.end_with(process)
        return process

    async def terminal(
        self,
        session_id: str,
        program: str | Sequence[str] | None = None,
        rows: int = 24,
        columns: int = 80,
        *,
        timeout: float = 0,
        **options: Unpack[ExecOptions],
    ) -> AsyncProcess:
        requests.check_exec_options(self.terminal, options)
        options["tty"] = (rows, columns)
        tried = exchange.programs(program)
        for command in tried[:-1]:
            with contextlib.suppress(FileNotFoundError):
                return await self.open(session_id, command, timeout, **options)
        return await self.open(session_id, tried[-1], timeout, **options)


class AsyncProcess(Handle):
    """A program that runs, to be written to and read from, by any number of tasks.

    Made by :meth:`AsyncSandboxClient.open`. Leaving its ``async with`` block kills it. A cancelled
    read or write loses nothing that was printed.
    """

    def __init__(
        self,
        exchange: Exchange,
        pool: async_driving.Pool,
        call: Callable[[Operation[Any]], Awaitable[Any]],
    ) -> None:
        super().__init__(exchange.run_id)
        self._exchange = exchange
        self._pool = pool
        self._call = call
        self._connection: async_driving.Connection | None = None
        self._incoming: asyncio.Task[tuple[int, bytes]] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()  # one frame at a time
        self._writing = asyncio.Lock()  # one whole write at a time

    async def begin(self) -> None:
        """Start it; called once, by the client."""
        self._connection = await self._pool.take()
        self._connection.begin()
        try:
            await self._drive(self._exchange.begin())
        except BaseException:
            await self._disconnect()
            raise

    async def __aenter__(self) -> AsyncProcess:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Writing.

    async def write(self, data: str | bytes) -> None:
        async with self._writing:
            await self._drive(self._exchange.write(data))

    async def close_stdin(self) -> None:
        async with self._writing:
            await self._drive(self._exchange.close_stdin())

    # Reading.

    async def __aiter__(self) -> AsyncGenerator[ExecEvent]:
        while (event := await self._drive(self._exchange.next_event())) is not None:
            yield event

    async def read(self, count: int = -1) -> bytes:
        return await self._drive(self._exchange.read(count))

    async def read_until(self, marker: str | bytes) -> bytes:
        return await self._drive(self._exchange.read_until(requests.as_bytes(marker)))

    async def wait(self) -> ExecResult:
        return await self._drive(self._exchange.wait())

    # Control.

    async def resize(self, rows: int, columns: int) -> None:
        await self._call(operations.call(self._about("resize", rows=rows, cols=columns)))

    async def signal(self, number: int, *, foreground: bool = False) -> None:
        call = self._about("signal", signal=number, foreground=foreground)
        await self._call(operations.call(call))

    async def foreground(self) -> Foreground:
        return await self._call(exchange.foreground(self._about("foreground")))

    async def kill(self) -> None:
        with contextlib.suppress(errors.ExecNotFound):
            await self._call(operations.call(self._about("signal", terminate=True)))

    async def close(self) -> None:
        if self._exchange.exit is None:
            await async_driving.finish(self._end(), END_SECONDS)
        await self._disconnect()

    async def _end(self) -> None:
        await self.kill()
        await self._drive(self._exchange.drain())

    # Driving.

    async def _drive(self, steps: Steps) -> Any:
        self._pool.check_open()
        try:
            while True:
                step = next(steps)
                if isinstance(step, Send):
                    # A frame that is sent by half would be the end of the connection.
                    task = asyncio.create_task(self._send(step))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                    await asyncio.shield(task)
                elif step is MORE:
                    await self._receive()
        except StopIteration as stop:
            return stop.value
        finally:
            steps.close()

    async def _send(self, step: Send) -> None:
        async with self._sending:
            if self._connection is not None:
                await self._connection.send(step.kind, step.body)

    async def _receive(self) -> None:
        """Take in one frame; whoever waits for it waits for the same task."""
        connection = self._connection
        if self._incoming is None and connection is not None:
            self._incoming = asyncio.create_task(connection.receive())
        task = self._incoming
        if task is None or connection is None:
            raise errors.GatewayUnreachable("the program's connection was closed")
        await asyncio.wait({task})
        if self._incoming is not task:
            return  # another one was quicker
        self._incoming = None
        try:
            self._exchange.receive(*task.result())
        except errors.GatewayUnreachable as error:
            self._exchange.fail(error)
        if self._exchange.exit is not None:
            self._connection = None
            await self._pool.keep(connection)

    async def _disconnect(self) -> None:
        if self._incoming is not None:
            self._incoming.cancel()
            self._incoming = None
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
