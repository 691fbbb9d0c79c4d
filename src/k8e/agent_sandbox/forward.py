"""A request to a server in a sandbox, and its answer, each passed on as it comes.

Neither side is trusted. The server sees no credential and none of the router's headers, and cannot
say anything about the connection between the router and its client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import h11
from starlette.types import Receive, Scope

from k8e.agent_sandbox.answers import Answer, Refusal
from k8e.agent_sandbox.bodies import Left, pieces
from k8e.agent_sandbox.reach import PortConnection
from k8e.http_messages import HttpStream

Headers = list[tuple[bytes, bytes]]

MAX_HEAD = 64 << 10
"""Bytes of an answer's head."""
MAX_INFORMATION = 16  # answers before the answer
HOST = b"localhost"
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer "
    b"transfer-encoding upgrade".split()
)
_NEVER_TOLD = frozenset((b"authorization", b"host", b"forwarded", b"x-real-ip", b"expect"))
_PREFIXES = (b"x-sandbox-", b"x-forwarded-", b"x-k8e-")
_OF_THE_ORIGIN = frozenset(
    b"set-cookie set-cookie2 strict-transport-security alt-svc clear-site-data".split()
)
"""What would hold for the gateway's whole address, and so for every other sandbox."""


class BadAnswer(Exception):
    """The server's answer is no HTTP, or ends in the middle."""


async def forward(
    connection: PortConnection, path: str, scope: Scope, receive: Receive, answer: Answer
) -> None:
    """Pass one request on, and its answer back."""
    server = HttpStream(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
    asked = _request(path, scope)
    try:
        await connection.send(server.send(asked))
        feeding = asyncio.create_task(_feed(connection, server, receive))
        try:
            await _pass_answer(connection, server, answer, feeding)
        finally:
            feeding.cancel()
            await asyncio.wait({feeding})
    except (h11.ProtocolError, BadAnswer) as error:
        raise Refusal(502, f"the server in the sandbox sent no good answer: {error}") from None


async def _feed(connection: PortConnection, server: HttpStream, receive: Receive) -> None:
    """Pass the request's body on; then wait, so that a client that leaves is noticed."""
    async for piece in pieces(receive):
        await connection.send(server.send(h11.Data(data=piece)))
    await connection.send(server.send(h11.EndOfMessage()))
    while (await receive())["type"] != "http.disconnect":
        pass


async def _pass_answer(
    connection: PortConnection, server: HttpStream, answer: Answer, feeding: asyncio.Task[None]
) -> None:
    events = _events(connection, server)
    information = 0
    while True:
        event = await _next(events, feeding)
        match event:
            case h11.InformationalResponse():
                information += 1
                if information > MAX_INFORMATION:
                    raise BadAnswer("too many answers before the answer")
            case h11.Response():
                await answer.begin(event.status_code, *_answer_headers(event))
            case h11.Data():
                body = bytes(event.data)
                await answer.send({"type": "http.response.body", "body": body, "more_body": True})
            case h11.EndOfMessage():
                await answer.send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            case _:
                raise BadAnswer("it ended without an answer")


async def _next(events: AsyncGenerator[Any], feeding: asyncio.Task[None]) -> Any:
    """The server's next event; Left if the client leaves before."""
    waiting = asyncio.ensure_future(anext(events, None))
    try:
        await asyncio.wait({waiting, feeding}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done() and _has_left(feeding):
            raise Left
        return await waiting
    finally:
        waiting.cancel()
        await asyncio.wait({waiting})


def _has_left(feeding: asyncio.Task[None]) -> bool:
    """Whether the client is gone. A server that takes no more of a body may answer all the same."""
    return feeding.exception() is None or isinstance(feeding.exception(), Left)


async def _events(connection: PortConnection, server: HttpStream) -> AsyncGenerator[Any]:
    while True:
        event = server.next_event()
        if event is h11.NEED_DATA:
            server.receive_data(await connection.receive())
        else:
            yield event


def _request(path: str, scope: Scope) -> h11.Request:
    """The request as the server in the sandbox gets it."""
    given: Headers = scope["headers"]
    if b"websocket" in _words(given, b"upgrade"):
        raise Refusal(501, "WebSockets are not served here")
    kept = [item for item in _end_to_end(given) if not _is_ours(item[0])]
    if _words(given, b"transfer-encoding"):
        kept = [item for item in kept if item[0] != b"content-length"]
        kept.append((b"Transfer-Encoding", b"chunked"))
    headers = [(b"Host", HOST), *kept, (b"Connection", b"close")]
    query: bytes = scope["query_string"]
    target = _target(path, scope) + (b"?" + query if query else b"")
    return h11.Request(method=scope["method"].encode(), target=target, headers=headers)


def _target(path: str, scope: Scope) -> bytes:
    """The path as the client wrote it, without the router's own part."""
    written: bytes = scope["raw_path"]
    before = scope["path"].removesuffix(path).encode()
    if not before or not written.startswith(before):
        raise Refusal(400, "the path of the router must be written plainly")
    return written[len(before) :] or b"/"


def _is_ours(name: bytes) -> bool:
    plain = name.lower().replace(b"_", b"-")
    return plain in _NEVER_TOLD or plain.startswith(_PREFIXES)


def _answer_headers(event: h11.Response) -> Headers:
    given: Headers = event.headers.raw_items()
    kept = [item for item in _end_to_end(given) if item[0].lower() not in _OF_THE_ORIGIN]
    if _words(given, b"transfer-encoding"):  # then a length is a lie, by the standard
        kept = [item for item in kept if item[0].lower() != b"content-length"]
    return [(name.lower(), value) for name, value in kept]


def _end_to_end(headers: Headers) -> Headers:
    """Headers without those that are for one connection only."""
    dropped = _HOP_BY_HOP.union(_words(headers, b"connection"))
    return [item for item in headers if item[0].lower() not in dropped]


def _words(headers: Headers, name: bytes) -> list[bytes]:
    listed = [part for key, value in headers if key.lower() == name for part in value.split(b",")]
    return [word for part in listed if (word := part.strip().lower())]
