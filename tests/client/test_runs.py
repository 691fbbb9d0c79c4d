"""Runs that outlive their caller, by the SDK, over each transport and on each runtime."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from k8e import AsyncSandboxClient, ExecResult, Exit, SandboxClient, Stdout, errors
from tests.places import NewPlace, Place, eventually


def test_a_run_goes_on_without_its_client_and_is_found_by_its_id(
    place: Place, endpoint: str, session_id: str
) -> None:
    name = f"run-{time.time_ns()}"
    with SandboxClient(endpoint) as first:
        first.exec(session_id, ["mkfifo", name])
        command = f"echo begun; cat {name}; echo oops >&2; exit 4"
        run_id = first.start(session_id, command, env={"A": "b"}, exec_id=name).run_id
    assert run_id == f"{session_id}.{name}"
    with SandboxClient(endpoint) as second:
        run = second.get_run(run_id)
        state = eventually(lambda: (found := run.poll()).stdout and found)
        assert (state.status, state.exit_code, state.stdout) == ("running", None, "begun\n")
        second.exec(session_id, f"echo go on > {name}")
        result = run.wait()
        assert isinstance(result, ExecResult)
        assert (result.exit_code, result.status, result.truncated) == (4, "completed", False)
        assert (result.stdout, result.stderr) == ("begun\ngo on\n", "oops\n")
        state = run.poll()
        assert (state.status, state.exit_code, state.stderr) == ("completed", 4, "oops\n")
        assert place.json("sandbox", "poll", run_id)["exit_code"] == 4


def test_code_runs_in_the_background_too(client: SandboxClient, session_id: str) -> None:
    run = client.start(session_id, "import sys; print('it''s'); sys.exit(6)", language="python")
    result = run.wait()
    assert (result.stdout, result.exit_code) == ("its\n", 6)
    assert [item.background for item in client.execs(session_id) if item.exec_id == run.exec_id]
    with pytest.raises(errors.InvalidRequest, match="text"):
        client.start(session_id, ["x"], language="python")


def test_a_loop_over_output_can_be_left_and_taken_up_again(
    client: SandboxClient, session_id: str
) -> None:
    run = client.start(session_id, "echo one; sleep 0.3; echo two; sleep 300")
    for event in run.output():
        assert event == Stdout(b"one\n", 0)
        break
    assert run.poll().status == "running"
    for event in run.output(4):
        assert event == Stdout(b"two\n", 4)
        break
    assert list(run.output(8, follow=False)) == []
    assert list(run.output(follow=False)) == [Stdout(b"one\ntwo\n", 0)]
    run.signal(signal.SIGINT)
    end = list(run.output())[-1]
    assert isinstance(end, Exit)
    assert end.exit_code == 130


def test_a_run_is_killed_with_all_that_it_started(client: SandboxClient, session_id: str) -> None:
    run = client.start(session_id, "sleep 299 & sleep 299")
    names = eventually(
        lambda: [item.pid for item in client.processes(session_id) if item.comm == "sleep"]
    )
    assert len(names) >= 1
    run.kill()
    assert run.wait().status == "killed"
    eventually(lambda: all(item.comm != "sleep" for item in client.processes(session_id)))
    run.kill()  # once more does not matter


def test_a_run_that_nobody_reads_is_never_held_up(client: SandboxClient, session_id: str) -> None:
    run = client.start(session_id, "head -c 5000000 /dev/zero; echo end >&2")
    result = run.wait()
    assert result.stderr == "end\n"
    assert result.exit_code == 0


def test_quick_commands_do_not_push_out_a_background_run(
    client: SandboxClient, session_id: str
) -> None:
    run = client.start(session_id, "echo kept")
    assert run.wait().exit_code == 0
    for _ in range(70):
        client.exec(session_id, ["true"])
    assert run.poll().stdout == "kept\n"


def test_what_is_no_run_is_told(client: SandboxClient, session_id: str) -> None:
    with pytest.raises(errors.ExecNotFound):
        client.get_run(f"{session_id}.unknown").poll()
    with pytest.raises(errors.SessionNotFound):
        client.get_run("nobody.unknown").kill()
    with pytest.raises(errors.InvalidRequest, match="not the id of a run"):
        client.get_run("unknown")


def test_links_and_permissions_of_a_sandbox_can_be_set(
    client: SandboxClient, session_id: str
) -> None:
    client.write_file(session_id, "marks/file", "content")
    client.chmod(session_id, "marks/file", 0o640)
    assert client.stat(session_id, "marks/file").mode == 0o640
    for target in ("elsewhere", "file"):
        client.symlink(session_id, "marks/link", target)
        assert client.stat(session_id, "marks/link").target == target
    assert client.read_file(session_id, "marks/link") == "content"
    with pytest.raises(FileNotFoundError):
        client.chmod(session_id, "marks/none", 0o600)
    with pytest.raises(IsADirectoryError):
        client.symlink(session_id, "marks", "x")


def test_following_goes_on_when_the_gateway_is_replaced(new_place: NewPlace) -> None:
    place = new_place()
    made = place.json("sandbox", "create", "--runtime", "container")["session_id"]
    started = place.json(
        *["sandbox", "run", "--background", "--session-id", made],
        "mkfifo go; echo begun; cat go; exit 9",
    )
    with place.start("sandbox", "log", "--follow", started["run_id"]) as following:
        assert following.stdout
        assert following.stdout.readline() == b"begun\n"
        place.kill_gateway()
        place.json("sandbox", "run", "--session-id", made, "echo went on > go")
        assert following.stdout.readline() == b"went on\n"
        assert following.wait(20) == 9


def test_a_background_run_keeps_its_session_alive(new_place: NewPlace) -> None:
    place = new_place()
    made = place.json("sandbox", "create", "--runtime", "container", "--idle-timeout", "0.5")
    with SandboxClient(place.endpoint) as client:
        run = client.start(made["session_id"], "sleep 2; echo done")
        assert run.wait().stdout == "done\n"
        asleep = client.start(made["session_id"], "sleep 3")
        deadline = time.monotonic() + 2
        eventually(lambda: time.monotonic() > deadline)
        assert asleep.poll().status == "running"
        asleep.kill()
        eventually(lambda: client.get_session(made["session_id"]).ended_reason == "it was idle")


@pytest.mark.anyio
async def test_the_asynchronous_client_has_runs_too(place: Place, session_id: str) -> None:
    place.json("sandbox", "status")
    async with asyncio.timeout(60), AsyncSandboxClient(place.endpoint) as client:
        # It says the last of all that it says when it is the program that the list shows.
        code = "import os, time; os.write(2, b'err\\n'); os.write(1, b'out\\n'); time.sleep(300)"
        run = await client.start(session_id, ["python3", "-c", code])
        assert client.get_run(run.run_id).exec_id == run.exec_id
        async for event in run.output():
            if isinstance(event, Stdout):
                break
        assert (await run.poll()).status == "running"
        assert "python3" in {item.comm for item in await client.processes(session_id)}
        await run.signal(signal.SIGTERM)
        result = await run.wait()
        assert (result.exit_code, result.stdout, result.stderr) == (143, "out\n", "err\n")
        await run.kill()
