"""HTTP: the door, K8E's older way, and many connections at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import stat
from collections.abc import AsyncGenerator
from typing import Any

import httpx2
import pytest
from mcp_types import Implementation

from tests.mcp import connecting
from tests.mcp.connecting import PATIENCE, HttpServer, refused, told
from tests.places import Place, eventually

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]
CONNECTIONS = 50
LIST = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}


async def gone(place: Place, session_id: str) -> None:
    """Wait for the end of a session, of which nobody tells."""

    def over() -> bool:
        left = place.json("sandbox", "sessions")["sessions"]
        return session_id not in [item["session_id"] for item in left]

    await asyncio.to_thread(eventually, over)


@contextlib.asynccontextmanager
async def web(http: HttpServer) -> AsyncGenerator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(headers=http.headers, timeout=PATIENCE) as client:
        yield client


async def test_token_is_made_once_and_for_its_owner_alone(http: HttpServer) -> None:
    assert stat.S_IMODE(http.token_file.stat().st_mode) == 0o600
    assert len(http.token) >= 40
    assert http.token not in http.said


REFUSED = [
    ({"authorization": ""}, 401),
    ({"authorization": "Bearer wrong"}, 401),
    ({"host": "evil.example"}, 421),
    ({"host": "evil.example:8811"}, 421),
    ({"origin": "https://evil.example"}, 403),
    ({"origin": "null"}, 403),
    ({"origin": "http://localhost:3000"}, 403),
]
LET_IN = [
    ({"host": "localhost:1", "origin": "http://localhost:1"}, 200),
    ({"host": "localhost:1"}, 200),
]


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        *((method, *case) for method in ("POST", "GET", "DELETE") for case in REFUSED),
        *(("POST", *case) for case in LET_IN),
    ],
    ids=str,
)
async def test_door_is_before_everything(
    http: HttpServer, method: str, headers: dict[str, str], status: int
) -> None:
    async with web(http) as client:
        found = await client.request(method, http.url, headers=headers, json=LIST)
    assert found.status_code == status, found.text
    if status == 401:
        assert found.headers["www-authenticate"] == "Bearer"


async def test_silent_connections_are_bounded_and_lock_nobody_out(http: HttpServer) -> None:
    place = httpx2.URL(http.url)
    assert place.port
    silent = [await asyncio.open_connection("127.0.0.1", place.port) for _ in range(1200)]
    async with web(http) as client:
        found = await client.post(http.url, json=LIST)
    assert found.status_code == 200, found.text
    reader, _ = silent[0]
    async with asyncio.timeout(PATIENCE):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b"", "it has to leave by itself"
    for _, writer in silent:
        writer.close()


async def test_bodies_that_are_no_messages_are_refused(http: HttpServer) -> None:
    async with web(http) as client:
        assert (await client.post(http.url, content=b"{no")).status_code == 400
        assert (await client.post(http.url, content=b"[]")).status_code == 400
        large = await client.post(http.url, content=b"x" * (17 << 20))
        assert large.status_code == 413
        assert (await client.post(http.url + "/other", json=LIST)).status_code == 404
        unknown = {"mcp-session-id": "f" * 32, "mcp-protocol-version": "2025-06-18"}
        found = await client.post(http.url, json=LIST, headers=unknown)
        assert found.status_code == 404


async def test_k8es_older_clients_are_served(http: HttpServer, place: Place) -> None:
    """A stream that begins with a session's id, answers in the body, and pushed."""
    async with web(http) as client:
        found = (await client.post(http.url, json=LIST)).json()
        assert found["result"]["tools"][0]["name"] == "sandbox_run"
        note = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        assert (await client.post(http.url, json=note)).json() == {"jsonrpc": ""}
        async with client.stream("GET", http.url) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            lines = stream.aiter_lines()
            assert await anext(lines) == "event: session"
            stream_id = (await anext(lines)).removeprefix("data: ")
            assert len(bytes.fromhex(stream_id)) == 12
            assert await anext(lines) == ""
            named = {"mcp-session-id": stream_id}
            run = {"name": "sandbox_run", "arguments": {"code": "echo hi"}}
            call = {"jsonrpc": "2.0", "id": 8, "method": "tools/call", "params": run}
            body = (await client.post(http.url, json=call, headers=named)).json()
            pushed = json.loads((await anext(lines)).removeprefix("data: "))
            assert pushed == body
            first = json.loads(body["result"]["content"][0]["text"])
            assert (first["exit_code"], first["stdout"]) == (0, "hi\n")
            body = (await client.post(http.url, json=call, headers=named)).json()
            again = json.loads(body["result"]["content"][0]["text"])
            assert again["session_id"] == first["session_id"]
        await gone(place, first["session_id"])


async def test_left_connection_takes_its_sessions_with_it(http: HttpServer, place: Place) -> None:
    async with connecting.over_http(http) as client:
        first = told(await client.call_tool("sandbox_run", {"code": "echo a"}))["session_id"]
        again = told(await client.call_tool("sandbox_run", {"code": "echo b"}))["session_id"]
        assert again == first
        async with connecting.over_http(http) as other:
            stolen = {"command": "true", "session_id": first}
            assert "not found" in refused(await other.call_tool("sandbox_exec", stolen))
            uri = f"sandbox://{first}/etc/passwd"
            with pytest.raises(Exception, match="not found"):
                await other.read_resource(uri)
        async with connecting.over_http(http, mode=connecting.MODERN) as other:
            assert "not found" in refused(await other.call_tool("sandbox_exec", stolen))
    await gone(place, first)


