"""One call of a tool: its arguments, its ways to reach the client, and its answer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Protocol

from k8e.client.results import Denial
from k8e.mcp.client import ToolClient
from k8e.mcp.connection import ConnectionSessions


class Teller(Protocol):
    """Reports a call's progress to the client."""

    @property
    def heard(self) -> bool:
        """Whether the client wants progress."""
        ...

    async def tell(self, progress: float, message: str, total: float | None = None) -> None: ...


@dataclass(frozen=True)
class PersonQuestion:
    """A question for the person at the client."""

    message: str
    state: str
    """Comes back with the answer where the client asks and then calls again."""


@dataclass(frozen=True)
class PersonAnswer:
    """The person's answer: ``accept``, ``decline`` or ``cancel``, and what was filled in."""

    action: str
    approve: bool = False
    reason: str = ""
    state: str = ""


class Asker(Protocol):
    """Asks the person in front of the client."""

    @property
    def available(self) -> bool: ...

    @property
    def answered(self) -> PersonAnswer | None:
        """The answer from before this call, where a client asks and then calls again."""
        ...

    async def ask(self, question: PersonQuestion) -> PersonAnswer: ...


class InputNeeded(Exception):
    """The client has to ask, and to call again with the answer."""

    def __init__(self, question: PersonQuestion) -> None:
        super().__init__(question.message)
        self.question = question


@dataclass(frozen=True)
class ToolCall:
    """A tool's arguments, checked, and everything that it may use."""

    arguments: dict[str, Any]
    desk: ConnectionSessions
    teller: Teller
    asker: Asker
    allowed_hosts: tuple[str, ...] = ()
    """Hosts that sessions may reach without asking, beside the gateway's own default."""

    @property
    def client(self) -> ToolClient:
        return self.desk.client

    @property
    def session_id(self) -> str:
        return str(self.arguments.get("session_id") or "")

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = "") -> Any:
        return self.arguments.get(name, default)


@dataclass(frozen=True)
class Reply:
    """The answer of a tool: fields for programs, and text for models."""

    fields: dict[str, Any]
    text: str | None = None
    """By default the fields, as JSON."""
    more: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Further content, such as pictures."""

    def wire(self) -> dict[str, Any]:
        text = encode(self.fields) if self.text is None else self.text
        return {
            "content": [{"type": "text", "text": text}, *self.more],
            "structuredContent": self.fields,
            "isError": False,
        }


def encode(value: Any) -> str:
    """JSON with its keys in order, as K8E writes it."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def said(notes: list[str]) -> list[dict[str, Any]]:
    """Content for models that do not see the fields."""
    return [{"type": "text", "text": " ".join(notes)}] if notes else []


def clean(value: Any) -> Any:
    """The same, with the parts of texts replaced that are not valid Unicode.

    Names of files, and texts from clients, may hold halves of characters, which no transport
    accepts.
    """
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.loads(text.encode("utf-8", "replace"))
    return value


def denied(denials: list[Denial]) -> dict[str, Any]:
    """The refusals of a program, in words."""
    return {"denials": [refusal(item) for item in denials]} if denials else {}


def refusal(item: Denial) -> str:
    where = item.name or item.address
    port = f":{item.port}" if item.port else ""
    times = f", {item.count} times" if item.count > 1 else ""
    return f"{where}{port} ({item.protocol}): {item.rule}{times}"
