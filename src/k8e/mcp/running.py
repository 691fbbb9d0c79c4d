"""Tools that run programs: to their end, with output as progress, and in the background."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from typing import Any

from k8e import errors
from k8e.client import async_driving, attaching, requests
from k8e.client.asynchronous import KILL_SECONDS
from k8e.client.contexts import AsyncContext
from k8e.client.executions import Execution, Result
from k8e.client.results import ExecResult, Exit, RunState
from k8e.mcp import calls, streaming
from k8e.mcp.calls import Call, Reply

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


async def run(call: Call) -> Reply:
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


async def exec_(call: Call) -> Reply:
    async def work(session_id: str) -> ExecResult:
        return await _finish(call, _command(call, session_id))

    return Reply(ended(await call.desk.within(call.session_id, work)))


async def exec_stream(call: Call) -> Reply:
    """Both streams in one text, in the order in which they came."""
    together = bytearray()

    async def work(session_id: str) -> ExecResult:
        together.clear()
        return await _finish(call, _command(call, session_id), together)

    done = await call.desk.within(call.session_id, work)
    output = together.decode("utf-8", "replace")
    fields = {name: value for name, value in ended(done).items() if name not in _STREAMS}
    return Reply({"output": output, **fields}, text=output, more=calls.said(_notes(done)))


def _notes(done: ExecResult) -> list[str]:
    """What a reader of the output alone would not see."""
    notes = ["The command was killed: its time was over."] if done.status == "timed_out" else []
    if done.truncated:
        notes.append("The output was too long, and not all of it is here.")
    return notes + [f"Refused: {calls.refusal(item)}." for item in done.denials]


_STREAMS = ("stdout", "stderr")


async def pip_install(call: Call) -> Reply:
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


def _command(call: Call, session_id: str) -> dict[str, Any]:
    return requests.command_call(
        requests.by_id(session_id),
        call["command"],
        timeout=call["timeout"],
        stdin=False,
        options={**OPTIONS, "cwd": call["workdir"]},
    )


async def _finish(
    call: Call, asked: dict[str, Any], together: bytearray | None = None
) -> ExecResult:
    """Run to the end; output is told on the way if somebody listens."""
    if not call.teller.heard and together is None:
        return await call.client.finish(asked)
    collected = attaching.Collected()
    async with (
        streaming.streamed(call.teller) as told,
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


async def _run_in_context(call: Call) -> Reply:
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


async def _execute(call: Call, context: AsyncContext) -> Execution:
    async with streaming.streamed(call.teller) as told:
        try:
            return await context.run(
                call["code"], call["timeout"], on_stdout=told.add, on_stderr=told.add
            )
        except asyncio.CancelledError:
            # The context lives on, and so would the code.
            await async_driving.finish(context.interrupt(), KILL_SECONDS)
            raise


def _shown(done: Execution) -> Reply:
    """A run in a context, with the values that it showed as text and as pictures."""
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


async def run_background(call: Call) -> Reply:
    async def work(session_id: str) -> str:
        run = await call.client.start(
            session_id, call["code"], call["timeout"], language=call["language"]
        )
        return run.run_id

    run_id = await call.desk.within(call.session_id, work)
    session_id, _ = requests.split_run_id(run_id)
    fields = {"run_id": run_id, "session_id": session_id, "status": "running"}
    return Reply(fields)


async def poll(call: Call) -> Reply:
    run = call.client.get_run(await _known(call))
    if call["wait"]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(call["wait"]):
                await run.wait()
    return Reply(_state(await run.poll()))


async def kill(call: Call) -> Reply:
    await call.client.get_run(await _known(call)).kill()
    return Reply({"ok": True})


async def _known(call: Call) -> str:
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
