"""The app of one caller: methods, types and sizes of requests, and callers that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from k8e import AsyncSandboxClient
from k8e.a2a import http
from k8e.a2a.http import App
from k8e.a2a.runner import TaskTerms

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]
CALL = json.dumps(
    {"jsonrpc": "2.0", "id": 7, "method": "tasks/get", "params": {"id": "none"}}
).encode()
TYPE = (b"content-type", b"application/json")


class Exchange:
    """One request and its answer, as an ASGI server has them."""

    def __init__(self, *pieces: bytes, method: str = "POST", headers: Any = (TYPE,)) -> None:
        self.scope = {"type": "http", "method": method, "path": "/a2a", "headers": list(headers)}
        self.coming = asyncio.Queue[dict[str, Any]]()
        self.waiting = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        for number, piece in enumerate(pieces, 1):
            more = number < len(pieces)
            self.coming.put_nowait({"type": "http.request", "body": piece, "more_body": more})

    def leave(self) -> None:
        self.coming.put_nowait({"type": "http.disconnect"})

    async def receive(self) -> Any:
        if self.coming.empty():
            self.waiting.set()
        return await self.coming.get()

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def run(self, app: App) -> int:
        """The status of the answer."""
        await app(self.scope, self.receive, self.send)
        return self.sent[0]["status"]

    @property
    def body(self) -> Any:
        return json.loads(b"".join(item["body"] for item in self.sent[1:]))


@pytest.fixture
async def app(tmp_path: Path) -> AsyncGenerator[App]:
    made = App(AsyncSandboxClient(f"unix:{tmp_path}/nobody"), TaskTerms())
    async with made.running():
        yield made


async def test_call_is_answered_in_pieces_too(app: App) -> None:
    for pieces in ([CALL], [CALL[:9], CALL[9:], b""]):
        exchange = Exchange(*pieces)
        assert await exchange.run(app) == 200
        assert exchange.body["error"]["code"] == -32001
        assert (b"cache-control", b"no-store") in exchange.sent[0]["headers"]


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", [TYPE], 405),
        ("DELETE", [TYPE], 405),
        ("POST", [], 415),
        ("POST", [(b"content-type", b"text/plain")], 415),
    ],
)
async def test_request_of_another_kind_is_refused(
    app: App, method: str, headers: Any, status: int
) -> None:
    assert await Exchange(CALL, method=method, headers=headers).run(app) == status


async def test_body_that_is_too_large_is_refused(app: App) -> None:
    piece = b" " * (http.MAX_BODY // 2)
    assert await Exchange(piece, piece, CALL).run(app) == 413
    assert await Exchange(CALL).run(app) == 200


async def test_bodies_of_one_caller_have_a_limit_together(app: App) -> None:
    slow = [Exchange() for _ in range(http.MAX_READING // http.MAX_BODY)]
    for item in slow:
        whole = {"type": "http.request", "body": b" " * http.MAX_BODY, "more_body": True}
        item.coming.put_nowait(whole)
    tasks = [asyncio.create_task(app(item.scope, item.receive, item.send)) for item in slow]
    async with asyncio.timeout(20):
        await asyncio.gather(*(item.waiting.wait() for item in slow))
    assert await Exchange(CALL).run(app) == 429
    for item in slow:
        item.leave()
    await asyncio.gather(*tasks)
    assert await Exchange(CALL).run(app) == 200


async def test_body_that_stops_arriving_is_given_up(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "BODY_SECONDS", 0.01)
    assert await Exchange().run(app) == 408


async def test_caller_that_leaves_gets_no_answer(app: App) -> None:
    exchange = Exchange()
    exchange.leave()
    await app(exchange.scope, exchange.receive, exchange.send)
    assert exchange.sent == []