def named(name: str) -> dict[str, Any]:
    return {"mode": connecting.MODERN, "client_info": Implementation(name=name, version="1")}


async def test_clients_without_a_connection_keep_their_sandbox_without_doing_anything(
    http: HttpServer,
) -> None:
    async with connecting.over_http(http, **named("first")) as client:
        first = told(await client.call_tool("sandbox_run", {"code": "echo a > a"}))
        assert "note" not in first
        again = told(await client.call_tool("sandbox_run", {"code": "cat a"}))
        assert (again["stdout"], again["session_id"]) == ("a\n", first["session_id"])
        read: Any = await client.call_tool("sandbox_read_file", {"path": "a"})
        assert read.content[0].text == "a\n"
    async with connecting.over_http(http, **named("second")) as other:
        found = told(await other.call_tool("sandbox_run", {"code": "ls"}))
        assert found["session_id"] != first["session_id"]
        stolen = {"command": "true", "session_id": first["session_id"]}
        assert "not found" in refused(await other.call_tool("sandbox_exec", stolen))
        gone = {"session_id": found["session_id"]}
        assert told(await other.call_tool("sandbox_destroy_session", gone))["ok"]
    async with connecting.over_http(http, **named("first")) as client:
        again = told(await client.call_tool("sandbox_run", {"code": "cat a"}))
        assert again["stdout"] == "a\n"
        gone = {"session_id": first["session_id"]}
        assert told(await client.call_tool("sandbox_destroy_session", gone))["ok"]
        anew = told(await client.call_tool("sandbox_run", {"code": "ls"}))
        assert (anew["stdout"], anew["session_id"] == first["session_id"]) == ("", False)
        gone = {"session_id": anew["session_id"]}
        assert told(await client.call_tool("sandbox_destroy_session", gone))["ok"]


async def test_session_that_ended_meanwhile_is_told_to_clients_without_a_connection(
    http: HttpServer, place: Place
) -> None:
    async with connecting.over_http(http, **named("ended")) as client:
        first = told(await client.call_tool("sandbox_run", {"code": "echo a > a"}))["session_id"]
        await asyncio.to_thread(place.json, "sandbox", "destroy", first)
        again = told(await client.call_tool("sandbox_run", {"code": "ls"}))
        assert first in again["note"]
        gone = {"session_id": again["session_id"]}
        assert told(await client.call_tool("sandbox_destroy_session", gone))["ok"]


async def test_k8es_older_clients_keep_their_sandbox_without_a_stream(http: HttpServer) -> None:
    async with web(http) as client:

        async def call(name: str, **arguments: str) -> dict[str, Any]:
            params = {"name": name, "arguments": arguments}
            asked = {"jsonrpc": "2.0", "id": 8, "method": "tools/call", "params": params}
            answer = await client.post(http.url, json=asked)
            return answer.json()["result"]["structuredContent"]

        first = await call("sandbox_run", code="echo a > a")
        again = await call("sandbox_run", code="cat a")
        assert (again["stdout"], again["session_id"]) == ("a\n", first["session_id"])
        assert (await call("sandbox_destroy_session", session_id=first["session_id"]))["ok"]


async def test_many_connections_at_once(http: HttpServer) -> None:
    async def one(number: int) -> Any:
        async with connecting.over_http(http) as client:
            listed = (await client.list_tools()).tools
            unknown = refused(await client.call_tool(f"sandbox_{number}"))
            return len(listed), (await client.call_tool("sandbox_status")).is_error, unknown

    found = await asyncio.gather(*(one(number) for number in range(CONNECTIONS)))
    assert len(found) == CONNECTIONS
    assert all(listed == 23 and not failed for listed, failed, _ in found)


async def test_dropped_request_kills_its_program_and_harms_nobody(http: HttpServer) -> None:
    async with web(http) as client:

        async def run(code: str, timeout: float = PATIENCE, **more: str) -> dict[str, Any]:
            asked = {"name": "sandbox_run", "arguments": {"code": code, **more}}
            call = {"jsonrpc": "2.0", "id": 8, "method": "tools/call", "params": asked}
            answer = await client.post(http.url, json=call, timeout=timeout)
            return answer.json()["result"]["structuredContent"]

        session = {"session_id": (await run("true"))["session_id"]}
        with pytest.raises(httpx2.TimeoutException):
            await run("echo > begun; exec sleep 31", 3, **session)
        assert (await client.post(http.url, json=LIST)).status_code == 200
        look = "test -e begun || exit 9; grep -lsz '^31$' /proc/[0-9]*/cmdline | grep -q ."
        async with asyncio.timeout(PATIENCE):
            while (found := await run(look, **session))["exit_code"] == 0:
                pass
        assert found["exit_code"] != 9, "the program never began"
        gone = {"name": "sandbox_destroy_session", "arguments": session}
        call = {"jsonrpc": "2.0", "id": 8, "method": "tools/call", "params": gone}
        assert not (await client.post(http.url, json=call)).json()["result"]["isError"]
