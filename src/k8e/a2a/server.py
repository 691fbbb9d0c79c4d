"""The A2A server: listens, lets in who has a token, and answers."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from k8e import access, errors
from k8e.a2a import dialects, http, rpc
from k8e.a2a.http import Body, Head, HttpReply, Problem
from k8e.a2a.runner import TaskRunner, TaskTerms
from k8e.a2a.tokens import A2aCaller, Tokens
from k8e.client.asynchronous import AsyncSandboxClient

_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
LOOK_SECONDS = 1.0
"""How soon it counts for what runs already that somebody may no longer call."""
_EVENTS = "text/event-stream"


class ListenAddress(NamedTuple):
    """Where to listen, and how callers name it."""

    host: str
    port: int
    public_url: str = ""
    certificate: str = ""
    key: str = ""


def place(
    address: str, public_url: str = "", certificate: str = "", key: str = ""
) -> ListenAddress:
    """Check where to listen. A token must not cross a network in clear text."""
    host, colon, port = address.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not colon or not port.isdigit() or int(port) > 65535:
        raise errors.InvalidRequest(
            f"{address!r} is no address", hint="give it as HOST:PORT, such as 127.0.0.1:8812"
        )
    if bool(certificate) != bool(key):
        raise errors.InvalidRequest("--tls-cert and --tls-key belong together")
    if not certificate and not access.is_loopback(host):
        raise errors.Denied(
            f"{address} can be reached from other machines, and tokens would come in clear text",
            hint="give --tls-cert and --tls-key, or listen on 127.0.0.1 behind a proxy with TLS",
        )
    if host in _EVERYWHERE and not public_url:
        raise errors.InvalidRequest(
            f"{address} says not how other machines call this one",
            hint="give --public-url, such as https://a2a.example:8812/",
        )
    if public_url and urlsplit(public_url).scheme not in ("http", "https"):
        raise errors.InvalidRequest("--public-url is no URL", hint="such as https://a2a.example/")
    return ListenAddress(host, int(port), public_url, certificate, key)


class A2aFront:
    """Judges requests before anything of their body is read."""

    def __init__(self, tokens: Tokens, service: rpc.RpcService, url: str) -> None:
        self._tokens = tokens
        self._service = service
        self._card = json.dumps(dialects.card(url), ensure_ascii=False).encode()
        names = access.HostPolicy.of("", urlsplit(url).hostname or "").names
        self._door = access.HostPolicy("", names, hint="--public-url names another one")

    async def handle(self, head: Head, body: Body) -> HttpReply:
        self._check_place(head)
        if head.path == dialects.PATH:
            if head.method not in ("GET", "HEAD"):
                raise Problem(405, "the card is there to be read", ("Allow", "GET"))
            return HttpReply(200, self._card if head.method == "GET" else b"")
        caller = self._check_token(head)
        if head.path != "/":
            raise Problem(404, f"there is nothing here; the card is at {dialects.PATH}")
        if head.method != "POST":
            raise Problem(405, "calls are POST requests", ("Allow", "POST"))
        if not head.headers.get("content-type", "").lower().startswith("application/json"):
            raise Problem(415, "calls are application/json")
        return await self._call(caller, await body(), head.headers.get("a2a-version", ""))

    async def _call(self, caller: A2aCaller, body: bytes, version: str) -> HttpReply:
        try:
            found = await self._service.answer(caller, rpc.RpcCall(body, version))
        except rpc.RpcRefusal as refused:
            return HttpReply(200, refused.body)
        return HttpReply(200, found, "application/json" if isinstance(found, bytes) else _EVENTS)

    def _check_place(self, head: Head) -> None:
        """Refuse names that are not ours, which may lead a browser here, and other sites' pages."""
        headers = [
            (name.encode("ascii", "replace"), text.encode("latin-1"))
            for name, text in head.headers.items()
        ]
        if (refusal := access.judge_place(self._door, headers)) is not None:
            raise Problem(refusal.status, refusal.text)

    def _check_token(self, head: Head) -> A2aCaller:
        scheme, _, token = head.headers.get("authorization", "").partition(" ")
        try:
            caller = self._tokens.caller(token.strip()) if scheme.lower() == "bearer" else None
        except errors.K8eError:
            caller = None  # a file that cannot be trusted lets nobody in
        if caller is None:
            asks = ("WWW-Authenticate", 'Bearer realm="k8e"')
            raise Problem(401, "a token is needed; k8e a2a token prints one", asks)
        return caller


async def serve(
    where: ListenAddress,
    tokens: Tokens,
    terms: TaskTerms,
    connect: Callable[[], AsyncSandboxClient],
    ready: Callable[[dict[str, Any]], None],
    stop: asyncio.Event,
) -> None:
    """Serve until ``stop``; then end all tasks, and the sessions that were made for them."""
    tokens.prepare()
    security = _security(where)
    async with connect() as client:
        desk = TaskRunner(client, terms)
        front: list[A2aFront] = []

        async def handle(head: Head, body: Body) -> HttpReply:
            return await front[0].handle(head, body)

        server = http.HttpServer(handle, security)
        listener = await asyncio.start_server(server.accept, where.host, where.port, limit=64 << 10)
        url = _url(where, listener)
        front.append(A2aFront(tokens, rpc.RpcService(desk), url))
        looking = asyncio.create_task(_look(tokens, desk))
        try:
            ready({"card": url + dialects.PATH[1:], "token_file": str(tokens.path), "url": url})
            await stop.wait()
        finally:
            listener.close()
            looking.cancel()
            await asyncio.wait({looking})
            await server.close()
            await desk.close()


async def _look(tokens: Tokens, desk: TaskRunner) -> None:
    """End what callers have who are gone. A file that is just being written is no reason yet."""
    failed = 0
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        try:
            callers, failed = tokens.callers(), 0
        except (errors.K8eError, ValueError):  # bytes that are no text
            callers, failed = set[A2aCaller](), failed + 1
        if failed != 1:
            await desk.keep_only(callers)


def _security(where: ListenAddress) -> ssl.SSLContext | None:
    if not where.certificate:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(Path(where.certificate), Path(where.key))
    except (OSError, ssl.SSLError) as error:
        raise errors.InvalidRequest(
            f"the certificate cannot be used: {error}",
            hint="--tls-cert and --tls-key are PEM files",
        ) from None
    return context


def _url(where: ListenAddress, listener: asyncio.Server) -> str:
    if where.public_url:
        return where.public_url.rstrip("/") + "/"
    port = listener.sockets[0].getsockname()[1]
    host = f"[{where.host}]" if ":" in where.host else where.host
    return f"{'https' if where.certificate else 'http'}://{host}:{port}/"
