"""Bounds of REST: what one caller can make the gateway do, hold or wait for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from k8e import errors
from k8e.gateway.http import app
from k8e.gateway.http.app import HttpAnswer
from k8e.guest import wire
from k8e.http_connections import CUT_OFF
from k8e.rest import bodies, files, http, models, page, problems, requests
from k8e.rest.bodies import TooLarge
from k8e.rest.client import GatewayCalls
from k8e.rest.requests import Reply, Request

pytestmark = pytest.mark.anyio


def refusal(model: type[BaseModel], body: dict[str, Any]) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(json.dumps(body), strict=True)
    return caught.value


async def nowhere() -> Any:
    raise AssertionError("no connection was expected")


def test_a_body_with_very_many_mistakes_is_refused_without_a_list() -> None:
    found = refusal(models.Run, {f"x{number}": 1 for number in range(1000)})
    problem = problems.problem_of(found, "r")
    assert (problem.status, problem.errors) == (400, None)
    assert problem.detail == f"{found.error_count()} parts of the request are wrong"


def test_of_too_many_variables_none_is_looked_at() -> None:
    body = {"command": "x", "env": {f"={number}": 1 for number in range(1000)}}
    assert refusal(models.Run, body).error_count() == 1
    good = {f"A{number}": "" for number in range(64)}
    assert models.Run.model_validate_json(json.dumps({"command": "x", "env": good})).env == good


async def test_only_a_run_may_be_as_large_as_source_code() -> None:
    body = json.dumps({"code": "x" * (2 << 20)}).encode()

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    headers = [(b"content-type", b"application/json")]
    request = Request(GatewayCalls(nowhere), {"headers": headers}, receive, {})
    with pytest.raises(TooLarge):
        await request.body(models.Run)
    assert await request.body(models.Run, requests.MAX_RUN)


class Sender:
    """One that sends the beginning of a body, and then nothing more."""

    def __init__(self) -> None:
        self.stopped = asyncio.Event()
        self._sent = False

    async def receive(self) -> Any:
        if self._sent:
            self.stopped.set()
            await asyncio.Event().wait()
        self._sent = True
        return {"type": "http.request", "body": b"x" * 1000, "more_body": True}


async def test_one_caller_cannot_fill_the_memory_with_bodies_that_never_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "MAX_ARRIVING", 2500)
    arriving, senders = bodies.Arriving(), [Sender(), Sender()]
    waiting = [asyncio.create_task(arriving.whole(sender.receive, 1 << 20)) for sender in senders]
    await asyncio.gather(*(sender.stopped.wait() for sender in senders))
    with pytest.raises(errors.LimitExceeded):
        await arriving.whole(Sender().receive, 1 << 20)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    last = Sender()
    waiting = [asyncio.create_task(arriving.whole(last.receive, 1 << 20))]
    await last.stopped.wait()  # there is room again
    waiting[0].cancel()
    await asyncio.wait(waiting)


async def test_a_body_of_which_nothing_more_comes_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "STALLED_SECONDS", 0.01)
    for coming in (
        bodies.Arriving().whole(Sender().receive, 1 << 20),
        anext(bodies.pieces(asyncio.Event().wait)),  # pyright: ignore[reportArgumentType]
    ):
        with pytest.raises(bodies.Left):
            await coming


async def endless() -> socket.socket:
    """A gateway whose sandbox lists files without end."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    threading.Thread(target=_list_without_end, args=(ours,), daemon=True).start()
    return theirs


def _list_without_end(gateway: socket.socket) -> None:
    splitter = wire.Splitter(wire.MAX_REQUEST)
    entry = {"type": "file", "size": 1, "mode": 0o644, "modified_ns": 1}
    with gateway:
        frames: list[Any] = []
        while not frames:
            frames = splitter.feed(gateway.recv(1 << 16))
        channel = frames[0][1]
        gateway.sendall(wire.frame(wire.RESULT, channel, wire.pack({"path": "/"})))
        some = wire.pack([{**entry, "path": f"/{number}"} for number in range(500)])
        with contextlib.suppress(OSError):
            while True:
                gateway.sendall(wire.frame(wire.DATA, channel, some))


async def test_of_a_folder_without_end_only_the_answers_files_are_fetched() -> None:
    calls = GatewayCalls(endless)
    client = Client(2)
    scope: dict[str, Any] = {"query_string": b"", "headers": []}
    request = Request(calls, scope, client.receive, {"sandbox_id": "sess-1"})
    await files.list_files(request, Reply(client.send))
    told = json.loads(client.told[1]["body"])
    assert (len(told["files"]), told["truncated"]) == (files.MAX_FILES, True)
    await calls.close()


def test_the_page_for_people_is_made_once() -> None:
    assert page.document("x") is page.document("y")


class Client:
    """One that takes the beginning of an answer, and then nothing more."""

    def __init__(self, takes: int = 0) -> None:
        self.takes = takes
        self.told: list[Any] = []
        self.cut_off = 0

    async def send(self, message: Any) -> None:
        self.told.append(message)
        if len(self.told) > self.takes:
            await asyncio.Event().wait()

    async def receive(self) -> Any:
        return {"type": "http.request"}

    def cut(self) -> None:
        self.cut_off += 1

    async def ask(self, path: str) -> None:
        scope: dict[str, Any] = {
            "type": "http", "method": "GET", "path": path, "raw_path": path.encode(),
            "query_string": b"", "headers": [], "state": {CUT_OFF: self.cut},
        }  # fmt: skip
        await http.mount(nowhere)(scope, self.receive, self.send)


@pytest.mark.parametrize("takes", [0, 1])
async def test_a_client_that_reads_nothing_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, takes: int
) -> None:
    monkeypatch.setattr(requests, "SLOW_SECONDS", 0.01)
    client = Client(takes)
    await client.ask("/sandbox/leads/nowhere/at/all")
    assert (len(client.told), client.cut_off) == (takes + 1, 1)


async def test_a_client_that_reads_its_answer_keeps_its_connection() -> None:
    client = Client(2)
    await client.ask("/sandbox/leads/nowhere/at/all")
    assert (client.told[0]["status"], len(client.told), client.cut_off) == (404, 2, 0)


async def test_an_answer_that_the_gateway_ends_is_cut_off_if_nobody_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "END_SECONDS", 0.01)
    client = Client(1)
    answer = HttpAnswer(client.send, "r", client.cut)
    await answer.send({"type": "http.response.start", "status": 200, "headers": []})
    await answer.tell(401, "the token was revoked meanwhile")
    assert (len(client.told), client.cut_off) == (2, 1)


@pytest.mark.parametrize(
    ("error", "header"),
    [
        (errors.TokenRefused("x"), (b"www-authenticate", b"Bearer")),
        (errors.LimitExceeded("x"), (b"retry-after", b"1")),
        (errors.StoreUnreachable("x"), (b"retry-after", b"1")),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_refusal_has_the_headers_of_its_status(
    error: errors.K8eError, header: tuple[bytes, bytes]
) -> None:
    client = Client(2)
    await Reply(client.send).refuse(error, "r")
    assert header in client.told[0]["headers"]
