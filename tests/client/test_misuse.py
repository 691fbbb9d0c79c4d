"""What the SDK says to a caller who mistypes an argument, or goes on with a closed client."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest

import k8e
from k8e import AsyncSandboxClient, SandboxClient, errors

NOBODY = "unix:///nobody/listens/there"
MISTYPED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "run": (("print(1)",), {"lang": "python"}, "'language'"),
    "exec": (("s", "true"), {"environment": {}}, "'env'"),
    "exec_events": (("s", "true"), {"time_out": 3}, "'timeout'"),
    "start": (("s", "true"), {"lang": "python"}, "'language'"),
    "open": (("s", "true"), {"workdir": "/"}, "it takes command, cwd, "),
    "terminal": (("s",), {"cols": 3}, "'columns'"),
    "create_session": ((), {"memory": "1G"}, "limits={'memory': …}"),
    "audit": ((), {"session": "s"}, "'session_id'"),
    "restore_snapshot": (("name",), {"label": {}}, "'labels'"),
}


def takes_options(kind: type[Any]) -> set[str]:
    """The public methods of a client that take further keywords."""
    found: set[str] = set()
    for name in dir(kind):
        code = getattr(getattr(kind, name), "__code__", None)
        if code is not None and code.co_flags & 0x08 and not name.startswith("_"):
            found.add(name)
    return found


def test_every_method_with_options_is_tried_here() -> None:
    assert takes_options(SandboxClient) == takes_options(AsyncSandboxClient) == set(MISTYPED)


@pytest.mark.parametrize("name", MISTYPED)
def test_an_unknown_keyword_is_refused_with_the_one_that_was_meant(name: str) -> None:
    positional, named, meant = MISTYPED[name]
    with (
        SandboxClient(NOBODY) as client,
        pytest.raises(TypeError) as raised,
    ):
        next(getattr(client, name)(*positional, **named))
    assert str(raised.value).startswith(f"{name}() got an unexpected keyword argument ")
    assert meant in str(raised.value)


@pytest.mark.parametrize("name", MISTYPED)
async def test_so_it_is_when_awaited(name: str) -> None:
    positional, named, meant = MISTYPED[name]
    async with AsyncSandboxClient(NOBODY) as client:
        found = getattr(client, name)(*positional, **named)
        with pytest.raises(TypeError) as raised:
            await (anext(found) if hasattr(found, "__anext__") else found)
    assert meant in str(raised.value)


async def test_a_single_run_refuses_it_before_anything_is_made() -> None:
    named: dict[str, Any] = {"lang": "python"}
    with pytest.raises(TypeError, match="Did you mean 'language'"):
        k8e.run("print(1)", **named)
    with pytest.raises(TypeError, match="Did you mean 'language'"):
        await k8e.arun("print(1)", **named)


def gone(client: SandboxClient, session_id: str, exec_id: str) -> bool:
    """Whether a command has ended, soon."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        running = [item.exec_id for item in client.execs(session_id) if item.status == "running"]
        if exec_id not in running:
            return True
    return False


def test_a_closed_client_and_what_it_made_refuse_to_work(
    endpoint: str, client: SandboxClient, session_id: str
) -> None:
    closed = SandboxClient(endpoint)
    closed.run("true")
    stream = closed.exec_events(session_id, "echo 1; sleep 600", exec_id="streamed")
    next(stream)
    process = closed.open(session_id, "cat", exec_id="opened")
    run = closed.start(session_id, "sleep 600", exec_id="started")
    context = closed.create_context(session_id)
    closed.close()
    closed.close()
    attempts: list[Callable[[], Any]] = [
        lambda: closed.run("true"),
        lambda: closed.exec(session_id, "true"),
        lambda: list(closed.exec_stream(session_id, "true")),
        lambda: closed.write_file(session_id, "a", b"1"),
        closed.create_session,
        closed.list_sessions,
        lambda: next(stream),
        lambda: process.write("x"),
        lambda: process.read(1),
        process.kill,
        run.poll,
        run.wait,
        lambda: context.run("1"),
    ]
    for attempt in attempts:
        with pytest.raises(errors.ClientClosed, match="the client is closed"):
            attempt()
    process.close()
    # What was to end with its reader has ended; what goes on without us goes on.
    assert gone(client, session_id, "streamed")
    assert gone(client, session_id, "opened")
    client.kill(session_id, "started")


async def test_a_closed_asynchronous_client_refuses_to_work(
    endpoint: str, client: SandboxClient, session_id: str
) -> None:
    closed = AsyncSandboxClient(endpoint)
    await closed.run("true")
    stream = closed.exec_events(session_id, "echo 1; sleep 600", exec_id="streamed2")
    await anext(stream)
    process = await closed.open(session_id, "cat", exec_id="opened2")
    run = await closed.start(session_id, "sleep 600", exec_id="started2")
    context = await closed.create_context(session_id)
    await closed.close()
    await closed.close()
    attempts: list[Callable[[], Any]] = [
        lambda: closed.run("true"),
        lambda: closed.exec(session_id, "true"),
        lambda: closed.write_file(session_id, "a", b"1"),
        closed.create_session,
        closed.list_sessions,
        lambda: anext(stream),
        lambda: process.write("x"),
        lambda: process.read(1),
        process.kill,
        run.poll,
        run.wait,
        lambda: context.run("1"),
    ]
    for attempt in attempts:
        with pytest.raises(errors.ClientClosed, match="the client is closed"):
            await attempt()
    await process.close()
    assert gone(client, session_id, "streamed2")
    assert gone(client, session_id, "opened2")
    client.kill(session_id, "started2")


def test_a_stream_that_is_left_after_its_client_still_ends_its_command(
    endpoint: str, client: SandboxClient, session_id: str
) -> None:
    other = SandboxClient(endpoint)
    stream = other.exec_events(session_id, "echo 1; sleep 600", exec_id="left")
    with contextlib.closing(stream):
        next(stream)
        other.close()
    assert gone(client, session_id, "left")
