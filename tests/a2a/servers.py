"""A real ``k8e a2a`` on loopback, and the official client for it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import uuid
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import httpx
from a2a.client import A2ACardResolver, Client, ClientConfig, ClientFactory
from a2a.types import a2a_pb2 as pb

from tests.places import COMMAND, Place, wait_readable

PATIENCE = 40.0
VERSIONS = ("1.0", "0.3")
OVER = (
    pb.TASK_STATE_COMPLETED,
    pb.TASK_STATE_FAILED,
    pb.TASK_STATE_CANCELED,
    pb.TASK_STATE_REJECTED,
)


class Running:
    """A server that runs, and the tokens of two callers."""

    def __init__(
        self, url: str, tokens: dict[str, str], process: subprocess.Popen[bytes], file: Path
    ) -> None:
        self.url, self.tokens, self.process, self.file = url, tokens, process, file

    @property
    def port(self) -> int:
        return int(self.url.rstrip("/").rpartition(":")[2])

    def headers(self, name: str = "default") -> dict[str, str]:
        return {"Authorization": f"Bearer {self.tokens[name]}"}

    def call(self, method: str, params: Any, name: str = "default") -> dict[str, Any]:
        """One call, without the official client."""
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        answer = httpx.post(self.url, json=body, headers=self.headers(name), timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        return answer.json()

    @contextlib.asynccontextmanager
    async def client(
        self, version: str, name: str = "default", *, streaming: bool = True
    ) -> AsyncGenerator[Client]:
        """The official client, for one version of the protocol."""
        async with httpx.AsyncClient(headers=self.headers(name), timeout=PATIENCE) as transport:
            card = await A2ACardResolver(transport, self.url).get_agent_card()
            chosen = [i for i in card.supported_interfaces if i.protocol_version == version]
            del card.supported_interfaces[:]
            card.supported_interfaces.extend(chosen)
            config = ClientConfig(httpx_client=transport, streaming=streaming)
            made = ClientFactory(config).create(card)
            if version == "0.3":
                transport.headers.pop("A2A-Version", None)  # clients of then had none
            yield made


@contextlib.contextmanager
def running(place: Place, *flags: str, runtime: str = "container") -> Generator[Running]:
    file = place.folder / f"tokens-{uuid.uuid4().hex}"
    tokens = {
        name: place.json("a2a", "token", name, "--tokens", str(file))["token"]
        for name in ("default", "other")
    }
    argv = [*COMMAND, "a2a", "--addr", "127.0.0.1:0", "--tokens", str(file), "--runtime", runtime]
    process = subprocess.Popen(
        [*argv, *flags], env=place.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert wait_readable(process.stdout.fileno(), PATIENCE)
        ready = json.loads(process.stdout.readline())
        yield Running(ready["url"], tokens, process, file)
    finally:
        process.terminate()
        _, problems = process.communicate(timeout=PATIENCE)
        Path(file).unlink()
    assert problems == b""
    assert process.returncode == 0


def message(*parts: pb.Part, context: str = "", task: str = "") -> pb.SendMessageRequest:
    told = pb.Message(
        message_id=uuid.uuid4().hex,
        role=pb.ROLE_USER,
        parts=parts,
        context_id=context,
        task_id=task,
    )
    return pb.SendMessageRequest(message=told)


def code(text: str, language: str = "python") -> pb.Part:
    return pb.Part(text=f"Please run this:\n\n```{language}\n{text}\n```\n")


async def finished(client: Client, request: pb.SendMessageRequest) -> pb.Task:
    """Send a message, wait for the end, and get the task."""
    found = ""
    async for event in client.send_message(request):
        found = event.task.id or event.status_update.task_id or event.artifact_update.task_id
    return await client.get_task(pb.GetTaskRequest(id=found))


def text(task: pb.Task, name: str = "stdout") -> str:
    return "".join(
        part.text for item in task.artifacts if item.artifact_id == name for part in item.parts
    )


def result(task: pb.Task) -> dict[str, Any]:
    from google.protobuf.json_format import MessageToDict

    (found,) = (item for item in task.artifacts if item.artifact_id == "result")
    return MessageToDict(found.parts[0])["data"]
