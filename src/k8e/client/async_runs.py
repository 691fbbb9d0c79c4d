"""The handle of a run that outlives its caller, for the asynchronous client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from k8e import errors
from k8e.client import attachment, operations
from k8e.client.attachment import Following, RunHandle
from k8e.client.operations import Operation
from k8e.client.results import ExecEvent, ExecResult, RunState


class AsyncRun(RunHandle):
    """A command that runs on without us. Made by :meth:`AsyncSandboxClient.start`."""

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
        """Its state, and its output so far. Does not wait for its end."""
        return await self._call(attachment.run_snapshot(self._about("attach")))

    async def output(self, start: int = 0, *, follow: bool = True) -> AsyncGenerator[ExecEvent]:
        """Iterate over its output from byte ``start`` and, last, its exit.

        Leaving the loop does not disturb it. Without ``follow``, only what there is by now, and
        the exit only if it has ended. A gateway that restarts meanwhile is asked again.
        """
        following = Following(start)
        while True:
            operation = attachment.attached_output(
                self._about("attach", seq=following.at), follow=follow
            )
            try:
                async with contextlib.aclosing(self._stream(operation)) as events:
                    async for event in events:
                        following.saw(event)
                        yield event
                return
            except errors.GatewayUnreachable as error:
                await asyncio.sleep(following.delay(error))

    async def wait(self) -> ExecResult:
        """Wait for its end; return the result, with the output that is still kept."""
        collected = attachment.Collected()
        async for event in self.output():
            collected.add(event)
        return collected.result()

    async def kill(self) -> None:
        """End it and everything that it started; nothing happens if it has ended."""
        await self._call(operations.call(self._about("signal", terminate=True)))

    async def signal(self, number: int) -> None:
        """Send a signal to its process group."""
        await self._call(operations.call(self._about("signal", signal=number)))
