"""Pausing and resuming through the SDK, over both wires and on both runtimes."""

from __future__ import annotations

import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import pytest

from k8e import AsyncSandboxClient, SandboxClient, errors
from k8e.conformance import traces
from tests.places import Place, eventually

COUNTER = "i=0; while :; do i=$((i+1)); echo $i; done > count"
STILL = 0.4  # seconds in which the counter would have written much
GAPS = """
import time
last = noted = time.monotonic()
longest = 0.0
with open("gaps", "w") as file:
    while True:
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        if now > noted + 0.02:
            noted = now
            print(longest, file=file, flush=True)
"""


@pytest.fixture
def session(client: SandboxClient, runtime: str) -> Generator[str]:
    found = client.create_session(runtime, limits={"memory": "128M"})
    yield found
    client.destroy_session(found)


def size(client: SandboxClient, session_id: str, path: str = "count") -> int:
    try:
        return client.stat(session_id, path).size
    except FileNotFoundError:
        return 0


def test_a_program_stands_still_while_paused_and_goes_on_after(
    client: SandboxClient, session: str
) -> None:
    # Nobody can look into a paused session; the program itself tells how long it stood still.
    client.write_file(session, "watch.py", GAPS)
    run = client.start(session, "python3 watch.py")
    eventually(lambda: size(client, session, "gaps") > 0)
    client.pause_session(session)
    assert client.get_session(session).phase == "paused"
    time.sleep(STILL)
    client.resume_session(session)
    assert client.get_session(session).phase == "active"
    before = size(client, session, "gaps")
    eventually(lambda: size(client, session, "gaps") > before)
    longest = max(float(line) for line in str(client.read_file(session, "gaps")).split())
    assert longest >= STILL
    run.kill()


def test_a_child_sees_that_a_paused_sibling_writes_nothing(
    client: SandboxClient, session: str
) -> None:
    watcher, writer = client.run_subagent(session), client.run_subagent(session)
    run = client.start(writer, COUNTER)
    eventually(lambda: size(client, watcher) > 1000)
    client.pause_session(writer)
    before = size(client, watcher)
    time.sleep(STILL)
    assert size(client, watcher) == before
    client.resume_session(writer)
    eventually(lambda: size(client, watcher) > before)
    run.kill()


def test_nothing_new_begins_in_a_paused_session(client: SandboxClient, session: str) -> None:
    client.write_file(session, "file", "x")
    for _ in range(2):
        client.pause_session(session)
    for attempt in (
        lambda: client.run("true", session_id=session),
        lambda: client.read_file(session, "file"),
        lambda: client.write_file(session, "other", "x"),
        lambda: client.list_files(session),
        lambda: client.start(session, "true"),
        lambda: client.execs(session),
        lambda: client.processes(session),
        lambda: client.run_subagent(session),
    ):
        with pytest.raises(errors.SessionPaused, match="is paused") as caught:
            attempt()
        assert caught.value.hint == f"k8e sandbox resume {session}"
    for _ in range(2):
        client.resume_session(session)
    assert client.read_file(session, "file") == "x"


def test_a_command_under_way_waits_and_loses_none_of_its_time(
    client: SandboxClient, session: str
) -> None:
    script = "touch begun; until test -e go; do sleep 0.02; done; cat; echo end"
    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(client.exec, session, script, 4, stdin="fed\n")
        eventually(lambda: client.exec(session, "test -e begun").exit_code == 0)
        client.pause_session(session)
        time.sleep(4.2)  # more than the command may take
        assert not task.done()
        client.resume_session(session)
        client.write_file(session, "go", "")
        done = task.result(20)
    assert (done.stdout, done.exit_code, done.status) == ("fed\nend\n", 0, "completed")


def test_a_paused_session_is_destroyed_without_a_trace(
    client: SandboxClient, place: Place, runtime: str
) -> None:
    known = set(place.sandboxes())
    session_id = client.create_session(runtime)
    child = client.run_subagent(session_id)
    for name in (session_id, child):
        client.start(name, COUNTER)
    client.pause_session(session_id)
    assert {client.get_session(name).phase for name in (session_id, child)} == {"paused"}
    client.destroy_session(session_id)
    made = set(place.sandboxes()) - known
    assert len(made) == 2
    assert [item for name in made for item in traces.traces(name, [place.folder])] == []


def test_a_paused_session_expires(client: SandboxClient, place: Place, runtime: str) -> None:
    known = set(place.sandboxes())
    session_id = client.create_session(runtime, lifetime=60)
    client.start(session_id, COUNTER)
    client.pause_session(session_id)
    client.extend_session(session_id, 0.5)
    eventually(lambda: client.get_session(session_id).phase == "ended")
    assert client.get_session(session_id).ended_reason == "its lifetime was over"
    (sandbox_id,) = set(place.sandboxes()) - known
    assert traces.traces(sandbox_id, [place.folder]) == []


def test_a_session_can_be_paused_again_and_again(client: SandboxClient, session: str) -> None:
    run = client.start(session, COUNTER)
    for _ in range(10):
        client.pause_session(session)
        client.resume_session(session)
        assert client.exec(session, "echo alive").stdout == "alive\n"
    assert run.poll().status == "running"
    run.kill()


def test_pausing_by_many_at_once_leaves_a_session_that_works(
    client: SandboxClient, session: str
) -> None:
    with ThreadPoolExecutor(6) as pool:
        turns = [client.pause_session, client.resume_session] * 6
        for task in [pool.submit(turn, session) for turn in turns]:
            task.result(60)
    client.resume_session(session)
    assert client.exec(session, "echo alive").stdout == "alive\n"


def test_the_standing_session_of_a_tenant_says_that_it_is_paused(
    endpoint: str, runtime: str
) -> None:
    with SandboxClient(endpoint, f"resting-{runtime}") as client:
        found = client.run("true").session_id
        client.pause_session(found)
        with pytest.raises(errors.SessionPaused) as caught:
            client.run("true")
        assert caught.value.hint == f"k8e sandbox resume {found}"
        client.resume_session(found)
        assert client.run("true").session_id == found
        client.destroy_session(found)


async def test_the_asynchronous_client_pauses_and_resumes(endpoint: str, runtime: str) -> None:
    async with AsyncSandboxClient(endpoint) as client:
        session_id = await client.create_session(runtime)
        await client.pause_session(session_id)
        with pytest.raises(errors.SessionPaused):
            await client.exec(session_id, "true")
        await client.resume_session(session_id)
        assert (await client.exec(session_id, "echo alive")).stdout == "alive\n"
        await client.destroy_session(session_id)
        with pytest.raises(errors.SessionNotFound):
            await client.pause_session(session_id)
