"""A request to a server in a sandbox, and its answer, each passed on as it comes.

Neither side is trusted. The server sees no credential and none of the router's headers, and cannot
say anything about the connection between the router and its client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from typing import Any

import h11
from starlette.types import Receive, Scope

from k8e import errors, websockets
from k8e.agent_sandbox.answers import Answer, Refusal
from k8e.agent_sandbox.bodies import Left, pieces
from k8e.agent_sandbox.reach import PortConnection
from k8e.http_headers import WEBSOCKET, Headers, end_to_end, is_websocket, words
from k8e.http_messages import HttpStream, joined

MAX_HEAD = 64 << 10
"""Bytes of an answer's head."""
MAX_INFORMATION = 16  # answers before the answer
IDLE_SECONDS = 3600.0
"""A server that says nothing for this long is given up."""
HOST = b"localhost"
VERSIONS = ("1.0", "1.1")
_NEVER_TOLD = frozenset((b"authorization", b"host", b"forwarded", b"x-real-ip", b"expect"))
_PREFIXES = (b"x-sandbox-", b"x-forwarded-", b"x-k8e-")
_OF_THE_ORIGIN = frozenset(
    b"set-cookie set-cookie2 strict-transport-security alt-svc clear-site-data".split()
)
"""What would hold for the gateway's whole address, and so for every other sandbox."""


class BadAnswer(Exception):
    """The server's answer is no HTTP, or ends in the middle."""


async def forward(
    connecting: AbstractAsyncContextManager[PortConnection],
    path: str,
    scope: Scope,
    receive: Receive,
    answer: Answer,
) -> None:
    """Pass one request on, and its answer back; a request that is none opens no connection."""
    asked = _request(path, scope)
    async with connecting as connection:
        await _exchange(connection, asked, receive, answer)


