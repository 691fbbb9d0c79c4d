"""One request and its answer, as the handlers of routes see them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel
from starlette.types import Message, Receive, Scope, Send

from k8e.rest import problems
from k8e.rest.bodies import Left
from k8e.rest.client import GatewayCalls
from k8e.rest.problems import Refusal

M = TypeVar("M", bound=BaseModel)

REQUEST_KEY = "k8e.request_id"
"""Where the gateway puts the id of a request."""
MAX_BODY = 1 << 20
"""Bytes of a request in JSON …"""
MAX_RUN = 9 << 20
"""… and of one that brings source code, which may have 8 MiB."""
MAX_QUERY = 64  # parameters
LARGE = 256 << 10
"""Bytes of text whose JSON is made in a thread."""
SLOW_SECONDS = 300.0
"""How long a client may leave bytes that wait for it."""
JSON = b"application/json"
_MORE = {
    401: (b"www-authenticate", b"Bearer"),
    429: (b"retry-after", b"1"),
    503: (b"retry-after", b"1"),
}
"""What an answer with such a status must say, too."""


class Request:
    """A request, which reads its own parts."""

    def __init__(
        self, calls: GatewayCalls, scope: Scope, receive: Receive, names: Mapping[str, str]
    ) -> None:
        self.calls = calls
        self.receive = receive
        self.names = names
        """The parts of the path that have names."""
        self.request_id = str(scope.get(REQUEST_KEY, ""))
        self._scope = scope

    @property
    def sandbox_id(self) -> str:
        return self.names["sandbox_id"]

    def header(self, name: bytes) -> str:
        for key, value in self._scope["headers"]:
            if key.lower() == name:
                return value.decode("latin-1").strip()
        return ""

    def query(self, model: type[M]) -> M:
        """The parameters after the question mark."""
        raw = self._scope["query_string"].decode("latin-1")
        try:
            pairs = parse_qsl(
                raw, keep_blank_values=True, strict_parsing=bool(raw), errors="strict",
                max_num_fields=MAX_QUERY,
            )  # fmt: skip
        except (ValueError, UnicodeDecodeError):
            raise Refusal(400, "invalid_request", "the query cannot be read") from None
        found = dict(pairs)
        if len(found) < len(pairs):
            raise Refusal(400, "invalid_request", "a parameter of the query is there twice")
        return model.model_validate(found)

    async def body(self, model: type[M], limit: int = MAX_BODY) -> M:
        """The body, in JSON of at most ``limit`` bytes."""
        kind = self.header(b"content-type").partition(";")[0].strip().lower()
        if kind != JSON.decode():
            raise Refusal(
                415, "unsupported_media_type", f"the body is {kind or 'of no type'}, not JSON",
                hint="send 'Content-Type: application/json'",
            )  # fmt: skip
        data = await self.calls.arriving.whole(self.receive, limit)
        return model.model_validate_json(data, strict=True)

    async def ask(self, op: str, **fields: object) -> dict[str, object]:
        """One operation of the gateway."""
        return await self.calls.ask(self.request_id, op, **fields)


class Reply:
    """The answer to one request."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        """What was answered; 0 before that."""
        self.done = False
        """Whether nothing more comes."""
        self.left = False
        """Whether its client takes nothing any more."""

    async def send(self, message: Message) -> None:
        """Send a part; Left if the client takes nothing for a long time."""
        if self.left:
            raise Left
        limit = asyncio.timeout(SLOW_SECONDS)
        try:
            async with limit:
                await self._send(message)
        except TimeoutError:
            if not limit.expired():
                raise
            self.left = True
            raise Left from None

    async def begin(self, status: int, kind: bytes, *headers: tuple[bytes, bytes]) -> None:
        self.status = status
        given = [(b"content-type", kind), (b"cache-control", b"no-store"), *headers]
        safe = (b"x-content-type-options", b"nosniff")
        await self.send(
            {"type": "http.response.start", "status": status, "headers": [*given, safe]}
        )

    async def piece(self, data: bytes) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})
        self.done = True

    async def give(
        self,
        status: int,
        body: bytes,
        kind: bytes = JSON,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        """A whole answer."""
        await self.begin(status, kind, (b"content-length", b"%d" % len(body)), *headers)
        await self.send({"type": "http.response.body", "body": body, "more_body": False})
        self.done = True

    async def tell(self, answer: BaseModel, status: int = 200) -> None:
        """A whole answer in JSON."""
        await self.give(status, _encode(answer))

    async def tell_large(self, answer: BaseModel, size: int) -> None:
        """The same, without holding others up where the answer has many bytes."""
        if size < LARGE:
            await self.tell(answer)
        else:
            await self.give(200, await asyncio.to_thread(_encode, answer))

    async def refuse(self, error: Exception, request_id: str) -> None:
        """A problem; an answer that has begun stays without its end, and the app cuts it off."""
        problem = problems.problem_of(error, request_id)
        if self.status:
            self.status = problem.status
            return
        headers = list(error.headers) if isinstance(error, Refusal) else []
        if problem.status in (413, 415):  # nobody reads the rest of the body
            headers.append((b"connection", b"close"))
        if (more := _MORE.get(problem.status)) is not None:
            headers.append(more)
        await self.give(problem.status, problems.encoded(problem), problems.CONTENT_TYPE, headers)


def _encode(answer: BaseModel) -> bytes:
    # Names of files may be any bytes, which only this writes down.
    return json.dumps(answer.model_dump()).encode() + b"\n"
