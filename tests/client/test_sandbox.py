"""A sandbox as one object, on each runtime."""

from __future__ import annotations

import io
import urllib.request
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

import agentic_sandbox_client
from k8e import AsyncSandbox, Sandbox, SandboxClient, Stdout, errors
from tests.places import Place

PATIENCE = 30


@pytest.fixture
def here(place: Place, monkeypatch: pytest.MonkeyPatch) -> SandboxClient:
    place.listening()
    monkeypatch.setenv("K8E_SANDBOX_ENDPOINT", place.endpoint)
    return SandboxClient(place.endpoint)


@pytest.fixture
def sandbox(here: SandboxClient, runtime: str) -> Generator[Sandbox]:
    with here, Sandbox(runtime=runtime, client=here) as sandbox:
        yield sandbox


def test_a_block_makes_a_sandbox_and_kills_it(here: SandboxClient, runtime: str) -> None:
    with here, Sandbox(runtime=runtime, memory="128M", limits={"pids": 40}) as sb:
        assert sb.run("print(6 * 7)", "python").stdout == "42\n"
        assert sb.exec(["echo", "a  b"]).stdout == "a  b\n"
        info = sb.info()
        assert (info.runtime, info.limits["memory"]) == (runtime, 128 << 20)
        assert info.limits["pids"] == 40
        session_id = sb.id
        assert session_id in {item.session_id for item in Sandbox.list()}
        assert here.get_session(session_id).phase == "active"
    assert session_id not in {item.session_id for item in Sandbox.list()}
    with pytest.raises(errors.ClientClosed):
        sb.exec("true")


def test_a_sandbox_is_made_at_its_first_use_and_once_or_at_once(
    here: SandboxClient, runtime: str
) -> None:
    with here:
        made = Sandbox.create(runtime=runtime, client=here)
        assert here.get_session(made.id).phase == "active"
        made.close()
        with pytest.raises(errors.SessionNotFound, match="has ended: destroyed"):
            Sandbox.connect(made.id, client=here)
        assert made.id in {item.session_id for item in Sandbox.list(ended=True, client=here)}
        sb = Sandbox(runtime=runtime, client=here)
        assert repr(sb) == "Sandbox(not made yet)"
        first = sb.exec("true").session_id
        assert sb.exec("true").session_id == first == sb.id
        sb.kill()
        sb.kill()
        with pytest.raises(errors.SessionNotFound):
            sb.exec("true")
        never = Sandbox(client=here)
        never.close()
        with pytest.raises(errors.ClientClosed):
            never.exec("true")


def test_a_sandbox_that_was_connected_to_outlives_the_block(
    here: SandboxClient, sandbox: Sandbox
) -> None:
    with Sandbox.connect(sandbox.id, client=here) as same:
        same.files.write("a.txt", "kept")
    assert sandbox.files.read("a.txt") == "kept"
    with pytest.raises(errors.SessionNotFound):
        Sandbox.connect("sess-of-nobody")


