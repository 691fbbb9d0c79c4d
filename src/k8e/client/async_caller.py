"""Drives operations, scripts and interactive programs for the asynchronous client.

Its twin for threads is :mod:`k8e.client.caller`. Both are written by hand, because waiting and
giving up are different there; everything above them is written once (see ``make gen``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from k8e import errors
from k8e.client import async_driver, operations, requests
from k8e.client.async_driver import AsyncOperation, Connector, Pool
from k8e.client.exchange import MORE, Exchange, Steps
from k8e.client.operations import Ask, Do, Operation, Script, Send, Step
from k8e.client.requests import AsyncContent
from k8e.client.results import ExecResult

T = TypeVar("T")
KILL_SECONDS = 5.0  # how long a cancelled caller waits for its command to be killed
END_SECONDS = 10.0  # how long leaving the block of a program waits for its end


class AsyncCaller:
    """Runs operations over the connections of one client."""

    def __init__(self, connector: Connector) -> None:
        self._pool = Pool(connector)
        self._streamed: dict[str, Mapping[str, Any]] = {}  # commands that end with their reader

    async def _call(self, operation: Operation[T], source: AsyncContent | None = None) -> T:
        pool = self._pool
        connection = await (pool.share() if source is None else pool.take())
        running = AsyncOperation(connection, operation, source, pool.renew)
        while await running.next_event() is not None:
            pass
        await pool.keep(running.connection)
        return running.result

    async def _exec(self, call: Mapping[str, Any], stdin: AsyncContent | None) -> ExecResult:
        async with self._killing(call):
            return await self._call(operations.exec_result(call), stdin)

    async def _stream(
        self, operation: Operation[Any], source: AsyncContent | None = None
    ) -> AsyncGenerator[Any]:
        pool = self._pool
        running = AsyncOperation(await pool.take(), operation, source, pool.renew)
        try:
            while (event := await running.next_event()) is not None:
                yield event
                pool.check_open()
            await pool.keep(running.connection)
        finally:
            await running.close()

    @contextlib.asynccontextmanager
    async def _killing(self, call: Mapping[str, Any]) -> AsyncGenerator[None]:
        """Kill the command if its caller gives up: a cancelled task, or a loop that was left."""
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            await self._kill(call)
            raise

    async def _kill(self, call: Mapping[str, Any]) -> None:
        kill = self._call(operations.call(requests.terminate_call(call)))
        await async_driver.finish(kill, KILL_SECONDS)

    async def _end_programs(self) -> None:
        """End the programs that end with their reader or with their handle."""
        for call in list(self._streamed.values()):
            await self._kill(call)
        for program in self._pool.ending:
            await program.close()

    async def _perform(self, script: Script[T]) -> T:
        """Run a script; its local work is done in threads."""
        worker = _Worker()
        try:
            step = next(script)
            while True:
                try:
                    answer = await self._perform_step(step, worker)
                except BaseException as error:
                    step = script.throw(error)
                else:
                    step = script.send(answer)
                    if worker.cancelled is not None:
                        step = script.throw(worker.cancelled)
        except StopIteration as stop:
            return stop.value
        finally:
            script.close()

    async def _perform_step(self, step: Step, worker: _Worker) -> Any:
        if isinstance(step, Do):
            return await worker.do(step.work)
        if isinstance(step, Ask):
            return await self._call(step.operation, step.source)
        async with contextlib.aclosing(self._stream(step.operation)) as chunks:
            async for chunk in chunks:
                await worker.do(lambda data=chunk.data: step.write(data))
                if worker.cancelled is not None:
                    raise worker.cancelled
        return None


class _Worker:
    """Does local work in threads. Work that has begun is never abandoned with what it opened."""

    def __init__(self) -> None:
        self.cancelled: asyncio.CancelledError | None = None

    async def do(self, work: Callable[[], T]) -> T:
        task = asyncio.create_task(asyncio.to_thread(work))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError as error:
            self.cancelled = error
            await asyncio.wait({task})
            return task.result()


class AsyncProgramDriver:
    """Drives the exchange with one program over a connection of its own, for any number of tasks.

    A cancelled read or write loses nothing that was printed.
    """

    def __init__(self, exchange: Exchange, pool: Pool) -> None:
        self._exchange = exchange
        self._pool = pool
        self._connection: async_driver.Connection | None = None
        self._incoming: asyncio.Task[tuple[int, bytes]] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()  # one frame at a time
        self._writing = asyncio.Lock()  # one whole write at a time

    async def begin(self) -> None:
        """Start the program."""
        self._connection = await self._pool.take()
        self._connection.begin()
        try:
            await self.drive(self._exchange.begin())
        except BaseException:
            await self._disconnect()
            raise

    async def write(self, steps: Steps) -> None:
        """Take steps that send input, when those of other writers have been taken."""
        async with self._writing:
            await self.drive(steps)

    async def close(self, kill: Callable[[], Awaitable[None]]) -> None:
        """End the program with ``kill`` if it runs, and wait for its end."""
        if self._exchange.exit is None:
            await async_driver.finish(self._end(kill), END_SECONDS)
        await self._disconnect()

    async def _end(self, kill: Callable[[], Awaitable[None]]) -> None:
        await kill()
        await self.drive(self._exchange.drain())

    async def drive(self, steps: Steps) -> Any:
        """Take steps of the exchange; return their result."""
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
        """Take in one frame; all tasks that wait for it wait for the same one."""
        connection = self._connection
        if self._incoming is None and connection is not None:
            self._incoming = asyncio.create_task(connection.receive())
        task = self._incoming
        if task is None or connection is None:
            raise errors.GatewayUnreachable("the program's connection was closed")
        await asyncio.wait({task})
        if self._incoming is not task:
            return  # another task has taken this frame in
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
