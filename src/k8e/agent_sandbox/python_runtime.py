"""The protocol of upstream's python-runtime, which sandboxes there serve on port 8888.

The gateway answers it itself: no server runs in the sandbox, so there is none that a program in it
could replace, and a command takes one frame on a link that is open already.
"""

from __future__ import annotations

import asyncio
import json
import math
from contextlib import aclosing
from typing import Any, NamedTuple, cast

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from k8e.agent_sandbox import paths
from k8e.agent_sandbox.answers import LARGE, Answer, Refusal, unless_left
from k8e.agent_sandbox.bodies import whole
from k8e.agent_sandbox.client import InsideClient
from k8e.agent_sandbox.multipart import Malformed, file_of
from k8e.client.results import Exit, FileEntry, Stderr, Stdout

PORT = 8888
ROUTES = ("/execute", "/upload", "/download/", "/list/", "/exists/")
DEFAULT_SECONDS = 300.0
MAX_SECONDS = 86400.0
MAX_COMMAND = 8 << 20
"""Bytes of a request to run something."""
MAX_OUTPUT = 4 << 20
"""Bytes of each stream that a command's answer has."""
MAX_HELD = 64 << 20
"""Bytes of output that one caller's commands may hold here, all together."""
TIMED_OUT = 124
CUT_OFF = "\n[k8e: the output was cut off here; a file can be read whole]"
ALIVE = {"status": "ok", "message": "Sandbox runtime is active."}


class HeldOutput:
    """Bytes of output that wait for the ends of one caller's commands."""

    def __init__(self) -> None:
        self.size = 0

    def take(self, count: int) -> bool:
        if self.size + count > MAX_HELD:
            return False
        self.size += count
        return True


class Command(NamedTuple):
    """What a client wants to run."""

    text: str
    seconds: float


def is_route(path: str) -> bool:
    """Whether a path is one of this protocol; all others are the sandbox's own."""
    return path in ("/", *ROUTES[:2]) or path.startswith(ROUTES[2:]) or path in ("/list", "/exists")


class PythonRuntime:
    """Answers for the sandboxes of one caller."""

    def __init__(self, client: InsideClient) -> None:
        self._client = client
        self._held = HeldOutput()

    async def serve(
        self, session_id: str, path: str, scope: Scope, receive: Receive, answer: Answer
    ) -> None:
        name, _, rest = path.removeprefix("/").partition("/")
        match scope["method"], name:
            case "POST", "execute":
                await self._execute(session_id, receive, answer)
            case "POST", "upload":
                await self._upload(session_id, scope, receive, answer)
            case "GET", "download":
                place = paths.locate(rest)
                await unless_left(receive, answer.give_file(self._client, session_id, place))
            case "GET", "list":
                await self._list(session_id, paths.locate(rest), answer)
            case "GET", "exists":
                await answer.tell({"exists": await self._exists(session_id, rest)})
            case "GET", "":
                await answer.tell(ALIVE)
            case _:
                raise Refusal(405, f"{scope['method']} is not served for {path[:200]}")

    async def _execute(self, session_id: str, receive: Receive, answer: Answer) -> None:
        command = parse_command(await whole(receive, MAX_COMMAND))
        result = await unless_left(receive, self._run(session_id, command))
        if len(result["stdout"]) + len(result["stderr"]) < LARGE:
            await answer.tell(result)
        else:
            body = await asyncio.to_thread(json.dumps, result)
            await answer.give(200, body.encode())

    async def _run(self, session_id: str, command: Command) -> dict[str, Any]:
        """Run a command in a shell to its end; what it printed, up to a bound."""
        output = {Stdout: bytearray(), Stderr: bytearray()}
        cut = {Stdout: False, Stderr: False}
        end: Exit | None = None
        events = self._client.exec_events(
            session_id,
            command.text,
            command.seconds,
            kill_on_disconnect=True,
            output_limit=MAX_OUTPUT,
        )
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, Exit):
                        end = event
                        continue
                    kind = type(event)
                    room = MAX_OUTPUT - len(output[kind])
                    part = event.data[:room]
                    if len(part) < len(event.data) or not self._held.take(len(part)):
                        cut[kind] = True
                        continue
                    output[kind] += part
        finally:
            self._held.size -= sum(map(len, output.values()))
        return _result(output, cut, end, command)

    async def _upload(
        self, session_id: str, scope: Scope, receive: Receive, answer: Answer
    ) -> None:
        content_type = Headers(scope=scope).get("content-type", "")
        try:
            name, content = await file_of(content_type, receive)
            async with aclosing(content):
                await self._client.write_file(session_id, paths.locate(name), content)
        except Malformed as error:
            raise Refusal(400, str(error)) from None
        await answer.tell({"message": f"File '{name}' uploaded successfully."})

    async def _list(self, session_id: str, path: str, answer: Answer) -> None:
        found = await self._client.list_files(session_id, path=path, depth=1, directories=True)
        await answer.tell([_entry(item) for item in found])

    async def _exists(self, session_id: str, path: str) -> bool:
        try:
            await self._client.stat(session_id, paths.locate(path), follow=True)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True


def parse_command(body: bytes) -> Command:
    """The request to run something."""
    try:
        told: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal(422, "the body is not JSON") from None
    fields = cast("dict[str, Any]", told) if isinstance(told, dict) else {}
    text, seconds = fields.get("command"), fields.get("timeout_seconds")
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise Refusal(422, "command must be a text that is not empty")
    if seconds is None:
        return Command(text, DEFAULT_SECONDS)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise Refusal(422, "timeout_seconds must be a number")
    if not math.isfinite(seconds) or not 0 < seconds <= MAX_SECONDS:
        raise Refusal(422, f"timeout_seconds must be above 0 and at most {MAX_SECONDS:g}")
    return Command(text, float(seconds))


def _result(
    output: dict[Any, bytearray], cut: dict[Any, bool], end: Exit | None, command: Command
) -> dict[str, Any]:
    truncated = end is not None and end.truncated
    texts = {
        kind: data.decode("utf-8", "replace")
        + (CUT_OFF if cut[kind] or (truncated and len(data) == MAX_OUTPUT) else "")
        for kind, data in output.items()
    }
    stderr = texts[Stderr]
    timed_out = end is not None and end.status == "timed_out"
    if timed_out:
        stderr += f"Command timed out after {command.seconds:g} seconds"
    code = TIMED_OUT if timed_out else end.exit_code if end is not None else 1
    return {"stdout": texts[Stdout], "stderr": stderr, "exit_code": code, "timed_out": timed_out}


def _entry(item: FileEntry) -> dict[str, Any]:
    return {
        "name": item.path.rpartition("/")[2],
        "size": item.size,
        "type": "directory" if item.type == "dir" else "file",
        "mod_time": item.modified_ns / 1e9,
    }
