"""The handle of a context for the asynchronous client."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from k8e import errors
from k8e.client import executions, operations, requests
from k8e.client.executions import (
    ContextHandle,
    ContextInfo,
    Execution,
    ExecutionEvent,
    OnOutput,
    OnResult,
)
from k8e.client.operations import Operation


class AsyncContext(ContextHandle):
    """A program that keeps its variables from one run of code to the next.

    As a context manager it is removed at the end of the block.
    """

    def __init__(
        self,
        session_id: str,
        context_id: str,
        call: Callable[[Operation[Any]], Awaitable[Any]],
        stream: Callable[[Operation[Any]], AsyncGenerator[Any]],
    ) -> None:
        super().__init__(session_id, context_id)
        self._call = call
        self._stream = stream

    async def __aenter__(self) -> AsyncContext:
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(errors.ContextNotFound, errors.SessionNotFound):
            await self.close()

    async def run(
        self,
        code: str | bytes,
        timeout: float = 30,
        *,
        env: Mapping[str, str] | None = None,
        on_stdout: OnOutput | None = None,
        on_stderr: OnOutput | None = None,
        on_result: OnResult | None = None,
        exec_id: str = "",
        output_limit: int = requests.OUTPUT_LIMIT,
    ) -> Execution:
        """Run code and wait for its end; return its results, output and error.

        Calls line up: a context runs one thing at a time. Giving up (Ctrl-C) interrupts the code.

        Args:
            code: a cell of the context's language.
            timeout: seconds, with the time in line, after which it is interrupted; if that does not
                help, the context ends. 0 means never.
            env: variables for this run only.
            on_stdout: called with bytes as they are printed.
            on_stderr: the same for stderr.
            on_result: called with each result when it is shown.
            exec_id: chosen by the caller: a second run with the same id joins the first.
            output_limit: bytes kept of each stream; 0 means all.
        """
        done: Execution | None = None
        events = self._stream(self._run(code, timeout, env, exec_id, output_limit))
        async with contextlib.aclosing(events):
            async for event in events:
                executions.notify(event, on_stdout, on_stderr, on_result)
                done = event if isinstance(event, Execution) else done
        return executions.ended(done)

    async def stream(
        self, code: str | bytes, timeout: float = 300, *, env: Mapping[str, str] | None = None
    ) -> AsyncGenerator[ExecutionEvent]:
        """Run code while iterating over what it prints and shows; last comes the Execution.

        Leaving the loop interrupts the code.
        """
        events = self._stream(self._run(code, timeout, env, "", 0))
        async with contextlib.aclosing(events):
            async for event in events:
                yield event

    async def interrupt(self, grace: float = 5) -> bool:
        """Interrupt running code, as Ctrl-C does; whether it stopped within ``grace`` seconds."""
        return await self._call(
            executions.interrupt_context(self._about("interrupt_context", grace=grace))
        )

    async def restart(self) -> ContextInfo:
        """End its program in any case, and start a new one: the variables are gone."""
        return await self._call(executions.describe_context(self._about("restart_context")))

    async def close(self) -> None:
        """Remove it, and everything that it runs."""
        await self._call(operations.call(self._about("remove_context")))
