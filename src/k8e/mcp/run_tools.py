"""Tools that run programs: to their end, with output as progress, and in the background.

Output is collected for a moment, so that a flood of it does not become a flood of messages.
"""

from __future__ import annotations

import asyncio
import base64
import codecs
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from k8e import errors
from k8e.client import async_driver, attachment, requests
from k8e.client.async_caller import KILL_SECONDS
from k8e.client.async_contexts import AsyncContext
from k8e.client.executions import Execution, Result
from k8e.client.results import ExecResult, Exit, RunState
from k8e.mcp import calls
from k8e.mcp.calls import Reply, Teller, ToolCall

EVERY = 0.1  # seconds between two messages
MAX_MESSAGE = 8 << 10  # characters of one message; the whole output is in the result
SKIPPED = "…"


class Streamed:
    """Takes output as it comes, and reports it."""

    def __init__(self, teller: Teller) -> None:
        self._teller = teller
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._held = ""
        self._count = 0  # bytes by now: progress must grow

    def add(self, data: bytes) -> None:
        if self._teller.heard:
            self._count += len(data)
            self._held += self._decode(data)
            if len(self._held) > MAX_MESSAGE:
                self._held = SKIPPED + self._held[-MAX_MESSAGE:]

    async def flush(self) -> None:
        if self._held:
            text, self._held = self._held, ""
            await self._teller.tell(self._count, text)


@contextlib.asynccontextmanager
async def streamed(teller: Teller) -> AsyncGenerator[Streamed]:
    """Report new output while the block runs, and the rest at its end."""
    found = Streamed(teller)
    if not teller.heard:
        yield found
        return
    telling = asyncio.create_task(_tell(found))
    try:
        yield found
    finally:
        telling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await telling
    await found.flush()


async def _tell(found: Streamed) -> None:
    while True:
        await asyncio.sleep(EVERY)
        await found.flush()


PICTURES = ("image/png", "image/jpeg")
LANGUAGES = {
    "py": "python",
    "python3": "python",
    "js": "node",
    "nodejs": "node",
    "javascript": "node",
    "sh": "bash",
    "shell": "bash",
}
CONTEXT_LANGUAGES = ("python", "node", "bash")
OPTIONS: requests.ExecOptions = {"kill_on_disconnect": True}
"""A server that dies takes its programs with it."""


async def run(call: ToolCall) -> Reply:
    if call.get("context"):
        return await _run_in_context(call)

    async def work(session_id: str) -> ExecResult:
        asked = requests.code_call(
            requests.by_id(session_id),
            call["code"],
            language=call["language"],
            timeout=call["timeout"],
            stdin=False,
            options=OPTIONS,
        )
        return await _finish(call, asked)

    done = await call.desk.within(call.session_id, work)
    fields = ended(done)
    if not done.exit_code and not done.stderr_bytes:
        del fields["stderr"]  # as K8E does
    return Reply(fields)


async def exec_(call: ToolCall) -> Reply:
    async def work(session_id: str) -> ExecResult:
        return await _finish(call, _command(call, session_id))

    return Reply(ended(await call.desk.within(call.session_id, work)))


async def exec_stream(call: ToolCall) -> Reply:
    """Both streams in one text, in the order of their arrival."""
    together = bytearray()

    async def work(session_id: str) -> ExecResult:
        together.clear()
        return await _finish(call, _command(call, session_id), together)

    done = await call.desk.within(call.session_id, work)
    output = together.decode("utf-8", "replace")
    fields = {name: value for name, value in ended(done).items() if name not in _STREAMS}
    return Reply({"output": output, **fields}, text=output, more=calls.said(_notes(done)))


def _notes(done: ExecResult) -> list[str]:
    """Notes that a reader of the output alone would otherwise miss."""
    notes = ["The command was killed: its time was over."] if done.status == "timed_out" else []
    if done.truncated:
        notes.append("The output was too long, and not all of it is here.")
    return notes + [f"Refused: {calls.refusal(item)}." for item in done.denials]


_STREAMS = ("stdout", "stderr")


async def pip_install(call: ToolCall) -> Reply:
    async def work(session_id: str) -> ExecResult:
        asked = requests.pip_call(session_id, call["packages"], call["timeout"])
        return await _finish(call, {**asked, "kill_on_disconnect": True})

    done = await call.desk.within(call.session_id, work)
    fields = {
        "exit_code": done.exit_code,
        "output": done.stdout + done.stderr,
        "session_id": done.session_id,
        **calls.denied(done.denials),
    }
    return Reply(fields)