def test_files_are_written_read_listed_renamed_copied_and_removed(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    files = sandbox.files
    assert files.write("d/a.bin", b"\xff\x00") == 2
    files.write("d/a.bin", b"!", append=True)
    assert files.read_bytes("d/a.bin") == b"\xff\x00!"
    assert files.stat("d/a.bin").size == 3
    files.rename("d/a.bin", "d/b.bin")
    assert b"".join(files.read_chunks("d/b.bin", offset=1)) == b"\x00!"
    files.chmod("d/b.bin", 0o600)
    files.symlink("link", "d/b.bin")
    assert files.stat("link", follow=True).mode == 0o600
    files.mkdir("d/e/f")
    assert sorted(item.path for item in files.list("d")) == [
        "/workspace/d/b.bin",
        "/workspace/d/e",
    ]
    files.download("d", tmp_path / "copy")
    assert (tmp_path / "copy/b.bin").read_bytes() == b"\xff\x00!"
    files.upload(tmp_path / "copy", "again")
    files.upload(io.BytesIO(b"open"), "open.txt")
    into = io.BytesIO()
    files.download("open.txt", into)
    assert into.getvalue() == b"open"
    files.remove("d", recursive=True)
    with pytest.raises(FileNotFoundError):
        files.stat("d")
    assert files.read_bytes("again/b.bin", offset=1, length=1) == b"\x00"


def test_a_server_is_waited_for(sandbox: Sandbox) -> None:
    port = sandbox.expose(8000)
    with pytest.raises(errors.TimedOut, match="nothing listens on port 8000"):
        port.wait(timeout=0)
    sandbox.files.write("index.html", "<h1>Hello</h1>")
    server = sandbox.start(["python3", "-m", "http.server", "8000"])
    with urllib.request.urlopen(port.wait().url, timeout=PATIENCE) as page:
        assert page.read() == b"<h1>Hello</h1>"
    assert port.info.token not in repr(port)
    server.kill()


def test_its_life_is_paused_resumed_and_saved(here: SandboxClient, sandbox: Sandbox) -> None:
    sandbox.files.write("a.txt", "saved")
    sandbox.pause()
    with pytest.raises(errors.SessionPaused):
        sandbox.exec("true")
    sandbox.resume()
    name = f"object-{sandbox.info().runtime}"
    assert sandbox.snapshot(name).file_count == 1
    with Sandbox(client=here, snapshot=name) as other:
        assert other.files.read("a.txt") == "saved"
    here.delete_snapshot(name)


def test_streams_and_contexts_are_in_the_sandbox(sandbox: Sandbox) -> None:
    assert "".join(sandbox.exec_stream("echo a; echo b")) == "a\nb\n"
    assert next(sandbox.exec_events("echo a"), None) is not None
    with sandbox.open(["cat"]) as program:
        program.write("typed\n")
        assert program.read_until(b"\n") == b"typed\n"
    with sandbox.terminal(["sh", "-c", "stty size"], 30, 100) as terminal:
        assert terminal.read_until(b"30 100") == b"30 100"
    printed = b"".join(event.data for event in sandbox.transcript() if isinstance(event, Stdout))
    assert b"typed\n" in printed
    assert sandbox.extend(1200).expires_at > sandbox.info().created_at
    assert sandbox.update_allowed_hosts([]) == ["none"]
    assert sandbox.egress().denied == 0
    with sandbox.context() as context:
        context.run("x = 40")
        assert context.run("x + 2").text == "42"


@pytest.mark.anyio
async def test_the_asynchronous_sandbox_does_the_same(here: SandboxClient, runtime: str) -> None:
    with here:
        async with AsyncSandbox(runtime=runtime) as sb:
            await sb.files.write("a.txt", "text")
            assert [item.path for item in await sb.files.list()] == ["/workspace/a.txt"]
            assert [piece async for piece in sb.exec_stream("cat a.txt")] == ["text"]
            session_id = sb.id
        assert session_id not in {item.session_id for item in await AsyncSandbox.list()}


def test_wrong_arguments_are_refused_before_anything_is_made() -> None:
    with pytest.raises(errors.InvalidRequest, match="not from both"):
        Sandbox("t", image="python:3.12")
    with pytest.raises(TypeError, match="Did you mean"):
        Sandbox(idle_timeot=5)  # pyright: ignore[reportCallIssue]
    nobody: Any = SandboxClient("unix:/nowhere/gateway.sock")
    for hint, attempt in {
        "['ls', '-l']": lambda: nobody.exec("sess-x", "ls", "-l"),
        "print(1)": lambda: nobody.run(None, session_id="sess-x"),
        "an open binary file": lambda: nobody.write_file("sess-x", "a", None),
        "json.dumps": lambda: nobody.write_file("sess-x", "a", {"a": 1}),
    }.items():
        with pytest.raises(errors.InvalidRequest) as refused:
            attempt()
        assert hint in refused.value.hint
    with pytest.raises(errors.NoGateway, match="no gateway listens") as missing:
        Sandbox.create(endpoint="unix:/nowhere/gateway.sock")
    assert "K8E_SANDBOX_ENDPOINT" in missing.value.hint


def test_programs_for_agent_sandbox_run_as_they_are(here: SandboxClient, runtime: str) -> None:
    with here:
        client = agentic_sandbox_client.SandboxClient()
        sandbox = client.create_sandbox(name=f"agentic-{runtime}", runtime=runtime)
        done = sandbox.execute("echo one; exit 3")
        assert (sandbox.name, done.stdout, done.exit_code) == (f"agentic-{runtime}", "one\n", 3)
        sandbox.delete()
        sandbox.delete()
        with pytest.raises(errors.SessionNotFound):
            here.exec(sandbox.name, "true")
