"""Which events sessions leave, and that they are for their owners alone."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from k8e import errors
from k8e.guest import wire
from k8e.model import Principal, Role, SessionSpec
from k8e.sessions import events as event_files
from k8e.sessions import operations
from k8e.sessions.approval_store import SqliteApprovalStore
from k8e.sessions.approvals import Approvals
from k8e.sessions.service import Sessions
from tests.sessions.fakes import ME, OTHER, PATIENCE, World

END = {"code": 3, "status": "completed", "duration_ms": 12, "background": False}


def nowhere(kind: int, body: bytes) -> None:
    """A client that does not listen."""


async def told(sessions: Sessions, session_id: str, limit: int = 0) -> list[dict[str, Any]]:
    lines, _ = await sessions.events.read(sessions.get(ME, session_id), limit)
    return [json.loads(line) for line in lines]


async def kinds(sessions: Sessions, session_id: str) -> list[str]:
    return [item["kind"] for item in await told(sessions, session_id)]


async def called(world: World, op: str) -> dict[str, Any]:
    """The newest call of the first guest, once it is ``op``."""
    while True:
        call = world.runtime.launched[0].talk.calls[-1]
        if call["op"] == op:
            return call
        await asyncio.sleep(0)


# Sessions.


async def test_the_life_of_a_session_is_told(world: World, sessions: Sessions) -> None:
    made = await sessions.create(ME, SessionSpec(tenant="t", env={"SECRET": "hunter2"}))
    await sessions.extend(ME, made.session_id, 600)
    await sessions.allow(ME, made.session_id, ("none",))
    await sessions.destroy(ME, made.session_id)
    found = await told(sessions, made.session_id)
    assert [item["kind"] for item in found] == [
        "session.created",
        "session.extended",
        "egress.changed",
        "session.ended",
    ]
    assert (found[0]["runtime"], found[0]["tenant_id"]) == ("gvisor", "t")
    assert found[2]["allowed_hosts"] == ["none"]
    assert found[3]["reason"] == "destroyed by its owner"
    assert "hunter2" not in json.dumps(found)
    assert not sessions.events._open, "no descriptor is kept"  # pyright: ignore[reportPrivateUsage]


async def test_an_exec_leaves_two_rows_without_environment_and_input(
    world: World, sessions: Sessions
) -> None:
    made = await sessions.create(ME, SessionSpec(session_id="mine"))
    guest = world.runtime.launched[0]
    call = {"op": "exec", "id": "e1", "argv": ["/bin/sh", "-c", "make all"], "stdin": True}
    running = sessions.open_now(ME, "mine", {**call, "env": {"TOKEN": "hunter2"}}, nowhere)
    assert running
    assert (await kinds(sessions, "mine"))[-1] == "exec.started", "before the guest has answered"
    guest.talk.answer(wire.RESULT, wire.pack({"id": "e1", "pid": 7}))
    running.send(wire.STDIN, b"hunter2")
    for number in range(10):
        guest.talk.answer(wire.OUT, wire.SEQ.pack(number) + b"x")
    guest.talk.answer(wire.EXIT, wire.pack({**END, "id": "another"}))
    started, finished = (await told(sessions, made.session_id))[1:]
    assert (started["exec_id"], started["command"]) == ("e1", "make all")
    assert started["background"] is False
    own = {key: value for key, value in finished.items() if key in {"exec_id", *END, "exit_code"}}
    assert own == {
        "exec_id": "e1",
        "exit_code": 3,
        "status": "completed",
        "duration_ms": 12,
        "background": False,
    }
    file = next((world.settings.data_dir / "events").iterdir())
    assert b"hunter2" not in file.read_bytes()


async def test_code_is_told_by_language_and_size_and_a_list_as_it_would_be_typed(
    world: World, sessions: Sessions
) -> None:
    await sessions.create(ME, SessionSpec(session_id="mine"))
    code = {"op": "exec", "code": b"secret = 1", "language": "python", "background": True}
    sessions.open_now(ME, "mine", dict(code), nowhere)
    sessions.open_now(ME, "mine", {"op": "exec", "argv": ["ls", "a b"]}, nowhere)
    first, second = (await told(sessions, "mine"))[1:]
    assert (first["language"], first["size"], first["background"]) == ("python", 10, True)
    assert first["exec_id"] == world.runtime.launched[0].talk.calls[0]["id"], "always a known id"
    assert second["command"] == "ls 'a b'"


@pytest.mark.parametrize(
    "exit_",
    [
        b"nonsense",
        wire.pack([1]),
        wire.pack({}),
        wire.pack({**END, "code": "0"}),
        wire.pack({**END, "code": True}),
        wire.pack({**END, "code": -1}),
        wire.pack({**END, "status": "\x1b[2J"}),
        wire.pack({**END, "status": ["completed"]}),
    ],
)
async def test_a_guest_that_lies_about_the_end_is_told_as_that(
    world: World, sessions: Sessions, exit_: bytes
) -> None:
    await sessions.create(ME, SessionSpec(session_id="mine"))
    sessions.open_now(ME, "mine", {"op": "exec", "argv": ["x"]}, nowhere)
    world.runtime.launched[0].talk.answer(wire.EXIT, exit_)
    last = (await told(sessions, "mine"))[-1]
    assert (last["kind"], last["status"], last["error"]) == (
        "exec.finished",
        "failed",
        "guest_failed",
    )


async def test_refusals_that_a_guest_makes_up_are_not_told(
    world: World, sessions: Sessions
) -> None:
    await sessions.create(ME, SessionSpec(session_id="mine"))
    sessions.open_now(ME, "mine", {"op": "exec", "argv": ["x"]}, nowhere)
    lie = {**END, "duration_ms": "long", "denials": [{"name": "a.example", "count": 5}]}
    world.runtime.launched[0].talk.answer(wire.EXIT, wire.pack(lie))
    found = await told(sessions, "mine")
    assert found[-1]["kind"] == "exec.finished"
    assert found[-1]["duration_ms"] is None


async def test_an_exec_that_does_not_start_is_told_and_can_be_tried_again(
    world: World, sessions: Sessions
) -> None:
    await sessions.create(ME, SessionSpec(session_id="mine"))
    call = {"op": "exec", "id": "e1", "argv": ["x"]}
    for _ in range(2):
        sessions.open_now(ME, "mine", dict(call), nowhere)
        error = {"code": "ENOENT", "message": "No such file", "hint": ""}
        world.runtime.launched[0].talk.answer(wire.ERROR, wire.pack(error))
    found = (await told(sessions, "mine"))[1:]
    assert [item["kind"] for item in found] == ["exec.started", "exec.finished"] * 2
    assert found[1]["error"] == "ENOENT"
    assert "again" not in found[2]


async def test_who_joins_a_running_exec_adds_no_rows(world: World, sessions: Sessions) -> None:
    await sessions.create(ME, SessionSpec(session_id="mine"))
    talk = world.runtime.launched[0].talk
    call = {"op": "exec", "id": "e1", "argv": ["x"]}
    sessions.open_now(ME, "mine", dict(call), nowhere)
    sessions.open_now(ME, "mine", dict(call), nowhere)
    sessions.open_now(ME, "mine", {"op": "attach", "id": "e1"}, nowhere)
    for answer, _ in list(talk._sinks):  # pyright: ignore[reportPrivateUsage]
        answer(wire.EXIT, wire.pack(END))
    assert (await kinds(sessions, "mine"))[1:] == ["exec.started", "exec.finished"]
    sessions.open_now(ME, "mine", dict(call), nowhere)
    assert (await told(sessions, "mine"))[-1]["again"] is True


async def test_the_end_of_an_exec_that_was_left_is_told(world: World, sessions: Sessions) -> None:
    await sessions.create(ME, SessionSpec(session_id="mine"))
    talk = world.runtime.launched[0].talk
    running = sessions.open_now(ME, "mine", {"op": "exec", "id": "e1", "argv": ["x"]}, nowhere)
    assert running
    talk.answer(wire.RESULT, wire.pack({"id": "e1", "pid": 7}))
    running.cancel()
    assert talk.calls[-1]["op"] == "attach"
    assert await kinds(sessions, "mine") == ["session.created", "exec.started"]
    talk.answer(wire.RESULT, wire.pack({}))
    talk.answer(wire.EXIT, wire.pack(END))
    assert (await told(sessions, "mine"))[-1]["exit_code"] == 3


async def test_what_ran_at_the_end_of_its_session_ended_with_it(
    world: World, sessions: Sessions
) -> None:
    await sessions.create(ME, SessionSpec(session_id="mine"))
    sessions.open_now(ME, "mine", {"op": "exec", "id": "waited-for", "argv": ["x"]}, nowhere)
    left = sessions.open_now(ME, "mine", {"op": "exec", "id": "left", "argv": ["x"]}, nowhere)
    assert left
    left.cancel()
    await sessions.destroy(ME, "mine")
    found = await told(sessions, "mine")
    ends = {item["exec_id"]: item["error"] for item in found if item["kind"] == "exec.finished"}
    assert ends == {"waited-for": "sandbox_died", "left": "sandbox_died"}
    assert found[-1]["kind"] == "session.ended"


async def test_changes_of_files_are_told_when_they_happened(
    world: World, sessions: Sessions
) -> None:
    await sessions.create(ME, SessionSpec(session_id="mine"))
    talk = world.runtime.launched[0].talk

    def ask(*answers: tuple[int, Any], **call: Any) -> None:
        sessions.open_now(ME, "mine", call, nowhere)
        for kind, value in answers:
            talk.answer(kind, wire.pack(value))

    error = (wire.ERROR, {"code": "ENOENT", "message": "no", "hint": ""})
    started = (wire.RESULT, {"window": 1})
    ask(started, (wire.RESULT, {"path": "/x", "size": 5}), op="write", path="a", append=True)
    ask(started, (wire.RESULT, {"path": "/x", "size": -5}), op="write", path="b")
    ask((wire.RESULT, {}), op="remove", path="a")
    ask((wire.RESULT, {}), op="remove", path=b"x" * 1000)
    ask((wire.RESULT, {}), op="rename", path="b", to="c")
    ask(error, op="remove", path="a")
    ask(started, error, op="write", path="z")
    ask((wire.RESULT, {}), op="stat", path="a")
    found = [
        (item["kind"], item["path"], item.get("size"), item.get("append"), item.get("to"))
        for item in (await told(sessions, "mine"))[1:]
    ]
    assert found == [
        ("file.written", "a", 5, True, None),
        ("file.written", "b", None, False, None),
        ("file.removed", "a", None, None, None),
        ("file.removed", None, None, None, None),
        ("file.renamed", "b", None, None, "c"),
    ]


async def test_approvals_are_told(world: World, sessions: Sessions) -> None:
    await sessions.create(ME, SessionSpec(session_id="mine"))
    store = SqliteApprovalStore(world.settings.data_dir / "approvals.db")
    approvals = Approvals(store, sessions)
    asked = await approvals.ask(ME, "mine", "delete \x1b everything")
    owner = Principal(ME.name, frozenset({Role.AGENT, Role.ADMIN}))
    await approvals.decide(owner, asked.approval_id, approved=False, reason="no")
    store.close()
    first, second = (await told(sessions, "mine"))[1:]
    assert (first["kind"], first["approval_id"]) == ("approval.asked", asked.approval_id)
    assert first["action"] == "delete \x1b everything"
    assert (second["kind"], second["status"], second["reason"], second["advisory"]) == (
        "approval.decided",
        "rejected",
        "no",
        True,
    )


# Owners and ends.


async def test_a_reused_session_id_starts_with_no_events_and_the_old_file_is_gone(
    world: World, sessions: Sessions
) -> None:
    for number in range(3):
        await sessions.create(ME, SessionSpec(session_id="mine"))
        assert await kinds(sessions, "mine") == ["session.created"]
        sessions.open_now(ME, "mine", {"op": "exec", "argv": [f"run-{number}"]}, nowhere)
        await sessions.destroy(ME, "mine")
    assert len(list((world.settings.data_dir / "events").iterdir())) == 1
    with pytest.raises(errors.SessionNotFound):
        sessions.get(OTHER, "mine")
    await sessions.create(OTHER, SessionSpec(session_id="mine"))
    lines, _ = await sessions.events.read(sessions.get(OTHER, "mine"))
    assert len(lines) == 1
    assert (await kinds(sessions, "mine"))[-1] == "session.ended", "its last owner's"


async def test_events_are_forgotten_with_their_session(
    world: World, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sessions.create(ME, SessionSpec(session_id="first"))
    await sessions.create(ME, SessionSpec(session_id="second"))
    await sessions.destroy(ME, "first")
    assert (await kinds(sessions, "first"))[-1] == "session.ended"
    monkeypatch.setattr("k8e.sessions.lifetime.KEEP_ENDED", -1.0)
    await sessions.destroy(ME, "second")
    assert list((world.settings.data_dir / "events").iterdir()) == []
    # Another owner may have the name now, and sees nothing of before.
    await sessions.create(OTHER, SessionSpec(session_id="first"))
    lines, truncated = await sessions.events.read(sessions.get(OTHER, "first"))
    assert (len(lines), truncated) == (1, False)


async def test_a_session_that_died_with_its_gateway_is_told_by_the_next_one(world: World) -> None:
    async with world.running() as sessions:
        await sessions.create(ME, SessionSpec(session_id="dead"))
        await sessions.create(ME, SessionSpec(session_id="alive"))
        sessions.open_now(ME, "dead", {"op": "exec", "id": "e1", "argv": ["x"]}, nowhere)
    world.runtime.survivors = world.runtime.launched[1:]
    async with world.running() as sessions:
        found = await told(sessions, "dead")
        assert [item["kind"] for item in found] == [
            "session.created",
            "exec.started",
            "exec.finished",
            "session.ended",
        ]
        assert "restart" in found[-1]["reason"]
        await sessions.extend(ME, "alive", 60)
        assert [item["seq"] for item in await told(sessions, "alive")] == [1, 2]


async def test_a_guest_that_never_answers_holds_up_neither_start_nor_stop(world: World) -> None:
    async with world.running() as sessions:
        await sessions.create(ME, SessionSpec(session_id="mine"))
        sessions.open_now(ME, "mine", {"op": "exec", "id": "e1", "argv": ["x"]}, nowhere)
    world.runtime.survivors = list(world.runtime.launched)
    async with asyncio.timeout(PATIENCE):
        async with world.running():
            await called(world, "execs")


@pytest.mark.parametrize("nonsense", [None, 5, [5], [{"id": "e1"}], [{"id": ["e1"]}]])
async def test_a_guest_that_answers_nonsense_about_its_execs_is_let_be(
    world: World, nonsense: Any
) -> None:
    async with world.running() as sessions:
        await sessions.create(ME, SessionSpec(session_id="mine"))
        sessions.open_now(ME, "mine", {"op": "exec", "id": "e1", "argv": ["x"]}, nowhere)
    world.runtime.survivors = list(world.runtime.launched)
    async with asyncio.timeout(PATIENCE), world.running() as sessions:
        await called(world, "execs")
        talk = world.runtime.launched[0].talk
        talk.answer(wire.RESULT, wire.pack({"execs": nonsense}))
        await asyncio.sleep(0.01)
        assert await kinds(sessions, "mine") == ["session.created", "exec.started"]


async def test_what_ended_while_no_gateway_ran_is_told_by_the_next_one(world: World) -> None:
    async with world.running() as sessions:
        await sessions.create(ME, SessionSpec(session_id="mine"))
        for exec_id in ("over", "background", "waited-for"):
            sessions.open_now(ME, "mine", {"op": "exec", "id": exec_id, "argv": ["x"]}, nowhere)
    world.runtime.survivors = list(world.runtime.launched)
    running = {"code": None, "status": "running", "duration_ms": 5, "background": True}
    execs = [
        {"id": "over", **END},
        {"id": "background", **running},
        {"id": "waited-for", **running, "background": False},
        {"id": "never-seen", **END},
    ]
    async with asyncio.timeout(PATIENCE), world.running() as sessions:
        await called(world, "execs")
        talk = world.runtime.launched[0].talk
        talk.answer(wire.RESULT, wire.pack({"execs": execs}))
        assert (await called(world, "attach"))["id"] == "background"
        talk.answer(wire.EXIT, wire.pack({**END, "background": True}))
        ends = [item for item in await told(sessions, "mine") if item["kind"] == "exec.finished"]
        assert [item["exec_id"] for item in ends] == ["over", "background"]


# What a hostile caller or guest makes of it.


async def test_the_end_of_every_exec_is_told_however_many_run_at_once(
    world: World, sessions: Sessions
) -> None:
    await sessions.create(ME, SessionSpec(session_id="mine"))
    seen: list[str] = []
    sessions.events.observers.append(
        lambda _session, kind, fields, _call: seen.append(f"{kind} {fields.get('exec_id')}")
    )
    count = event_files.REMEMBERED + 50
    for number in range(count):
        call = {"op": "exec", "id": f"e{number}", "argv": ["x"]}
        sessions.open_now(ME, "mine", call, nowhere)
    for answer, _ in list(world.runtime.launched[0].talk._sinks):  # pyright: ignore[reportPrivateUsage]
        answer(wire.EXIT, wire.pack(END))
    assert {f"exec.finished e{number}" for number in range(count)} <= set(seen)


async def test_execs_that_never_end_take_no_memory_without_end(
    world: World, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "MOST_WATCHED", 3)
    await sessions.create(ME, SessionSpec(session_id="mine"))
    talk = world.runtime.launched[0].talk

    def leave(number: int) -> None:
        call = {"op": "exec", "id": f"e{number}", "argv": ["x"]}
        running = sessions.open_now(ME, "mine", call, nowhere)
        assert running
        running.cancel()

    def watched() -> list[str]:
        return [call["id"] for call in talk.calls if call["op"] == "attach"]

    for number in range(6):
        leave(number)
    assert watched() == ["e0", "e1", "e2"]
    at = [call["op"] for call in talk.calls].index("attach")
    talk._sinks[at][0](wire.EXIT, wire.pack(END))  # pyright: ignore[reportPrivateUsage]
    leave(6)
    assert watched() == ["e0", "e1", "e2", "e6"], "who has ended makes room"
    await sessions.destroy(ME, "mine")
    ends = [item["exec_id"] for item in await told(sessions, "mine")
            if item["kind"] == "exec.finished"]  # fmt: skip
    assert sorted(ends) == [f"e{number}" for number in range(7)]


async def test_without_a_file_for_events_the_audit_trail_hears_of_ends_all_the_same(
    world: World, sessions: Sessions
) -> None:
    folder = world.settings.data_dir / "events"
    folder.rmdir()
    folder.touch()  # as a full disk or too many open files would
    seen: list[str] = []
    sessions.events.observers.append(lambda _session, kind, _fields, _call: seen.append(kind))
    await sessions.create(ME, SessionSpec(session_id="mine"))
    sessions.open_now(ME, "mine", {"op": "exec", "id": "e1", "argv": ["x"]}, nowhere)
    folder.unlink()
    folder.mkdir()
    world.runtime.launched[0].talk.answer(wire.EXIT, wire.pack(END))
    assert seen == ["session.created", "exec.started", "exec.finished"]
    (row,) = await told(sessions, "mine")
    assert (row["kind"], row["seq"]) == ("exec.finished", 3), "two were lost, and that shows"


async def test_a_client_in_trouble_keeps_no_sandbox_alive_and_no_other_client_waiting(
    world: World, sessions: Sessions
) -> None:
    await sessions.create(ME, SessionSpec(session_id="mine"))
    heard: list[int] = []

    def fails(kind: int, body: bytes) -> None:
        raise ValueError("a client in trouble")

    sessions.open_now(ME, "mine", {"op": "stat", "path": "x"}, fails)
    sessions.open_now(
        ME, "mine", {"op": "stat", "path": "x"}, lambda kind, body: heard.append(kind)
    )
    await sessions.destroy(ME, "mine")
    assert heard == [wire.ERROR]
    assert world.runtime.launched[0].killed.is_set()


async def test_a_sandbox_that_resists_its_end_loses_its_network(
    world: World, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await sessions.create(ME, SessionSpec(session_id="mine"))
    world.runtime.launched[0].fails_to_die = True
    detached: list[str] = []

    async def detach(sandbox_id: str) -> None:
        detached.append(sandbox_id)

    monkeypatch.setattr(sessions._network, "detach", detach)  # pyright: ignore[reportPrivateUsage]
    await sessions.destroy(ME, "mine")
    assert detached == [made.sandbox_id]
