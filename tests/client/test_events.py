"""What happened in a session, through the SDK, over both wires and on both runtimes."""

from __future__ import annotations

import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import pytest

from k8e import AsyncSandboxClient, Event, SandboxClient, errors
from tests.gateway import worlds
from tests.gateway.worlds import CONNECT, NOWHERE
from tests.places import NewPlace, Place, eventually


@pytest.fixture(scope="module")
def place() -> Generator[Place]:
    with worlds.networked() as place:
        yield place


@pytest.fixture
def fresh(client: SandboxClient, runtime: str) -> Generator[str]:
    session_id = client.create_session(runtime, [])
    yield session_id
    client.destroy_session(session_id)


def of_kind(client: SandboxClient, session_id: str, kind: str) -> list[Event]:
    return [item for item in client.events(session_id) if item.kind == kind]


def test_every_run_leaves_a_start_and_an_end(client: SandboxClient, fresh: str) -> None:
    client.exec(fresh, "echo much; exit 3", env={"TOKEN": "hunter2"}, stdin="hunter2")
    client.run("print('hunter2')", "python", session_id=fresh)
    client.exec(fresh, "sleep 60", timeout=0.2)
    with pytest.raises(FileNotFoundError):
        client.exec(fresh, ["/no/such/program"])
    found = client.events(fresh)
    assert [item.seq for item in found] == list(range(1, 11))
    assert all(item.session_id == fresh for item in found)
    assert [item.at for item in found] == sorted(item.at for item in found)
    assert found[0].kind == "session.created"
    met = found.pop(7)  # behind the end of the run that took too long
    assert (met.kind, met.fields["limit"], met.fields["value"]) == ("limit.reached", "timeout", 0.2)
    assert met.fields["exec_id"] == found[6].fields["exec_id"]
    assert [item.kind for item in found[1:]] == ["exec.started", "exec.finished"] * 4
    starts, ends = found[1::2], found[2::2]
    assert [item.fields["exec_id"] for item in starts] == [item.fields["exec_id"] for item in ends]
    assert starts[0].fields["command"] == "echo much; exit 3"
    assert (starts[1].fields["language"], starts[1].fields["size"]) == ("python", 16)
    assert [item.fields.get("exit_code") for item in ends][:2] == [3, 0]
    assert [item.fields["status"] for item in ends] == [
        "completed",
        "completed",
        "timed_out",
        "failed",
    ]
    assert ends[2].fields["duration_ms"] >= 200
    assert ends[3].fields["error"] == "ENOENT"
    assert "hunter2" not in str(found)


def test_changes_are_told_and_reading_is_not(client: SandboxClient, fresh: str) -> None:
    client.write_file(fresh, "note", b"x" * 3_000_000)
    client.read_file(fresh, "note")
    client.rename(fresh, "note", "moved")
    client.list_files(fresh)
    client.remove(fresh, "moved")
    client.extend_session(fresh, 5000)
    client.update_allowed_hosts(fresh, ["a.example"])
    asked = client.confirm_action(fresh, "pay", wait=False)
    client.approve_action(asked.approval_id, reason="fine")
    assert [(item.kind, item.fields.get("path")) for item in client.events(fresh)][1:] == [
        ("file.written", "note"),
        ("file.renamed", "note"),
        ("file.removed", "moved"),
        ("session.extended", None),
        ("egress.changed", None),
        ("approval.asked", None),
        ("approval.decided", None),
    ]
    assert of_kind(client, fresh, "file.written")[0].fields["size"] == 3_000_000


def test_what_a_run_was_refused_is_one_event_with_a_count(
    client: SandboxClient, fresh: str
) -> None:
    client.run(f"for n in range(3):\n try:\n  exec({CONNECT!r})\n except BaseException: pass",
               "python", session_id=fresh)  # fmt: skip
    (found,) = of_kind(client, fresh, "egress.denied")
    (end,) = of_kind(client, fresh, "exec.finished")
    assert found.fields["exec_id"] == end.fields["exec_id"]
    assert found.fields["count"] == 3
    assert [(item["address"], item["count"]) for item in found.fields["denials"]] == [(NOWHERE, 3)]