async def _exchange(
    connection: PortConnection, asked: h11.Request, receive: Receive, answer: Answer
) -> None:
    server = HttpStream(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
    try:
        await connection.send(server.send(asked))
        feeding = asyncio.create_task(_feed(connection, server, receive))
        try:
            switched = await _pass_answer(connection, server, answer, feeding)
        finally:
            feeding.cancel()
            await asyncio.wait({feeding})
    except (h11.ProtocolError, BadAnswer) as error:
        raise Refusal(502, f"the server in the sandbox sent no good answer: {error}") from None
    if switched is not None:
        client = answer.switch([*switched, (b"Connection", b"Upgrade"), (b"Upgrade", WEBSOCKET)])
        await websockets.relay(client, connection, server_said=server.trailing_data[0])


async def _feed(connection: PortConnection, server: HttpStream, receive: Receive) -> None:
    """Pass the request's body on; then wait, so that a client that leaves is noticed."""
    try:
        async for piece in pieces(receive):
            await connection.send(server.send(h11.Data(data=piece)))
        await connection.send(server.send(h11.EndOfMessage()))
    except (h11.LocalProtocolError, errors.K8eError, OSError):
        pass  # a server that takes no more of a body may answer all the same
    while (await receive())["type"] != "http.disconnect":
        pass


async def _pass_answer(
    connection: PortConnection, server: HttpStream, answer: Answer, feeding: asyncio.Task[None]
) -> Headers | None:
    """Pass the answer on; the headers of one that changes the connection into a WebSocket's."""
    events = joined(server, connection.receive)
    information = 0
    while True:
        event = await _next(events, feeding)
        match event:
            case h11.InformationalResponse(status_code=101):
                return _switch_headers(server, event)
            case h11.InformationalResponse():
                information += 1
                if information > MAX_INFORMATION:
                    raise BadAnswer("too many answers before the answer")
            case h11.Response():
                await answer.begin(event.status_code, *_answer_headers(event))
            case bytes():
                await answer.send({"type": "http.response.body", "body": event, "more_body": True})
            case h11.EndOfMessage():
                await answer.send({"type": "http.response.body", "body": b"", "more_body": False})
                return None
            case _:
                raise BadAnswer("it ended without an answer")


async def _next(events: AsyncGenerator[Any], feeding: asyncio.Task[None]) -> Any:
    """The server's next event; Left if the client leaves before."""
    waiting = asyncio.ensure_future(anext(events, None))
    try:
        done, _ = await asyncio.wait(
            {waiting, feeding}, timeout=IDLE_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            raise BadAnswer(f"nothing came for {IDLE_SECONDS:g} seconds")
        if not waiting.done() and _has_left(feeding):
            raise Left
        return await waiting
    finally:
        waiting.cancel()
        await asyncio.wait({waiting})


def _has_left(feeding: asyncio.Task[None]) -> bool:
    """Whether the client is gone."""
    return feeding.exception() is None or isinstance(feeding.exception(), Left)


def _request(path: str, scope: Scope) -> h11.Request:
    """The request as the server in the sandbox gets it."""
    if scope["http_version"] not in VERSIONS:
        raise Refusal(505, "this router speaks HTTP/1.1")
    given: Headers = scope["headers"]
    websocket = _asks_for_websocket(scope)
    kept = [item for item in end_to_end(given) if not _is_ours(item[0])]
    if words(given, b"transfer-encoding"):
        kept = [item for item in kept if item[0] != b"content-length"]
        kept.append((b"Transfer-Encoding", b"chunked"))
    headers = [(b"Host", HOST), *kept]
    if websocket:
        headers += [(b"Connection", b"Upgrade"), (b"Upgrade", WEBSOCKET)]
    else:
        headers.append((b"Connection", b"close"))
    query: bytes = scope["query_string"]
    target = _target(path, scope) + (b"?" + query if query else b"")
    try:
        return h11.Request(method=scope["method"].encode(), target=target, headers=headers)
    except h11.LocalProtocolError as error:
        raise Refusal(400, f"the request cannot be passed on: {error}") from None


def _asks_for_websocket(scope: Scope) -> bool:
    """Whether a request asks for a WebSocket; its handshake is a GET of HTTP/1.1 without a body."""
    given: Headers = scope["headers"]
    if scope["http_version"] != "1.1" or not is_websocket(given):
        return False
    length = b"".join(words(given, b"content-length")).strip(b"0")
    if scope["method"] != "GET" or length or words(given, b"transfer-encoding"):
        raise Refusal(400, "a WebSocket begins with a GET without a body")
    return True


def _switch_headers(server: HttpStream, event: h11.InformationalResponse) -> Headers:
    """The headers of an answer that changes the protocol, as the client gets them."""
    given: Headers = event.headers.raw_items()
    if server.our_state is not h11.SWITCHED_PROTOCOL or not is_websocket(given):
        raise BadAnswer("it changed to a protocol that was not asked for")
    return _kept(given)


def _target(path: str, scope: Scope) -> bytes:
    """The path as the client wrote it, without the router's own part."""
    written: bytes = scope["raw_path"]
    before = scope["path"].removesuffix(path).encode()
    if not written.startswith(before or b"/"):  # another host's, or a part of ours that is encoded
        raise Refusal(400, "the path of the router must be written plainly")
    return written[len(before) :] or b"/"


def _is_ours(name: bytes) -> bool:
    plain = name.lower().replace(b"_", b"-")
    return plain in _NEVER_TOLD or plain.startswith(_PREFIXES)


def _answer_headers(event: h11.Response) -> Headers:
    given: Headers = event.headers.raw_items()
    kept = _kept(given)
    if words(given, b"transfer-encoding"):  # then a length is a lie, by the standard
        kept = [item for item in kept if item[0].lower() != b"content-length"]
    return [(name.lower(), value) for name, value in kept]


def _kept(headers: Headers) -> Headers:
    return [item for item in end_to_end(headers) if item[0].lower() not in _OF_THE_ORIGIN]