def ended(done: ExecResult) -> dict[str, Any]:
    return {
        "exit_code": done.exit_code,
        "stdout": done.stdout,
        "stderr": done.stderr,
        "session_id": done.session_id,
        "status": done.status,
        "duration_ms": done.duration_ms,
        "truncated": done.truncated,
        **calls.denied(done.denials),
    }


def _command(call: ToolCall, session_id: str) -> dict[str, Any]:
    return requests.command_call(
        requests.by_id(session_id),
        call["command"],
        timeout=call["timeout"],
        stdin=False,
        options={**OPTIONS, "cwd": call["workdir"]},
    )


async def _finish(
    call: ToolCall, asked: dict[str, Any], together: bytearray | None = None
) -> ExecResult:
    """Run to the end, and report output on the way if the client asked for progress."""
    if not call.teller.heard and together is None:
        return await call.client.finish(asked)
    collected = attachment.Collected()
    async with (
        streamed(call.teller) as told,
        contextlib.aclosing(call.client.follow(asked)) as events,
    ):
        async for event in events:
            collected.add(event)
            if not isinstance(event, Exit):
                told.add(event.data)
                if together is not None:
                    together += event.data
    return collected.result()


# Contexts.


async def _run_in_context(call: ToolCall) -> Reply:
    language = LANGUAGES.get(call["language"], call["language"])
    if language not in CONTEXT_LANGUAGES:
        raise errors.InvalidRequest(
            f"a context cannot keep the variables of {language}",
            hint=f"contexts exist for {', '.join(CONTEXT_LANGUAGES)}",
        )

    async def work(session_id: str) -> Execution:
        context = call.client.get_context(session_id, call["context"])
        try:
            return await _execute(call, context)
        except errors.ContextNotFound:
            await call.client.create_context(session_id, language, context_id=call["context"])
        return await _execute(call, context)

    return _shown(await call.desk.within(call.session_id, work))


async def _execute(call: ToolCall, context: AsyncContext) -> Execution:
    async with streamed(call.teller) as told:
        try:
            return await context.run(
                call["code"], call["timeout"], on_stdout=told.add, on_stderr=told.add
            )
        except asyncio.CancelledError:
            # The context lives on, and so would the code.
            await async_driver.finish(context.interrupt(), KILL_SECONDS)
            raise


def _shown(done: Execution) -> Reply:
    """A run in a context, with the values that it displayed as text and as pictures."""
    stderr = done.stderr_bytes.decode("utf-8", "replace")
    if done.error is not None:
        stderr += done.error.traceback or f"{done.error.name}: {done.error.value}\n"
    stdout = done.stdout_bytes.decode("utf-8", "replace")
    values = [item.text for item in done.results if item.text]
    fields: dict[str, Any] = {
        "exit_code": done.exit_code,
        "stdout": stdout + "".join(f"{value}\n" for value in values),
        "stderr": stderr,
        "session_id": done.session_id,
        "status": done.status,
        "duration_ms": done.duration_ms,
        "truncated": done.truncated,
        **calls.denied(done.denials),
    }
    pictures = [shown for item in done.results for shown in _pictures(item)]
    return Reply(fields, more=pictures)


def _pictures(item: Result) -> list[dict[str, Any]]:
    found = [(kind, item.data.get(kind)) for kind in PICTURES]
    return [
        {"type": "image", "mimeType": kind, "data": base64.b64encode(data).decode("ascii")}
        for kind, data in found
        if isinstance(data, bytes)
    ]


# In the background.


async def run_background(call: ToolCall) -> Reply:
    async def work(session_id: str) -> str:
        run = await call.client.start(
            session_id, call["code"], call["timeout"], language=call["language"]
        )
        return run.run_id

    run_id = await call.desk.within(call.session_id, work)
    session_id, _ = requests.split_run_id(run_id)
    fields = {"run_id": run_id, "session_id": session_id, "status": "running"}
    return Reply(fields)


async def poll(call: ToolCall) -> Reply:
    run = call.client.get_run(await _known(call))
    if call["wait"]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(call["wait"]):
                await run.wait()
    return Reply(_state(await run.poll()))


async def kill(call: ToolCall) -> Reply:
    await call.client.get_run(await _known(call)).kill()
    return Reply({"ok": True})


async def _known(call: ToolCall) -> str:
    """The run's id, if it is in a session of this connection."""
    session_id, _ = requests.split_run_id(call["run_id"])
    await call.desk.find(session_id)
    return call["run_id"]


def _state(state: RunState) -> dict[str, Any]:
    return {
        "run_id": state.run_id,
        "session_id": state.session_id,
        "status": state.status,
        "exit_code": state.exit_code,
        "stdout": state.stdout,
        "stderr": state.stderr,
        "duration_ms": state.duration_ms,
        "truncated": state.truncated,
    }
