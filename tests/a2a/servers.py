"""A gateway that serves A2A, callers with API keys, and the official client."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, Generator
from typing import Any

import httpx
from a2a.client import A2ACardResolver, Client, ClientConfig, ClientFactory
from a2a.types import a2a_pb2 as pb

from tests.gateway import http_gateways
from tests.gateway.http_gateways import HttpGateway

PATIENCE = 60.0
VERSIONS = ("1.0", "0.3")
OVER = (
    pb.TASK_STATE_COMPLETED,
    pb.TASK_STATE_FAILED,
    pb.TASK_STATE_CANCELED,
    pb.TASK_STATE_REJECTED,
)


class A2aGateway:
    """A gateway that runs, and the keys of callers."""

    def __init__(self, gateway: HttpGateway) -> None:
        self.gateway = gateway
        self.url = f"{gateway.root}/a2a"
        self._headers: dict[str, dict[str, str]] = {"local": gateway.headers}

    def headers(self, name: str) -> dict[str, str]:
        """What a caller shows; its key is made when it is first asked for."""
        if name not in self._headers:
            self._headers[name] = self.gateway.key(name).headers
        return self._headers[name]

    def delete(self, name: str) -> None:
        """Delete the key of a caller, as an admin does it."""
        self.gateway.place.json("sandbox", "api-key", "delete", name)
        del self._headers[name]

    def call(self, method: str, params: Any, name: str = "local") -> dict[str, Any]:
        """One call, without the official client."""
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        answer = httpx.post(self.url, json=body, headers=self.headers(name), timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def sessions(self) -> int:
        """How many sessions live."""
        return int(self.gateway.place.json("status")["sessions"])

    @contextlib.asynccontextmanager
    async def client(
        self, version: str, name: str = "local", *, streaming: bool = True
    ) -> AsyncGenerator[Client]:
        """The official client, for one version of the protocol. It has the card unauthenticated."""
        async with httpx.AsyncClient(timeout=PATIENCE) as stranger:
            card = await A2ACardResolver(stranger, self.gateway.root).get_agent_card()
        async with httpx.AsyncClient(headers=self.headers(name), timeout=PATIENCE) as transport:
            chosen = [i for i in card.supported_interfaces if i.protocol_version == version]
            del card.supported_interfaces[:]
            card.supported_interfaces.extend(chosen)
            config = ClientConfig(httpx_client=transport, streaming=streaming)
            made = ClientFactory(config).create(card)
            if version == "0.3":
                transport.headers.pop("A2A-Version", None)  # clients of then had none
            yield made


@contextlib.contextmanager
def running(runtime: str = "container", **environ: str) -> Generator[A2aGateway]:
    with http_gateways.started(K8E_RUNTIME=runtime, **environ) as gateway:
        yield A2aGateway(gateway)


def message(
    *parts: pb.Part, context: str = "", task: str = "", **metadata: str
) -> pb.SendMessageRequest:
    told = pb.Message(
        message_id=uuid.uuid4().hex,
        role=pb.ROLE_USER,
        parts=parts,
        context_id=context,
        task_id=task,
    )
    told.metadata.update(metadata)
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
