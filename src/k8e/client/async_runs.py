"""Runs that outlive their caller, for the asynchronous SDK; see :mod:`k8e.client.runs`."""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar, Unpack

from k8e import errors
from k8e.client import operations, requests
from k8e.client.operations import Operation
from k8e.client.requests import AsyncContent, ExecOptions
from k8e.client.results import ExecEvent, ExecResult, Exit, ProcessInfo, RunState

T = TypeVar("T")


class AsyncRuns:
    """What a client can do with programs that nobody waits for, and with processes."""

    @abstractmethod
    async def _call(self, operation: Operation[T], source: AsyncContent | None = None) -> T: ...

    @abstractmethod
    def _stream(
        self, operation: Operation[Any], source: AsyncContent | None = None
    ) -> AsyncGenerator[Any]: ...

    async def start(
        self,
        session_id: str,
        command: str | Sequence[str],
        timeout: float = 0,
        *,
        language: str = "",
        **options: Unpack[ExecOptions],
    ) -> AsyncRun:
        """Start a command that goes on without us; a handle to come back to it.

        Its newest 512 KiB of output are kept, and its end for a day.

        Args:
            session_id: where to run it.
            command: text for the shell, a list for no shell; with ``language``, source code.
            timeout: seconds after which it is killed; 0 means never.
            language: what the source code is written in.
            options: see :class:`ExecOptions`.
        """
        call = requests.start_call(
            session_id, command, language=language, timeout=timeout, options=options
        )
        told = await self._call(operations.start(call))
        return self.get_run(requests.run_id(str(told["session_id"]), str(told["id"])))

    def get_run(self, run_id: str) -> AsyncRun:
        """The handle of a run that was started before, here or elsewhere; asks nobody."""
        return AsyncRun(run_id, self._call, self._stream)

    async def processes(self, session_id: str) -> list[ProcessInfo]:
        """Everything that runs in a session's sandbox."""
        call = {"op": "processes", "session": requests.by_id(session_id)}
        return await self._call(operations.processes(call))

    async def resize(self, session_id: str, exec_id: str, rows: int, columns: int) -> None:
        """Tell a command on a terminal that its window has another size."""
        call = requests.run_call("resize", requests.run_id(session_id, exec_id))
        await self._call(operations.call({**call, "rows": rows, "cols": columns}))

    async def symlink(self, session_id: str, path: str, target: str) -> None:
        """Make a symbolic link in a sandbox, replacing a file or link of that name."""
        await self._call(
            operations.call(requests.file_call("symlink", session_id, path, target=target))
        )

    async def chmod(self, session_id: str, path: str, mode: int) -> None:
        """Change the permissions of a file of a sandbox."""
        await self._call(operations.call(requests.file_call("chmod", session_id, path, mode=mode)))


class AsyncRun:
    """A command that goes on without us. Made by :class:`AsyncSandboxClient`."""

    def __init__(
        self,
        run_id: str,
        call: Callable[[Operation[Any]], Awaitable[Any]],
        stream: Callable[[Operation[Any]], AsyncGenerator[Any]],
    ) -> None:
        self.run_id = run_id
        """Names the run, also for other programs and on the command line."""
        self.session_id, self.exec_id = requests.split_run_id(run_id)
        self._call = call
        self._stream = stream

    def __repr__(self) -> str:
        return f"AsyncRun({self.run_id!r})"

    async def poll(self) -> RunState:
        """How it is, and what it printed so far. Does not wait for its end."""
        return await self._call(operations.snapshot(requests.run_call("attach", self.run_id)))

    async def output(self, start: int = 0, *, follow: bool = True) -> AsyncGenerator[ExecEvent]:
        """Iterate over its output from byte ``start`` and, last, its exit.

        Leaving the loop does not disturb it. Without ``follow``, only what there is by now, and
        the exit only if it has ended. A gateway that restarts meanwhile is asked again.
        """
        delays = iter(operations.RETRY_DELAYS)
        while True:
            call = requests.run_call("attach", self.run_id, seq=start)
            try:
                events = self._stream(operations.output(call, follow=follow))
                async with contextlib.aclosing(events):
                    async for event in events:
                        if not isinstance(event, Exit):
                            start = event.seq + len(event.data)
                        delays = iter(operations.RETRY_DELAYS)
                        yield event
                return
            except errors.GatewayUnreachable:
                delay = next(delays, None)
                if delay is None:
                    raise
                await asyncio.sleep(delay)

    async def wait(self) -> ExecResult:
        """Wait for its end; what came of it, and the output that is still kept."""
        collected = operations.Collected()
        async for event in self.output():
            collected.add(event)
        return collected.result()

    async def kill(self) -> None:
        """End it and everything that it started; nothing happens if it has ended."""
        await self._call(operations.call(requests.run_call("signal", self.run_id, terminate=True)))

    async def signal(self, number: int) -> None:
        """Send a signal to its process group."""
        await self._call(operations.call(requests.run_call("signal", self.run_id, signal=number)))
