"""The app of one A2A caller, which the gateway mounts in its HTTP endpoint.

The gateway has checked the credential, the host and the origin before anything arrives here. Each
caller has an app of its own, and so tasks, contexts and sandboxes that no other caller can name.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from k8e.a2a import rpc
from k8e.a2a.runner import TaskRunner, TaskTerms
from k8e.client.async_driver import Connector, Dial, LocalConnector
from k8e.client.asynchronous import AsyncSandboxClient

T = TypeVar("T")
MAX_BODY = 8 << 20
MAX_READING = 64 << 20
"""Bytes of bodies that are being read at a time: one caller may have hundreds of requests."""
BODY_SECONDS = 30.0
JSON, EVENTS = "application/json", "text/event-stream"
SAFE = {"x-content-type-options": "nosniff", "cache-control": "no-store"}


class HttpProblem(Exception):
    """A request that is answered with a status and a sentence."""

    def __init__(self, status: int, text: str, **headers: str) -> None:
        super().__init__(text)
        self.response = PlainTextResponse(f"{text}\n", status, {**SAFE, **headers})


class CallerLeft(Exception):
    """The caller disconnected before its answer was ready."""


class CallerClient(AsyncSandboxClient):
    """The SDK's client on connections that the gateway makes on behalf of one caller."""

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        super().__init__()

    def _connector(self, *_: object) -> Connector:
        return LocalConnector("", self._dial)


class App:
    """Answers the calls of one caller."""

    def __init__(self, client: AsyncSandboxClient, terms: TaskTerms) -> None:
        self._client = client
        self._runner = TaskRunner(client, terms)
        self._service = rpc.RpcService(self._runner)
        self._reading = 0  # bytes of bodies

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Run everything that lives as long as the app: tasks and their sandboxes end with it."""
        async with self._client:
            try:
                yield
            finally:
                await self._runner.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._answer(scope, receive)
        except HttpProblem as problem:
            await problem.response(scope, receive, send)
        except rpc.RpcRefusal as refusal:
            await _json(refusal.body)(scope, receive, send)
        except CallerLeft:
            return
        else:
            if isinstance(answer, bytes):
                await _json(answer)(scope, receive, send)
                return
            async with contextlib.aclosing(answer):
                stream = StreamingResponse(answer, headers=SAFE, media_type=EVENTS)
                await stream(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> bytes | AsyncGenerator[bytes]:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if scope["method"] != "POST":
            raise HttpProblem(405, "calls are POST requests", allow="POST")
        if not headers.get(b"content-type", b"").lower().startswith(JSON.encode()):
            raise HttpProblem(415, f"calls are {JSON}")
        version = headers.get(b"a2a-version", b"").decode("latin-1")
        call = rpc.RpcCall(await self._body(receive), version)
        return await _while_there(receive, self._service.answer(call))

    async def _body(self, receive: Receive) -> bytes:
        found = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise CallerLeft
                    self._take(found, message)
                    if not message.get("more_body"):
                        return bytes(found)
        except TimeoutError:
            raise HttpProblem(408, "the body took too long", connection="close") from None
        finally:
            self._reading -= len(found)

    def _take(self, found: bytearray, message: Message) -> None:
        """Add a piece to a body, if there is room for it."""
        piece: bytes = message.get("body", b"")
        if len(found) + len(piece) > MAX_BODY:
            raise HttpProblem(
                413, f"the body is larger than {MAX_BODY >> 20} MiB", connection="close"
            )
        if self._reading + len(piece) > MAX_READING:
            raise HttpProblem(
                429, "too many large bodies arrive at once; send fewer", connection="close"
            )
        found += piece
        self._reading += len(piece)


async def _while_there(receive: Receive, answer: Coroutine[Any, Any, T]) -> T:
    """Wait for an answer as long as the caller does; the task that it concerns goes on.

    Raises:
        CallerLeft: the caller hung up.
    """
    answering = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise CallerLeft
        return answering.result()
    finally:
        leaving.cancel()
        answering.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _json(body: bytes) -> Response:
    return Response(body, headers=SAFE, media_type=JSON)


def mount(dial: Dial) -> App:
    """An app for one caller, on whose behalf ``dial`` connects to the gateway."""
    return App(CallerClient(dial), TaskTerms())
