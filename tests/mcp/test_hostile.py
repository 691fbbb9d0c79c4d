"""Text that is no Unicode, and headers that name nobody: the server lives on, and so do others."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tests.mcp.connecting import LEGACY, PATIENCE, HttpServer, over_http
from tests.mcp.test_stdio import HELLO, Pipe
from tests.places import Place

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]
ODD_NAME = "import os\nos.close(os.open(b'\\xff', os.O_CREAT | os.O_WRONLY))\nprint('made')"
HALF = r"\ud83d"  # half of a character, as JSON writes it


def call(tool: str, arguments: str, request_id: int = 7) -> bytes:
    params = f'{{"name":"{tool}","arguments":{arguments}}}'
    return f'{{"jsonrpc":"2.0","id":{request_id},"method":"tools/call","params":{params}}}'.encode()


def run_odd() -> bytes:
    return call("sandbox_run", json.dumps({"code": ODD_NAME, "language": "python"}))


def test_pipe_survives_text_that_is_no_unicode(place: Place) -> None:
    pipe = Pipe(place.start("sandbox-mcp"))
    try:
        pipe.ask("initialize", **HELLO)
        pipe.say(call("sandbox_exec", f'{{"command":"true","session_id":"{HALF}"}}'))
        found = pipe.hear()["result"]
        assert found["isError"]
        assert "not found" in found["content"][0]["text"]
        pipe.say(run_odd())
        assert pipe.hear()["result"]["structuredContent"]["stdout"] == "made\n"
        pipe.say(call("sandbox_list_files", "{}"))
        (listed,) = pipe.hear()["result"]["structuredContent"]["files"]
        assert listed["path"] == "/workspace/?"
        pipe.say(f'{{"jsonrpc":"2.0","id":8,"method":"{HALF}"}}'.encode())
        assert pipe.hear()["error"]["code"] == -32601
    finally:
        pipe.close()


@pytest.mark.parametrize("modern", [False, True])
async def test_http_survives_text_that_is_no_unicode(http: HttpServer, modern: bool) -> None:
    more = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
    async with httpx2.AsyncClient(headers=http.headers | more, timeout=PATIENCE) as client:

        async def post(body: bytes) -> Any:
            answer = await client.post(http.url, content=body)
            assert answer.status_code == 200, answer.text
            lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
            return json.loads(lines[-1].removeprefix("data: ") if lines else answer.text)

        if modern:
            hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": HELLO}
            opened = await client.post(http.url, json=hello)
            client.headers["mcp-session-id"] = opened.headers["mcp-session-id"]
            client.headers["mcp-protocol-version"] = "2025-06-18"
        body = call("sandbox_exec", f'{{"command":"true","session_id":"{HALF}"}}')
        if modern:  # the SDK's own parser takes no such JSON
            assert (await client.post(http.url, content=body)).status_code == 400
        else:
            assert "not found" in (await post(body))["result"]["content"][0]["text"]
        made = (await post(run_odd()))["result"]["structuredContent"]
        named = json.dumps({"session_id": made["session_id"]})
        found = (await post(call("sandbox_list_files", named)))["result"]["structuredContent"]
        assert [item["path"] for item in found["files"]] == ["/workspace/?"]
        await post(call("sandbox_destroy_session", named))
        if modern:
            await client.delete(http.url)


async def test_empty_or_double_session_header_names_no_connection(http: HttpServer) -> None:
    async with httpx2.AsyncClient(headers=http.headers, timeout=PATIENCE) as client:
        body = call("sandbox_run", '{"code":"echo hi"}')
        sessions: list[str] = []
        for headers in ({"mcp-session-id": ""}, {}):  # both are of a client without a name
            answer = await client.post(http.url, content=body, headers=headers)
            sessions.append(answer.json()["result"]["structuredContent"]["session_id"])
        assert sessions[0] == sessions[1]
        gone = call("sandbox_destroy_session", json.dumps({"session_id": sessions[0]}))
        assert not (await client.post(http.url, content=gone)).json()["result"]["isError"]
        twice = [("mcp-session-id", "a"), ("mcp-session-id", "b"), *http.headers.items()]
        assert (await client.post(http.url, content=body, headers=twice)).status_code == 400


async def test_what_only_fields_tell_is_told_in_text_too(http: HttpServer) -> None:
    async with over_http(http, mode=LEGACY) as client:

        async def texts(tool: str, **arguments: Any) -> list[str]:
            found: Any = await client.call_tool(tool, arguments)
            return [item.text for item in found.content]

        await texts("sandbox_write_file", path="a", content="é" * 3)
        found = await texts("sandbox_read_file", path="a", limit=3)
        assert found == ["é", "There is more: read on with offset 2."]
        await texts("sandbox_write_file", path="b", content="/wA=", encoding="base64")
        assert "base64 of 2 bytes" in (await texts("sandbox_read_file", path="b"))[1]
        first, more = await texts("sandbox_exec_stream", command="echo a; sleep 9", timeout=1)
        assert first == "a\n"
        assert "its time was over" in more


def test_bare_handshake_and_last_line_without_an_end_are_answered(place: Place) -> None:
    pipe = Pipe(place.start("sandbox-mcp"))
    assert pipe.ask("initialize")["result"]["protocolVersion"] == "2024-11-05"
    pipe.loaded()
    pipe.stdin.write(call("sandbox_status", "{}"))
    pipe.stdin.close()
    assert pipe.hear()["result"]["structuredContent"]["available"]
    pipe.close()
    early = Pipe(place.start("sandbox-mcp"))
    early.stdin.write(b'{"jsonrpc":"2.0","id":3,"method":"ping"}')
    early.stdin.close()
    assert early.hear() == {"jsonrpc": "2.0", "id": 3, "result": {}}
    early.close()


async def test_progress_token_of_megabytes_is_not_repeated(http: HttpServer) -> None:
    more = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
    async with httpx2.AsyncClient(headers=http.headers | more, timeout=PATIENCE) as client:
        hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": HELLO}
        opened = await client.post(http.url, json=hello)
        client.headers["mcp-session-id"] = opened.headers["mcp-session-id"]
        client.headers["mcp-protocol-version"] = "2025-06-18"
        code = "echo a; sleep 0.3; echo b; sleep 0.3; echo c"
        for size, heard in ((20, True), (1 << 20, False)):
            meta = {"progressToken": "x" * size}
            params = {"name": "sandbox_run", "arguments": {"code": code}, "_meta": meta}
            asked = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params}
            answer = await client.post(http.url, json=asked)
            assert "a\\nb\\nc\\n" in answer.text
            assert ("x" * size in answer.text) == heard
        await client.delete(http.url)
