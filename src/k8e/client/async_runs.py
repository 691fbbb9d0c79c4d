"""Runs that outlive their caller, for the asynchronous SDK.

What the methods do is explained in :mod:`k8e.client.runs`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Unpack

from k8e import errors
from k8e.client import attaching, operations, requests
from k8e.client.callers import AsyncCaller
from k8e.client.handles import Following, Handle
from k8e.client.operations import Operation
from k8e.client.requests import ExecOptions
from k8e.client.results import ExecEvent, ExecResult, ProcessInfo, RunState


class AsyncRuns(AsyncCaller):
    """What a client can do with programs that nobody waits for, and with processes."""

    async def start(
        self,
        session_id: str,
        command: str | Sequence[str],
        timeout: float = 0,
        *,
        language: str = "",
        **options: Unpack[ExecOptions],
    ) -> AsyncRun:
        requests.check_exec_options(self.start, options)
        call = requests.start_call(
            session_id, command, language=language, timeout=timeout, options=options
        )
        told = await self._call(attaching.start(call))
        return self.get_run(requests.run_id(str(told["session_id"]), str(told["id"])))

    def get_run(self, run_id: str) -> AsyncRun:
        return AsyncRun(run_id, self._call, self._stream)

    def transcript(
        self, session_id: str, start: int = 0, *, follow: bool = False
    ) -> AsyncGenerator[ExecEvent]:
        """Iterate over what all programs of a session printed, from byte ``start`` on.

        The newest 512 KiB are kept, without what was printed on terminals; values of the session's
        secrets are hidden. Last comes an exit, with the code of the run that ended last, if nothing
        runs by then; with ``follow`` it is waited for.
        """
        call = {"op": "transcript", "session": requests.by_id(session_id), "seq": start}
        return self._stream(attaching.output(call, follow=follow))

    async def processes(self, session_id: str) -> list[ProcessInfo]:
        call = {"op": "processes", "session": requests.by_id(session_id)}
        return await self._call(operations.processes(call))

    async def resize(self, session_id: str, exec_id: str, rows: int, columns: int) -> None:
        call = requests.run_call("resize", requests.run_id(session_id, exec_id))
        await self._call(operations.call({**call, "rows": rows, "cols": columns}))

    async def symlink(self, session_id: str, path: str, target: str) -> None:
        await self._call(
            operations.call(requests.file_call("symlink", session_id, path, target=target))
        )

    async def chmod(self, session_id: str, path: str, mode: int) -> None:
        await self._call(operations.call(requests.file_call("chmod", session_id, path, mode=mode)))


class AsyncRun(Handle):
    """A command that goes on without us. Made by :class:`AsyncSandboxClient`."""

    def __init__(
        self,
        run_id: str,
        call: Callable[[Operation[Any]], Awaitable[Any]],
        stream: Callable[[Operation[Any]], AsyncGenerator[Any]],
    ) -> None:
        super().__init__(run_id)
        self._call = call
        self._stream = stream

    async def poll(self) -> RunState:
        return await self._call(attaching.snapshot(self._about("attach")))

    async def output(self, start: int = 0, *, follow: bool = True) -> AsyncGenerator[ExecEvent]:
        following = Following(start)
        while True:
            operation = attaching.output(self._about("attach", seq=following.at), follow=follow)
            try:
                async with contextlib.aclosing(self._stream(operation)) as events:
                    async for event in events:
                        following.saw(event)
                        yield event
                return
            except errors.GatewayUnreachable as error:
                await asyncio.sleep(following.delay(error))

    async def wait(self) -> ExecResult:
        collected = attaching.Collected()
        async for event in self.output():
            collected.add(event)
        return collected.result()

    async def kill(self) -> None:
        await self._call(operations.call(self._about("signal", terminate=True)))

    async def signal(self, number: int) -> None:
        await self._call(operations.call(self._about("signal", signal=number)))
