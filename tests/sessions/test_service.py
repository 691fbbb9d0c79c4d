"""What sessions decide: idempotence, limits, lifetimes, owners, ends. No sandbox is needed."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from k8e import errors
from k8e.guest import wire
from k8e.model import MIB, Limits, Phase, SessionSpec
from k8e.sessions.service import Sessions
from k8e.sessions.store import SqliteSessionStore
from tests.sessions.fakes import ME, OTHER, PATIENCE, FakeGuest, World


async def ended(sessions: Sessions, session_id: str) -> str:
    """Wait until a session has ended; the reason."""
    async with asyncio.timeout(PATIENCE):
        while True:
            if (found := sessions.get(ME, session_id)).phase is Phase.ENDED:
                return found.ended_reason
            await asyncio.sleep(0)


async def test_a_created_session_is_active_found_and_listed(
    world: World, sessions: Sessions
) -> None:
    limits = Limits(memory=64 * MIB)
    made = await sessions.create(ME, SessionSpec(tenant="t", env={"A": "1"}, limits=limits))
    assert made.phase is Phase.ACTIVE
    assert made.session_id.startswith("sess-")
    assert sessions.get(ME, made.session_id) == made
    assert sessions.listing(ME) == [made]
    assert sessions.listing(ME, tenant="other") == []
    assert world.runtime.specs[0].limits == limits
    assert world.runtime.launched[0].env == {"A": "1"}


async def test_somebody_elses_session_looks_as_if_it_did_not_exist(sessions: Sessions) -> None:
    made = await sessions.create(ME, SessionSpec())
    unknown = "session nothing not found"
    for session_id in (made.session_id, "nothing"):
        with pytest.raises(errors.SessionNotFound) as caught:
            sessions.get(OTHER, session_id)
        assert str(caught.value).replace(session_id, "nothing") == unknown
        with pytest.raises(errors.SessionNotFound):
            await sessions.destroy(OTHER, session_id)
        with pytest.raises(errors.SessionNotFound):
            await sessions.extend(OTHER, session_id, 60)
        with pytest.raises(errors.SessionNotFound):
            sessions.open_now(OTHER, session_id, {"op": "ping"}, lambda kind, body: None)
    assert sessions.listing(OTHER) == []


async def test_a_taken_session_id_is_a_conflict(world: World, sessions: Sessions) -> None:
    await sessions.create(ME, SessionSpec(session_id="mine"))
    for principal in (ME, OTHER):
        with pytest.raises(errors.Conflict):
            await sessions.create(principal, SessionSpec(session_id="mine"))
    assert len(world.runtime.specs) == 1


async def test_a_repeated_request_is_the_same_session(world: World, sessions: Sessions) -> None:
    spec = SessionSpec(request_id="once", labels={"a": "b"})
    first = await sessions.create(ME, spec)
    assert await sessions.create(ME, spec) == first
    assert len(world.runtime.launched) == 1
    other = await sessions.create(OTHER, spec)
    assert other.session_id != first.session_id


async def test_a_request_id_used_for_something_else_is_a_conflict(sessions: Sessions) -> None:
    await sessions.create(ME, SessionSpec(request_id="once"))
    for changed in (
        SessionSpec(request_id="once", limits=Limits(memory=64 * MIB)),
        SessionSpec(request_id="once", env={"A": "1"}),
        SessionSpec(request_id="once", runtime="gvisor"),
        SessionSpec(request_id="once", tenant="other"),
    ):
        with pytest.raises(errors.Conflict, match="request id 'once'"):
            await sessions.create(ME, changed)


async def test_a_request_id_is_free_again_when_its_session_has_ended(sessions: Sessions) -> None:
    spec = SessionSpec(request_id="once")
    first = await sessions.create(ME, spec)
    await sessions.destroy(ME, first.session_id)
    assert (await sessions.create(ME, spec)).session_id != first.session_id


async def test_ten_equal_requests_at_once_make_one_session(
    world: World, sessions: Sessions
) -> None:
    world.runtime.gate.clear()
    async with asyncio.TaskGroup() as tasks:
        calls = [
            tasks.create_task(sessions.create(ME, SessionSpec(request_id="once")))
            for _ in range(10)
        ]
        await asyncio.sleep(0)
        world.runtime.gate.set()
    assert len({call.result().session_id for call in calls}) == 1
    assert len(world.runtime.launched) == 1


@pytest.mark.parametrize("turns", [0, 1, 5])
async def test_a_different_request_at_the_same_time_is_a_conflict(
    world: World, sessions: Sessions, turns: int
) -> None:
    """Whether or not the first one has been written down yet."""
    world.runtime.gate.clear()
    first = asyncio.ensure_future(sessions.create(ME, SessionSpec(request_id="once")))
    for _ in range(turns):
        await asyncio.sleep(0)
    limits = Limits(memory=64 * MIB)
    second = asyncio.ensure_future(
        sessions.create(ME, SessionSpec(request_id="once", limits=limits))
    )
    await asyncio.sleep(0)
    world.runtime.gate.set()
    assert (await first).phase is Phase.ACTIVE
    with pytest.raises(errors.Conflict):
        await second


async def test_ten_callers_without_a_session_get_one_between_them(
    world: World, sessions: Sessions
) -> None:
    world.runtime.gate.clear()
    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(sessions.auto(ME, SessionSpec())) for _ in range(10)]
        await asyncio.sleep(0)
        world.runtime.gate.set()
    assert len({call.result().session_id for call in calls}) == 1
    assert await sessions.auto(ME, SessionSpec()) == calls[0].result()
    assert len(world.runtime.launched) == 1
    other = await sessions.auto(ME, SessionSpec(tenant="other"))
    assert other.session_id != calls[0].result().session_id


async def test_an_automatic_session_of_another_runtime_is_a_conflict(
    world: World, sessions: Sessions
) -> None:
    world.runtime.gate.clear()
    first = asyncio.ensure_future(sessions.auto(ME, SessionSpec()))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(sessions.auto(ME, SessionSpec(runtime="container")))
    await asyncio.sleep(0)
    world.runtime.gate.set()
    await first
    for asking in (second, sessions.auto(ME, SessionSpec(runtime="container"))):
        with pytest.raises(errors.Conflict, match="runs on gvisor, not on container"):
            await asking
    assert await sessions.auto(ME, SessionSpec(runtime="gvisor")) == await first


async def test_a_caller_who_leaves_does_not_half_make_a_session(
    world: World, sessions: Sessions
) -> None:
    world.runtime.gate.clear()
    leaving = asyncio.ensure_future(sessions.create(ME, SessionSpec(request_id="once")))
    async with asyncio.timeout(PATIENCE):
        await world.runtime.asked.wait()
    leaving.cancel()
    staying = asyncio.ensure_future(sessions.create(ME, SessionSpec(request_id="once")))
    await asyncio.sleep(0)
    world.runtime.gate.set()
    assert (await staying).phase is Phase.ACTIVE
    assert len(world.runtime.launched) == 1


async def test_a_failed_creation_is_told_and_remembered_as_ended(
    world: World, sessions: Sessions
) -> None:
    world.runtime.failure = errors.RuntimeUnusable("no more loop devices")
    with pytest.raises(errors.RuntimeUnusable, match="loop devices"):
        await sessions.create(ME, SessionSpec(session_id="mine"))
    assert sessions.count() == 0
    assert "loop devices" in sessions.get(ME, "mine").ended_reason
    assert sessions.listing(ME) == []
    assert [item.session_id for item in sessions.listing(ME, ended=True)] == ["mine"]


async def test_a_session_that_cannot_be_written_down_leaves_no_sandbox(
    world: World, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(SqliteSessionStore, "activate", fail)
        with pytest.raises(sqlite3.OperationalError):
            await sessions.create(ME, SessionSpec(session_id="mine"))
    assert world.runtime.launched[0].killed.is_set()
    assert sessions.count() == 0
    assert "I/O error" in sessions.get(ME, "mine").ended_reason


async def test_a_gateway_takes_only_so_many_sessions(tmp_path: Path) -> None:
    async with World(tmp_path, max_sessions=2).running() as sessions:
        first = await sessions.create(ME, SessionSpec())
        await sessions.auto(ME, SessionSpec())
        with pytest.raises(errors.LimitExceeded, match="K8E_MAX_SESSIONS") as caught:
            await sessions.create(ME, SessionSpec())
        assert "destroy" in caught.value.hint
        await sessions.destroy(ME, first.session_id)
        await sessions.create(ME, SessionSpec())


async def test_sessions_being_made_count_too(tmp_path: Path) -> None:
    world = World(tmp_path, max_sessions=1)
    async with world.running() as sessions:
        world.runtime.gate.clear()
        first = asyncio.ensure_future(sessions.create(ME, SessionSpec()))
        await asyncio.sleep(0)
        with pytest.raises(errors.LimitExceeded):
            await sessions.create(ME, SessionSpec())
        world.runtime.gate.set()
        await first


async def test_a_disk_that_is_full_keeps_no_session_from_ending(
    world: World, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    made = await sessions.create(ME, SessionSpec())
    for name in ("begin_end", "end", "forget_ended"):
        monkeypatch.setattr(SqliteSessionStore, name, is_full)
    await sessions.destroy(ME, made.session_id)
    assert world.runtime.launched[0].killed.is_set()
    assert sessions.count() == 0


async def test_a_destroyed_session_is_not_found_and_the_reason_is_told(
    world: World, sessions: Sessions
) -> None:
    made = await sessions.create(ME, SessionSpec())
    await sessions.destroy(ME, made.session_id)
    assert world.runtime.launched[0].killed.is_set()
    assert sessions.get(ME, made.session_id).ended_reason == "destroyed by its owner"
    over = r"not found .*destroyed by its owner"
    with pytest.raises(errors.SessionNotFound, match=over):
        sessions.open_now(ME, made.session_id, {"op": "ping"}, lambda kind, body: None)
    with pytest.raises(errors.SessionNotFound, match=over):
        await sessions.extend(ME, made.session_id, 60)
    with pytest.raises(errors.SessionNotFound, match="not found"):
        await sessions.destroy(ME, made.session_id)


async def test_two_who_destroy_at_once_both_succeed(world: World, sessions: Sessions) -> None:
    made = await sessions.create(ME, SessionSpec())
    async with asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(sessions.destroy(ME, made.session_id))
    assert sessions.count() == 0


async def test_a_session_ends_when_its_lifetime_is_over(world: World, sessions: Sessions) -> None:
    made = await sessions.create(ME, SessionSpec(lifetime=0.05))
    assert made.expires_at == pytest.approx(made.created_at + 0.05)
    sessions.open_now(ME, made.session_id, {"op": "ping"}, lambda kind, body: None)  # still busy
    await world.runtime.launched[0].was_killed()
    assert await ended(sessions, made.session_id) == "its lifetime was over"


async def test_an_idle_session_ends(world: World, sessions: Sessions) -> None:
    made = await sessions.create(ME, SessionSpec(idle_timeout=0.05))
    await world.runtime.launched[0].was_killed()
    assert await ended(sessions, made.session_id) == "it was idle"


async def test_a_busy_session_is_not_idle_until_its_work_is_done(
    world: World, sessions: Sessions
) -> None:
    made = await sessions.create(ME, SessionSpec(idle_timeout=0.05))
    sessions.open_now(ME, made.session_id, {"op": "ping"}, lambda kind, body: None)
    guest = world.runtime.launched[0]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await guest.killed.wait()
    guest.talk.answer(wire.RESULT, wire.pack({}))
    await guest.was_killed()


async def test_a_session_can_be_extended_and_shortened(world: World, sessions: Sessions) -> None:
    made = await sessions.create(ME, SessionSpec(lifetime=0.2))
    longer = await sessions.extend(ME, made.session_id, 1000)
    assert longer.expires_at > made.expires_at + 900
    assert sessions.get(ME, made.session_id).expires_at == longer.expires_at
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await world.runtime.launched[0].killed.wait()
    await sessions.extend(ME, made.session_id, 0.01)
    await world.runtime.launched[0].was_killed()


async def test_a_lifetime_above_the_limit_is_refused(sessions: Sessions) -> None:
    with pytest.raises(errors.LimitExceeded, match="K8E_MAX_LIFETIME"):
        await sessions.create(ME, SessionSpec(lifetime=1e9))
    made = await sessions.create(ME, SessionSpec())
    with pytest.raises(errors.LimitExceeded):
        await sessions.extend(ME, made.session_id, 1e9)


async def test_the_death_of_a_sandbox_ends_its_session_with_the_reason(
    world: World, sessions: Sessions
) -> None:
    made = await sessions.create(ME, SessionSpec())
    guest = world.runtime.launched[0]
    frames: list[tuple[int, bytes]] = []
    sessions.open_now(
        ME, made.session_id, {"op": "ping"}, lambda kind, body: frames.append((kind, body))
    )
    guest.death.set_result("the sandbox ran out of memory")
    guest.talk.break_off()
    assert await ended(sessions, made.session_id) == "the sandbox ran out of memory"
    assert [kind for kind, _ in frames] == [wire.ERROR]
    assert wire.unpack(frames[0][1])["message"] == "the sandbox ran out of memory"
    assert wire.unpack(frames[0][1])["code"] == "sandbox_died"
    with pytest.raises(errors.SessionNotFound, match="out of memory"):
        await sessions.open(ME, made.session_id, {"op": "ping"}, lambda kind, body: None)


async def test_a_sandbox_that_cannot_be_removed_does_not_end_the_gateway(
    world: World, sessions: Sessions
) -> None:
    doomed = await sessions.create(ME, SessionSpec(lifetime=0.05))
    world.runtime.launched[0].fails_to_die = True
    other = await sessions.create(ME, SessionSpec())
    assert await ended(sessions, doomed.session_id) == "its lifetime was over"
    world.runtime.launched[1].fails_to_die = True
    world.runtime.launched[1].death.set_result("it died")
    assert await ended(sessions, other.session_id) == "it died"
    assert (await sessions.create(ME, SessionSpec())).phase is Phase.ACTIVE


async def test_stopping_leaves_sandboxes_running_and_gives_up_half_made_ones(world: World) -> None:
    async with world.running() as sessions:
        made = await sessions.create(ME, SessionSpec())
        world.runtime.gate.clear()
        half = asyncio.ensure_future(sessions.create(ME, SessionSpec()))
        await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await half
    guest = world.runtime.launched[0]
    assert not guest.killed.is_set()
    world.runtime.survivors = [guest]
    async with world.running() as sessions:
        assert [item.session_id for item in sessions.listing(ME)] == [made.session_id]
        assert guest.talk.calls == []
        sessions.open_now(ME, made.session_id, {"op": "ping"}, lambda kind, body: None)
        assert guest.talk.calls == [{"op": "ping"}]


async def test_a_deadline_holds_over_a_restart(world: World) -> None:
    async with world.running() as sessions:
        made = await sessions.create(ME, SessionSpec(lifetime=0.3))
    world.runtime.survivors = [world.runtime.launched[0]]
    async with world.running() as sessions:
        assert sessions.get(ME, made.session_id).expires_at == made.expires_at
        await world.runtime.launched[0].was_killed()
        assert await ended(sessions, made.session_id) == "its lifetime was over"


async def test_after_a_restart_a_lost_sandbox_is_an_ended_session(world: World) -> None:
    async with world.running() as sessions:
        made = await sessions.create(ME, SessionSpec())
    async with world.running() as sessions:
        assert "restart" in sessions.get(ME, made.session_id).ended_reason


async def test_after_a_restart_a_sandbox_that_nobody_knows_is_removed(world: World) -> None:
    world.runtime.survivors = [FakeGuest("sb-stranger")]
    (world.settings.run_dir / "sandboxes/sb-remains").mkdir()
    async with world.running() as sessions:
        assert world.runtime.survivors[0].killed.is_set()
        assert "sb-remains" in world.runtime.purged
        assert sessions.count() == 0


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"op": "bind"}, "unknown operation 'bind'"),
        ({"op": None}, "unknown operation"),
        ({}, "unknown operation"),
        ({"op": "exec"}, "argv"),
        ({"op": "exec", "argv": []}, "argv"),
        ({"op": "exec", "argv": "ls"}, "argv"),
        ({"op": "exec", "argv": ["a\0b"]}, "NUL"),
        ({"op": "exec", "argv": ["a"], "timeout": -1}, "timeout"),
        ({"op": "exec", "argv": ["a"], "timeout": float("nan")}, "timeout"),
        ({"op": "exec", "argv": ["a"], "timeout": "5"}, "timeout"),
        ({"op": "exec", "argv": ["a"], "env": {"A": 1}}, "env"),
        ({"op": "exec", "argv": ["a"], "env": ["A"]}, "env"),
        ({"op": "exec", "argv": ["a"], "id": "../../x"}, "exec id"),
        ({"op": "exec", "argv": ["a"], "id": "x" * 65}, "exec id"),
        ({"op": "exec", "code": b"", "language": "bash"}, "code is empty"),
        ({"op": "exec", "code": b" \n", "language": "bash"}, "code is empty"),
        ({"op": "exec", "code": b"x", "language": "cobol"}, "unknown language 'cobol'"),
        ({"op": "exec", "code": b"x"}, "unknown language"),
        ({"op": "read", "path": "x", "window": 0.5}, "window"),
        ({"op": "read", "path": "x", "window": 1 << 30}, "window"),
    ],
)
async def test_a_call_that_no_guest_should_see_is_refused(
    world: World, sessions: Sessions, call: dict[str, object], said: str
) -> None:
    made = await sessions.create(ME, SessionSpec())
    with pytest.raises(errors.InvalidRequest, match=said):
        sessions.open_now(ME, made.session_id, call, lambda kind, body: None)
    assert world.runtime.launched[0].talk.calls == []


async def test_code_above_the_limit_is_refused_with_advice(sessions: Sessions) -> None:
    made = await sessions.create(ME, SessionSpec())
    call = {"op": "exec", "language": "bash", "code": b"x" * (wire.MAX_CODE + 1)}
    with pytest.raises(errors.LimitExceeded, match=str(wire.MAX_CODE)) as caught:
        sessions.open_now(ME, made.session_id, call, lambda kind, body: None)
    assert "file" in caught.value.hint
