"""The pipe itself: the handshake, what is no message, and the end of a connection."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.mcp import connecting
from tests.mcp.connecting import refused, told
from tests.places import Place, eventually, wait_readable

HELLO = {
    "protocolVersion": "2025-06-18",
    "capabilities": {},
    "clientInfo": {"name": "test", "version": "1"},
}


class Pipe:
    """A server, talked to by hand."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self.stdin, self.stdout = process.stdin, process.stdout

    def say(self, line: bytes) -> None:
        self.stdin.write(line + b"\n")
        self.stdin.flush()

    def send(self, method: str, request_id: Any = None, **params: Any) -> None:
        message: dict[str, Any] = {"jsonrpc": "2.0", "method": method, "params": params}
        self.say(json.dumps(message | ({} if request_id is None else {"id": request_id})).encode())

    def hear(self) -> dict[str, Any]:
        assert wait_readable(self.stdout.fileno(), 20), "no answer"
        return json.loads(self.stdout.readline())

    def ask(self, method: str, request_id: Any = 1, **params: Any) -> dict[str, Any]:
        self.send(method, request_id, **params)
        return self.hear()

    def loaded(self) -> None:
        """Wait until the SDK answers: nobody else knows this method."""
        assert "error" in self.ask("no/such/method", 99)

    def close(self) -> None:
        self.stdin.close()
        assert self.process.wait(20) == 0
        self.stdout.close()
        assert self.process.stderr is not None
        said = self.process.stderr.read()
        self.process.stderr.close()
        assert said == b"", said


@pytest.fixture
def pipe(place: Place) -> Iterator[Pipe]:
    pipe = Pipe(place.start("sandbox-mcp"))
    yield pipe
    if pipe.process.poll() is None:
        pipe.close()


@pytest.mark.parametrize("version", ["2024-11-05", "2025-11-25", "2099-01-01"])
def test_version_is_negotiated(pipe: Pipe, version: str) -> None:
    found = pipe.ask("initialize", **HELLO | {"protocolVersion": version})["result"]
    assert found["protocolVersion"] == ("2025-11-25" if version == "2099-01-01" else version)
    assert pipe.ask("ping", "p")["result"] == {}


def test_greeting_says_what_the_sdk_would_say(pipe: Pipe) -> None:
    first = pipe.ask("initialize", **HELLO)
    tools = pipe.ask("tools/list", 2)
    pipe.loaded()
    assert pipe.ask("initialize", **HELLO) == first
    assert pipe.ask("tools/list", 2) == tools


def test_discovery_says_what_the_sdk_would_say(pipe: Pipe) -> None:
    meta = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
        "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
    }
    first = pipe.ask("server/discover", _meta=meta)
    assert first["result"]["supportedVersions"] == ["2026-07-28"]
    assert "error" in pipe.ask("no/such/method", 99, _meta=meta)
    assert pipe.ask("server/discover", _meta=meta) == first


@pytest.mark.parametrize("early", [True, False], ids=["before the SDK", "after it"])
def test_what_is_no_message_is_answered_and_harms_nobody(pipe: Pipe, early: bool) -> None:
    assert pipe.ask("initialize", **HELLO)["id"] == 1
    if not early:
        pipe.loaded()
    pipe.say(b"{not json")
    assert pipe.hear()["error"]["code"] == -32700
    pipe.say(b"[1, 2]")
    assert pipe.hear()["error"]["code"] == -32600
    pipe.say(b'{"jsonrpc":"2.0","id":7,"result":{}}')  # an answer to nothing
    pipe.say(b"[" * 100_000)
    assert pipe.hear()["error"]["code"] == -32700
    pipe.say(b"")
    pipe.say(b'{"x":"' + b"x" * (17 << 20) + b'"}')
    found = pipe.hear()
    assert "16777216 bytes" in found["error"]["message"]
    assert pipe.ask("ping", 5)["result"] == {}


def test_call_that_comes_before_the_sdk_is_answered_by_it(pipe: Pipe) -> None:
    pipe.send("initialize", 1, **HELLO)
    pipe.send("notifications/initialized")
    pipe.send("tools/call", 2, name="sandbox_status", arguments={})
    assert pipe.hear()["id"] == 1
    found = pipe.hear()
    assert (found["id"], found["result"]["isError"]) == (2, False)


def test_requests_need_no_handshake_to_be_refused_politely(pipe: Pipe) -> None:
    assert pipe.ask("tools/list")["error"]["code"] == -32602
    assert pipe.ask("prompts/list", 2)["error"]["code"] == -32601


