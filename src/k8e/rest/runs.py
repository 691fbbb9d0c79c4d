"""Programs that run in a sandbox: to their end, or streamed as server-sent events."""

from __future__ import annotations

import asyncio
import base64
import codecs
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from k8e.client import requests
from k8e.client.requests import ExecOptions
from k8e.client.results import ExecEvent, ExecResult, Exit, Stderr, Stdout
from k8e.rest import models, problems
from k8e.rest.bodies import Left, unless_left
from k8e.rest.problems import Refusal
from k8e.rest.requests import MAX_RUN, Reply, Request

EVENT_STREAM = b"text/event-stream"
KEEP_ALIVE_SECONDS = 15.0
"""Of silence, after which a proxy is told that the stream still lives."""


def call_of(asked: models.Run, sandbox_id: str, *, whole: bool) -> dict[str, Any]:
    """What the guest is asked for; ``whole`` says that its output is collected."""
    options: ExecOptions = {
        "kill_on_disconnect": True,
        "output_limit": asked.output_limit if whole else 0,
    }
    if asked.env:
        options["env"] = asked.env
    if asked.cwd:
        options["cwd"] = asked.cwd
    session, stdin = requests.by_id(sandbox_id), asked.stdin is not None
    if (asked.command is None) == (asked.code is None):
        raise Refusal(
            400, "invalid_request", "a run needs command or code, one of them",
            hint="command is for the shell, code is in the language that you name",
        )  # fmt: skip
    if asked.code is not None:
        return requests.code_call(
            session,
            asked.code,
            language=asked.language or "python",
            timeout=asked.timeout,
            stdin=stdin,
            options=options,
        )
    if asked.language is not None:
        raise Refusal(400, "invalid_request", "a command has no language; code has one")
    return requests.command_call(
        session, asked.command or "", timeout=asked.timeout, stdin=stdin, options=options
    )


async def run(request: Request, reply: Reply) -> None:
    asked = await request.body(models.Run, MAX_RUN)
    call = call_of(asked, request.sandbox_id, whole=True)
    work = request.calls.run(request.request_id, call, asked.stdin)
    result = await unless_left(request.receive, work)
    size = len(result.stdout_bytes) + len(result.stderr_bytes)
    await reply.tell_large(_result(result, asked.encoding), size)


def _result(result: ExecResult, encoding: models.Encoding) -> models.RunResult:
    return models.RunResult(
        **_end(result),
        stdout=_text(result.stdout_bytes, encoding),
        stderr=_text(result.stderr_bytes, encoding),
        encoding=encoding,
    )


def _end(result: ExecResult | Exit) -> dict[str, Any]:
    return {
        "exit_code": result.exit_code,
        "status": result.status,
        "truncated": result.truncated,
        "duration_ms": result.duration_ms,
        "exec_id": result.exec_id,
        "denials": [
            models.Denial(
                name=item.name,
                address=item.address,
                port=item.port,
                protocol=item.protocol,
                rule=item.rule,
                count=item.count,
            )
            for item in result.denials
        ],
    }


def _text(data: bytes, encoding: models.Encoding) -> str:
    if encoding == "base64":
        return base64.b64encode(data).decode()
    return data.decode("utf-8", "replace")


# Streams.


class Decoder:
    """Pieces of one stream as text: a character that two pieces share is in the second."""

    def __init__(self, encoding: models.Encoding) -> None:
        self._whole = encoding == "base64"
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def text(self, data: bytes, *, final: bool = False) -> str:
        if self._whole:
            return base64.b64encode(data).decode()
        return self._decoder.decode(data, final)


async def stream(request: Request, reply: Reply) -> None:
    asked = await request.body(models.Run, MAX_RUN)
    call = call_of(asked, request.sandbox_id, whole=False)
    await unless_left(request.receive, _stream(request, reply, asked, call))


async def _stream(request: Request, reply: Reply, asked: models.Run, call: dict[str, Any]) -> None:
    decoders = {"stdout": Decoder(asked.encoding), "stderr": Decoder(asked.encoding)}
    events = request.calls.run_events(request.request_id, call, asked.stdin)
    async with aclosing(_with_pauses(events)) as told:
        try:
            async for event in told:
                if not reply.status:
                    await reply.begin(200, EVENT_STREAM)
                await reply.piece(b"".join(_events_of(event, decoders)))
        except Left:
            raise
        except Exception as error:
            if not reply.status:
                raise
            problem = problems.problem_of(error, request.request_id)
            await reply.piece(_event("error", problem.model_dump(exclude_none=True)))
    await reply.end()


async def _with_pauses(events: AsyncGenerator[ExecEvent]) -> AsyncGenerator[ExecEvent | None]:
    """The same events, and None after each silence."""
    async with aclosing(events):
        coming = asyncio.ensure_future(anext(events, StopAsyncIteration))
        try:
            while True:
                done, _ = await asyncio.wait({coming}, timeout=KEEP_ALIVE_SECONDS)
                if not done:
                    yield None
                    continue
                event = coming.result()
                if event is StopAsyncIteration:
                    return
                yield event  # pyright: ignore[reportReturnType]
                coming = asyncio.ensure_future(anext(events, StopAsyncIteration))
        finally:
            coming.cancel()
            await asyncio.wait({coming})


def _events_of(event: ExecEvent | None, decoders: dict[str, Decoder]) -> list[bytes]:
    match event:
        case Stdout() | Stderr():
            name = "stdout" if isinstance(event, Stdout) else "stderr"
            text = decoders[name].text(event.data)
            return [_event(name, {"data": text, "seq": event.seq})] if text else []
        case Exit():
            rest = {name: decoder.text(b"", final=True) for name, decoder in decoders.items()}
            told = [_event(name, {"data": text}) for name, text in rest.items() if text]
            end = {key: value for key, value in _end(event).items() if key != "denials"}
            denials = [item.model_dump() for item in _end(event)["denials"]]
            return [*told, _event("exit", {**end, "denials": denials})]
        case _:
            return [b": still running\n\n"]


def _event(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