def test_the_end_of_a_background_run_is_told_though_nobody_waits(
    client: SandboxClient, fresh: str
) -> None:
    run = client.start(fresh, "sleep 0.2; exit 4")
    (end,) = eventually(lambda: of_kind(client, fresh, "exec.finished"))
    assert (end.fields["exit_code"], end.fields["background"]) == (4, True)
    assert run.run_id.endswith(end.fields["exec_id"])
    assert run.wait().exit_code == 4
    assert len(of_kind(client, fresh, "exec.finished")) == 1, "asking for it is no second end"


def test_a_run_that_is_watched_for_its_end_keeps_all_its_output(
    client: SandboxClient, fresh: str
) -> None:
    run = client.start(fresh, "seq 20000; sleep 0.3; seq 20000")
    assert run.wait().stdout == "".join(f"{n}\n" for n in range(1, 20001)) * 2


def test_the_newest_come_last_and_the_limit_is_kept(client: SandboxClient, fresh: str) -> None:
    for number in range(5):
        client.write_file(fresh, f"file-{number}", "x")
    assert [item.fields["path"] for item in client.events(fresh, 2)] == ["file-3", "file-4"]
    with pytest.raises(errors.InvalidRequest):
        client.events(fresh, -1)
    with pytest.raises(errors.SessionNotFound):
        client.events("nobody-s")


def test_an_ended_session_can_still_be_asked_about(client: SandboxClient, runtime: str) -> None:
    session_id = client.create_session(runtime)
    client.destroy_session(session_id)
    last = client.events(session_id)[-1]
    assert (last.kind, last.fields["reason"]) == ("session.ended", "destroyed by its owner")


def test_many_threads_leave_pairs_and_no_torn_line(client: SandboxClient, fresh: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(client.exec, [fresh] * 40, [f"exit {n}" for n in range(40)]))
    found = client.events(fresh)
    assert [item.seq for item in found] == list(range(1, 82))
    ends = [item.fields["exit_code"] for item in found if item.kind == "exec.finished"]
    assert sorted(ends) == list(range(40))


async def test_the_asynchronous_client_tells_the_same(place: Place) -> None:
    place.json("sandbox", "status")
    async with AsyncSandboxClient(place.endpoint) as client:
        session_id = await client.create_session("container")
        await client.exec(session_id, "true")
        kinds = [item.kind for item in await client.events(session_id)]
        assert kinds == ["session.created", "exec.started", "exec.finished"]
        await client.destroy_session(session_id)


def test_a_killed_gateway_loses_no_event_and_the_next_one_catches_up(
    new_place: NewPlace, runtime: str
) -> None:
    place = new_place(K8E_RUNTIME=runtime)
    session_id = place.json("sandbox", "create")["session_id"]
    with SandboxClient(place.endpoint) as client:
        for number in range(20):
            client.exec(session_id, f"echo {number}")
        brief = client.start(session_id, "sleep 0.1; exit 5")
        lasting = client.start(session_id, "until test -e go; do sleep 0.05; done; exit 6")
        waited = client.exec_events(session_id, "echo begun; until test -e go; do sleep 0.05; done")
        next(waited)
        before = client.events(session_id)
        place.kill_gateway()
        with pytest.raises(errors.GatewayUnreachable):
            list(waited)
        place.json("gateway", "--background")
        after = client.events(session_id)
        assert after[: len(before)] == before
        client.write_file(session_id, "go", "")

        def ends() -> dict[str, int]:
            found = of_kind(client, session_id, "exec.finished")
            return {item.fields["exec_id"]: item.fields["exit_code"] for item in found}

        wanted = {brief.exec_id: 5, lasting.exec_id: 6}
        eventually(lambda: wanted.items() <= ends().items())
        assert [item.seq for item in client.events(session_id)] == list(
            range(1, len(client.events(session_id)) + 1)
        )


def test_nobody_but_its_owner_can_read_the_file(place: Place) -> None:
    session_id = place.json("sandbox", "create", "--runtime", "container")["session_id"]
    place.json("sandbox", "destroy", session_id)
    folder = place.data / "events"
    assert folder.stat().st_mode & 0o077 == 0
    modes = [file.stat().st_mode & 0o777 for file in folder.iterdir()]
    assert set(modes) == {0o600}
    assert folder.stat().st_uid == os.geteuid()
