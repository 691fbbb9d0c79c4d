"""Contexts in the SDK: code that keeps its variables between runs. Both clients' parts."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from typing import Any

from k8e import errors
from k8e.client import executions, operations, requests
from k8e.client.callers import AsyncCaller, Caller
from k8e.client.executions import ContextInfo, Execution, ExecutionEvent, Result
from k8e.client.operations import Operation
from k8e.client.results import Stderr, Stdout

OnOutput = Callable[[bytes], object]
OnResult = Callable[[Result], object]


class _Named:
    """A context by its session and id."""

    def __init__(self, session_id: str, context_id: str) -> None:
        self.session_id = session_id
        self.context_id = context_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.session_id!r}, {self.context_id!r})"

    def _about(self, op: str, **fields: Any) -> dict[str, Any]:
        return executions.context_call(op, self.session_id, id=self.context_id, **fields)

    def _run(
        self,
        code: str | bytes,
        timeout: float,
        env: Mapping[str, str] | None,
        exec_id: str,
        output_limit: int,
    ) -> Operation[Execution]:
        options: requests.ExecOptions = {
            "env": env or {},
            "exec_id": exec_id,
            "output_limit": output_limit,
        }
        session = requests.by_id(self.session_id)
        return executions.events(
            executions.run_call(session, self.context_id, code, timeout, options)
        )


def _tell(
    event: ExecutionEvent,
    on_stdout: OnOutput | None,
    on_stderr: OnOutput | None,
    on_result: OnResult | None,
) -> None:
    if isinstance(event, Stdout) and on_stdout is not None:
        on_stdout(event.data)
    elif isinstance(event, Stderr) and on_stderr is not None:
        on_stderr(event.data)
    elif isinstance(event, Result) and on_result is not None:
        on_result(event)


class Context(_Named):
    """A program that keeps its variables from one run of code to the next.

    As a context manager it is removed at the end of the block.
    """

    def __init__(
        self,
        session_id: str,
        context_id: str,
        call: Callable[[Operation[Any]], Any],
        stream: Callable[[Operation[Any]], Generator[Any]],
    ) -> None:
        super().__init__(session_id, context_id)
        self._call = call
        self._stream = stream

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(errors.ContextNotFound, errors.SessionNotFound):
            self.close()

    def run(
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
        """Run code and wait for its end; what it showed, printed and raised.

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
        with contextlib.closing(events):
            for event in events:
                _tell(event, on_stdout, on_stderr, on_result)
                done = event if isinstance(event, Execution) else done
        return _ended(done)

    def stream(
        self, code: str | bytes, timeout: float = 300, *, env: Mapping[str, str] | None = None
    ) -> Generator[ExecutionEvent]:
        """Run code while iterating over what it prints and shows; last comes the Execution.

        Leaving the loop interrupts the code.
        """
        events = self._stream(self._run(code, timeout, env, "", 0))
        with contextlib.closing(events):
            yield from events

    def interrupt(self, grace: float = 5) -> bool:
        """Interrupt what runs, as Ctrl-C does; whether it stopped within ``grace`` seconds."""
        return self._call(executions.interrupt(self._about("interrupt_context", grace=grace)))

    def restart(self) -> ContextInfo:
        """End its program, whatever it does, and start a new one: the variables are gone."""
        return self._call(executions.describe(self._about("restart_context")))

    def close(self) -> None:
        """Remove it, and everything that it runs."""
        self._call(operations.call(self._about("remove_context")))


class Contexts(Caller):
    """The part of the blocking client."""

    def create_context(
        self, session_id: str, language: str = "python", *, cwd: str = "", context_id: str = ""
    ) -> Context:
        """Start a program that keeps its variables between runs.

        Args:
            session_id: where.
            language: ``python``, ``bash`` or ``node``.
            cwd: where it begins; absolute, or relative to /workspace.
            context_id: letters, digits and hyphens; by default one is made.
        """
        call = executions.context_call(
            "create_context", session_id, id=context_id, language=language, cwd=cwd
        )
        made = self._call(executions.describe(call))
        return self.get_context(made.session_id, made.context_id)

    def get_context(self, session_id: str, context_id: str) -> Context:
        """The handle of a context that was made before, here or elsewhere; asks nobody."""
        return Context(session_id, context_id, self._call, self._stream)

    def list_contexts(self, session_id: str) -> list[ContextInfo]:
        """The contexts of a session, and how they are."""
        return self._call(executions.listing(executions.context_call("list_contexts", session_id)))


class AsyncContext(_Named):
    """A program that keeps its variables; what the methods do is explained at :class:`Context`."""

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
        done: Execution | None = None
        events = self._stream(self._run(code, timeout, env, exec_id, output_limit))
        async with contextlib.aclosing(events):
            async for event in events:
                _tell(event, on_stdout, on_stderr, on_result)
                done = event if isinstance(event, Execution) else done
        return _ended(done)

    async def stream(
        self, code: str | bytes, timeout: float = 300, *, env: Mapping[str, str] | None = None
    ) -> AsyncGenerator[ExecutionEvent]:
        events = self._stream(self._run(code, timeout, env, "", 0))
        async with contextlib.aclosing(events):
            async for event in events:
                yield event

    async def interrupt(self, grace: float = 5) -> bool:
        return await self._call(executions.interrupt(self._about("interrupt_context", grace=grace)))

    async def restart(self) -> ContextInfo:
        return await self._call(executions.describe(self._about("restart_context")))

    async def close(self) -> None:
        await self._call(operations.call(self._about("remove_context")))


class AsyncContexts(AsyncCaller):
    """The part of the asynchronous client."""

    async def create_context(
        self, session_id: str, language: str = "python", *, cwd: str = "", context_id: str = ""
    ) -> AsyncContext:
        call = executions.context_call(
            "create_context", session_id, id=context_id, language=language, cwd=cwd
        )
        made = await self._call(executions.describe(call))
        return self.get_context(made.session_id, made.context_id)

    def get_context(self, session_id: str, context_id: str) -> AsyncContext:
        return AsyncContext(session_id, context_id, self._call, self._stream)

    async def list_contexts(self, session_id: str) -> list[ContextInfo]:
        call = executions.context_call("list_contexts", session_id)
        return await self._call(executions.listing(call))


def _ended(done: Execution | None) -> Execution:
    if done is None:
        raise errors.GuestFailed("the code ended without saying how")
    return done
