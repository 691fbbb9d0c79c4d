"""Contexts by the SDK, over each transport and on each runtime.

What contexts promise is in the conformance suite; here is what the SDK and the gateway add.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from k8e import AsyncSandboxClient, Execution, Result, SandboxClient, Stdout, errors
from tests.places import NewPlace, Place, eventually

RICH = """
class Rich:
    def __repr__(self): return 'rich'
    def _repr_html_(self): return '<b>'
    def _repr_png_(self): return b'\\x89PNG'
    def _repr_json_(self): return {'a': [1]}
"""


def test_a_context_keeps_variables_and_gives_rich_results(
    client: SandboxClient, session_id: str
) -> None:
    printed: list[bytes] = []
    shown: list[Result] = []
    with client.create_context(session_id, cwd="/home/user") as context:
        first = context.run(f"import os, sys\nx = 40\n{RICH}")
        assert (first.results, first.error, first.execution_count) == ([], None, 1)
        assert first.text is None
        code = "print('out'); print('err', file=sys.stderr); display(x + 2)\nRich()"
        done = context.run(code, on_stdout=printed.append, on_result=shown.append)
        assert (done.stdout, done.stderr, done.text) == ("out\n", "err\n", "rich")
        assert (done.exit_code, done.status, done.context_state) == (0, "completed", "ready")
        assert printed == [b"out\n"]
        assert shown == done.results
        small, rich = done.results
        assert (small.text, small.is_main_result, small.html) == ("42", False, None)
        assert (rich.html, rich.png, rich.json) == ("<b>", b"\x89PNG", {"a": [1]})
        assert set(rich.formats()) >= {"text/plain", "text/html", "image/png"}
        assert context.run("os.getcwd()").text == "'/home/user'"
        assert context.run("os.environ['A']", env={"A": "b"}).text == "'b'"
        failed = context.run("1 / 0")
        assert failed.error is not None
        assert (failed.error.name, failed.error.value) == ("ZeroDivisionError", "division by zero")
        assert "<cell 5>" in failed.error.traceback
        listed = {item.context_id: item for item in client.list_contexts(session_id)}
        info = listed[context.context_id]
        assert (info.language, info.state, info.execution_count) == ("python", "ready", 5)
        assert client.get_context(session_id, context.context_id).run("x").text == "40"
    with pytest.raises(errors.ContextNotFound):
        context.run("1")


def test_events_come_as_they_happen_and_leaving_the_loop_interrupts(
    client: SandboxClient, session_id: str
) -> None:
    with client.create_context(session_id) as context:
        with contextlib.closing(
            context.stream("import time; kept = 1\nprint('on', flush=True)\ntime.sleep(60)")
        ) as events:
            for event in events:
                assert event == Stdout(b"on\n", 0)
                break
        assert context.run("kept").text == "1"
        kinds = [type(event) for event in context.stream("print(1)\n2")]
        assert kinds == [Stdout, Result, Execution]


def test_a_context_is_interrupted_and_restarted(client: SandboxClient, session_id: str) -> None:
    with client.create_context(session_id, context_id="stopping") as context:
        running = threading.Event()
        done: list[Execution] = []

        def run() -> None:
            code = "x = 1; print('on', flush=True)\nimport time; time.sleep(60)"
            done.append(context.run(code, 0, on_stdout=lambda _: running.set()))

        thread = threading.Thread(target=run)
        thread.start()
        assert running.wait(20)
        assert client.get_context(session_id, "stopping").interrupt()
        thread.join(20)
        assert done[0].error is not None
        assert (done[0].error.name, done[0].exit_code) == ("KeyboardInterrupt", 130)
        assert context.run("x").text == "1"
        gone = context.run("import os; os._exit(3)")
        assert (gone.context_state, gone.exit_code) == ("ended", 3)
        with pytest.raises(errors.ContextEnded, match="code 3"):
            context.run("x")
        assert context.restart().execution_count == 0
        assert context.run("'x' in globals()").text == "False"
        with pytest.raises(errors.Conflict, match="stopping"):
            client.create_context(session_id, context_id="stopping")


def test_a_large_picture_comes_whole(client: SandboxClient, session_id: str) -> None:
    with client.create_context(session_id) as context:
        done = context.run("display({'image/png': b'p' * 3_000_000}, raw=True)")
        assert done.results[0].png == b"p" * 3_000_000
        run = client.get_run(f"{session_id}.{done.exec_id}")
        assert run.wait().exit_code == 0


def test_what_a_context_cannot_do_is_refused(client: SandboxClient, session_id: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="cobol"):
        client.create_context(session_id, "cobol")
    with pytest.raises(errors.InvalidRequest, match="letters"):
        client.create_context(session_id, context_id="a/b")
    with pytest.raises(errors.ContextNotFound):
        client.get_context(session_id, "nothing").restart()
    with pytest.raises(errors.ContextNotFound):
        client.get_context(session_id, "nothing").run("1")
    with pytest.raises(errors.SessionNotFound):
        client.list_contexts("sess-nothing")
    with pytest.raises(FileNotFoundError):
        client.create_context(session_id, cwd="/nowhere")


def test_other_languages_keep_their_state_too(client: SandboxClient, session_id: str) -> None:
    with client.create_context(session_id, "bash") as shell:
        shell.run("x=5; cd /tmp")
        done = shell.run("echo $x $PWD; false")
        assert (done.stdout, done.exit_code, done.error) == ("5 /tmp\n", 1, None)
    with client.create_context(session_id, "node") as node:
        node.run("const x = {a: 1}")
        assert node.run("x").results[0].json == {"a": 1}


async def test_the_asynchronous_client_has_contexts_too(endpoint: str, session_id: str) -> None:
    async with (
        AsyncSandboxClient(endpoint) as client,
        await client.create_context(session_id) as context,
    ):
        await context.run("import asyncio; x = 1")
        seen: list[Result] = []
        done = await context.run("await asyncio.sleep(0, x + 1)", on_result=seen.append)
        assert done.text == "2"
        assert seen == done.results
        started = asyncio.Event()

        async def sleep() -> None:
            code = "print('on', flush=True)\nimport time; time.sleep(60)"
            await context.run(code, 0, on_stdout=lambda _: started.set())

        task = asyncio.create_task(sleep())
        async with asyncio.timeout(20):
            await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await context.run("x")).text == "1"  # the cancelled one was interrupted
        assert [item.state for item in await client.list_contexts(session_id)].count("ready") >= 1
        assert await context.interrupt()
        await context.restart()
        events = [event async for event in context.stream("3")]
        assert isinstance(events[-1], Execution)


@pytest.mark.timeout(120)
def test_a_context_outlives_its_gateway(new_place: NewPlace, runtime: str) -> None:
    place: Place = new_place()
    place.json("sandbox", "status")  # starts a gateway
    with SandboxClient(place.endpoint) as client:
        session_id = client.create_session(runtime)
        context = client.create_context(session_id, context_id="kept")
        context.run("x = 41")
        sleeping = "import time; time.sleep(1.5); x += 1; 'woke'"
        with contextlib.closing(context.stream(sleeping)) as events:
            thread = threading.Thread(target=lambda: _drain(events))
            thread.start()
            eventually(lambda: client.list_contexts(session_id)[0].state == "busy")
            place.kill_gateway()
            thread.join(20)
    place.json("sandbox", "status")  # starts the next one
    with SandboxClient(place.endpoint) as client:
        context = client.get_context(session_id, "kept")
        assert context.run("x").text == "42"
        client.pause_session(session_id)
        with pytest.raises(errors.SessionPaused):
            context.run("x")
        client.resume_session(session_id)
        assert context.run("x").text == "42"
        told = [event.kind for event in client.events(session_id)]
        assert "context.created" in told
        assert told.count("exec.started") == 4
        client.destroy_session(session_id)


def _drain(events: object) -> None:
    with contextlib.suppress(errors.GatewayUnreachable):
        for _ in events:  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType]
            pass