def test_left_client_takes_its_session_and_its_program_with_it(pipe: Pipe, place: Place) -> None:
    pipe.ask("initialize", **HELLO)
    run = {"name": "sandbox_run", "arguments": {"code": "echo hi"}}
    found = pipe.ask("tools/call", 2, **run)["result"]["structuredContent"]
    session = found["session_id"]
    pipe.send("tools/call", 3, name="sandbox_run", arguments={"code": "sleep 99", "timeout": 99})
    pipe.close()
    left = {item["session_id"] for item in place.json("sandbox", "sessions")["sessions"]}
    assert session not in left


def test_terminated_server_cleans_up_too(place: Place) -> None:
    pipe = Pipe(place.start("sandbox-mcp"))
    pipe.ask("initialize", **HELLO)
    run = {"name": "sandbox_run", "arguments": {"code": "echo hi"}}
    session = pipe.ask("tools/call", 2, **run)["result"]["structuredContent"]["session_id"]
    pipe.process.terminate()
    assert pipe.process.wait(20) == 0
    pipe.close()
    left = {item["session_id"] for item in place.json("sandbox", "sessions")["sessions"]}
    assert session not in left


def test_killed_server_leaves_no_program_running(place: Place) -> None:
    pipe = Pipe(place.start("sandbox-mcp"))
    pipe.ask("initialize", **HELLO)
    run = {"name": "sandbox_run", "arguments": {"code": "echo hi"}}
    session = pipe.ask("tools/call", 2, **run)["result"]["structuredContent"]["session_id"]
    pipe.send("tools/call", 3, name="sandbox_run", arguments={"code": "sleep 97", "timeout": 99})

    def running() -> bool:
        listed = place.json("sandbox", "ps", session)["processes"]
        return "sleep" in [item["comm"] for item in listed]

    eventually(running)
    pipe.process.kill()
    pipe.process.wait(20)
    eventually(lambda: not running())
    place.json("sandbox", "destroy", session)
    for stream in (pipe.stdin, pipe.stdout, pipe.process.stderr):
        assert stream is not None
        stream.close()


@pytest.mark.anyio
async def test_connections_do_not_see_each_others_sessions(place: Place) -> None:
    async with connecting.over_stdio(place) as one, connecting.over_stdio(place) as two:
        first = told(await one.call_tool("sandbox_run", {"code": "echo a > a"}))["session_id"]
        second = told(await two.call_tool("sandbox_run", {"code": "ls"}))
        assert second["stdout"] == ""
        assert second["session_id"] != first
        for name, arguments in {
            "sandbox_exec": {"command": "true"},
            "sandbox_read_file": {"path": "a"},
            "sandbox_destroy_session": {},
            "sandbox_expose": {"port": 80},
            "sandbox_confirm_action": {"action": "x"},
            "sandbox_allow_hosts": {"add": ["a.example"]},
        }.items():
            found = await two.call_tool(name, {**arguments, "session_id": first})
            assert f"session {first} not found" in refused(found)
        assert told(await two.call_tool("sandbox_list_sessions"))["sessions"][0]["own"]
        taken = {"session_id": first}
        assert refused(await two.call_tool("sandbox_create_session", taken))


@pytest.mark.anyio
async def test_tenant_shares_its_session_and_keeps_it(place: Place) -> None:
    flags = ("--tenant", "team")
    async with connecting.over_stdio(place, *flags) as one:
        first = told(await one.call_tool("sandbox_run", {"code": "echo a > a"}))["session_id"]
        async with connecting.over_stdio(place, *flags) as two:
            found = told(await two.call_tool("sandbox_run", {"code": "cat a"}))
    assert (found["session_id"], found["stdout"]) == (first, "a\n")
    assert told_by(place, first)["phase"] == "active"
    place.json("sandbox", "destroy", first)


def told_by(place: Place, session_id: str) -> dict[str, Any]:
    return place.json("sandbox", "get", session_id)


@pytest.mark.anyio
async def test_lost_session_is_replaced_and_told(place: Place) -> None:
    async with connecting.over_stdio(place) as client:
        first = told(await client.call_tool("sandbox_run", {"code": "echo a"}))["session_id"]
        await asyncio.to_thread(place.json, "sandbox", "destroy", first)
        found = told(await client.call_tool("sandbox_run", {"code": "echo b"}))
        assert found["stdout"] == "b\n"
        assert f"session {first} has ended" in found["note"]
        files = (await client.list_resources()).resources
        assert files == []
        await client.call_tool("sandbox_write_file", {"path": "x y.txt", "content": "c"})
        files = (await client.list_resources()).resources
        assert [item.name for item in files] == ["x y.txt"]
        assert (await client.read_resource(files[0].uri)).contents[0].text == "c"  # type: ignore[union-attr]
        assert (await client.list_resource_templates()).resource_templates
