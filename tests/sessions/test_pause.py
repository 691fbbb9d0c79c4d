"""What sessions decide about pauses. No sandbox is needed."""

from __future__ import annotations

import asyncio
import time

import pytest

from k8e import errors
from k8e.guest import wire
from k8e.model import Phase, Session, SessionSpec
from k8e.sessions import lifetime, live
from k8e.sessions.service import Sessions
from tests.sessions.fakes import ME, OTHER, FakeGuest, World
from tests.sessions.test_subagents import ended, family, nowhere, until

SOON = 0.1  # seconds


def phases(sessions: Sessions) -> list[Phase]:
    return [item.phase for item in sessions.listing(ME)]


async def paused(sessions: Sessions, spec: SessionSpec | None = None) -> Session:
    made = await sessions.create(ME, spec or SessionSpec())
    await sessions.pause(ME, made.session_id)
    return made


async def test_a_paused_session_is_frozen_and_refuses_everything_new(
    world: World, sessions: Sessions
) -> None:
    made = await paused(sessions)
    assert world.runtime.launched[0].frozen
    assert phases(sessions) == [Phase.PAUSED]
    for op in ({"op": "ping"}, {"op": "exec", "argv": ["true"]}, {"op": "stat", "path": "x"}):
        with pytest.raises(errors.SessionPaused, match="is paused") as caught:
            sessions.open_now(ME, made.session_id, op, nowhere)
        assert caught.value.hint == f"k8e sandbox resume {made.session_id}"
        with pytest.raises(errors.SessionPaused):
            await sessions.open(ME, made.session_id, op, nowhere)
    with pytest.raises(errors.SessionPaused):
        await sessions.run_subagent(ME, made.session_id)
    await sessions.resume(ME, made.session_id)
    assert phases(sessions) == [Phase.ACTIVE]
    assert not world.runtime.launched[0].frozen
    assert sessions.open_now(ME, made.session_id, {"op": "ping"}, nowhere)


async def test_pausing_and_resuming_twice_are_no_errors(world: World, sessions: Sessions) -> None:
    made = await sessions.create(ME, SessionSpec())
    await sessions.resume(ME, made.session_id)
    for _ in range(2):
        await sessions.pause(ME, made.session_id)
    for _ in range(2):
        await sessions.resume(ME, made.session_id)
    assert world.runtime.launched[0].turns == ["freeze", "thaw"]


async def test_somebody_elses_session_can_be_neither_paused_nor_resumed(
    sessions: Sessions,
) -> None:
    made = await sessions.create(ME, SessionSpec())
    for turn in (sessions.pause, sessions.resume):
        for session_id in (made.session_id, "nothing"):
            with pytest.raises(errors.SessionNotFound):
                await turn(OTHER, session_id)
    assert phases(sessions) == [Phase.ACTIVE]


async def test_many_turns_at_once_end_in_one_of_the_two_phases(
    world: World, sessions: Sessions
) -> None:
    made = await sessions.create(ME, SessionSpec())
    turns = [sessions.pause, sessions.resume] * 10
    await asyncio.gather(*(turn(ME, made.session_id) for turn in turns))
    assert world.runtime.launched[0].frozen is (phases(sessions) == [Phase.PAUSED])


async def test_a_pause_that_fails_leaves_an_active_session(
    world: World, sessions: Sessions
) -> None:
    made = await sessions.create(ME, SessionSpec())
    world.runtime.launched[0].fails_to_freeze = True
    with pytest.raises(errors.ToolFailed, match="does not freeze"):
        await sessions.pause(ME, made.session_id)
    assert phases(sessions) == [Phase.ACTIVE]
    assert sessions.open_now(ME, made.session_id, {"op": "ping"}, nowhere)


async def test_a_caller_that_leaves_makes_no_half_a_pause(world: World, sessions: Sessions) -> None:
    made = await sessions.create(ME, SessionSpec())
    task = asyncio.ensure_future(sessions.pause(ME, made.session_id))
    await asyncio.sleep(0)
    task.cancel()
    await until(lambda: world.runtime.launched[0].frozen)
    assert phases(sessions) == [Phase.PAUSED]


# Operations.


async def test_what_is_under_way_waits_and_goes_on(world: World, sessions: Sessions) -> None:
    made = await sessions.create(ME, SessionSpec())
    heard: list[int] = []
    call = {"op": "exec", "argv": ["true"]}
    operation = sessions.open_now(ME, made.session_id, call, lambda kind, _: heard.append(kind))
    assert operation is not None
    await sessions.pause(ME, made.session_id)
    assert not operation.done
    await sessions.resume(ME, made.session_id)
    talk = world.runtime.launched[0].talk
    talk.answer(wire.RESULT, wire.pack({"id": "x", "pid": 2}))
    talk.answer(wire.EXIT, wire.pack({"code": 0}))
    assert heard == [wire.RESULT, wire.EXIT]


async def test_a_paused_guest_is_not_asked_whether_it_lives(
    world: World, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "FIRST_ANSWER", SOON)
    monkeypatch.setattr(lifetime, "PING_SECONDS", SOON)
    made = await sessions.create(ME, SessionSpec())
    sessions.open_now(ME, made.session_id, {"op": "stat", "path": "x"}, nowhere)
    await sessions.pause(ME, made.session_id)
    deadline = time.monotonic() + 10 * SOON
    await until(lambda: time.monotonic() > deadline)
    assert phases(sessions) == [Phase.PAUSED]
    assert {"op": "ping"} not in world.runtime.launched[0].talk.calls
    await sessions.resume(ME, made.session_id)
    await world.runtime.launched[0].was_killed()  # now it must answer, and does not
    assert await ended(sessions, made.session_id) == "its guest stopped answering"


async def test_a_guest_that_was_paused_while_it_was_asked_is_not_ended(
    world: World, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "FIRST_ANSWER", SOON)
    monkeypatch.setattr(lifetime, "PING_SECONDS", 5 * SOON)
    made = await sessions.create(ME, SessionSpec())
    talk = world.runtime.launched[0].talk
    sessions.open_now(ME, made.session_id, {"op": "stat", "path": "x"}, nowhere)
    await until(lambda: {"op": "ping"} in talk.calls)
    await sessions.pause(ME, made.session_id)
    deadline = time.monotonic() + 15 * SOON
    await until(lambda: time.monotonic() > deadline)
    assert phases(sessions) == [Phase.PAUSED]


# Time.


async def test_idle_time_does_not_count_while_paused(world: World, sessions: Sessions) -> None:
    made = await paused(sessions, SessionSpec(idle_timeout=0.3))
    deadline = time.monotonic() + 0.9
    await until(lambda: time.monotonic() > deadline)
    assert phases(sessions) == [Phase.PAUSED]
    await sessions.resume(ME, made.session_id)
    assert await ended(sessions, made.session_id) == "it was idle"


async def test_a_paused_child_keeps_its_parent_from_being_idle(sessions: Sessions) -> None:
    _, child = await family(sessions, spec=SessionSpec(idle_timeout=0.3))
    await sessions.pause(ME, child.session_id)
    deadline = time.monotonic() + 0.9
    await until(lambda: time.monotonic() > deadline)
    assert phases(sessions) == [Phase.ACTIVE, Phase.PAUSED]


async def test_the_lifetime_of_a_paused_session_counts(world: World, sessions: Sessions) -> None:
    made = await paused(sessions, SessionSpec(lifetime=0.5))
    assert await ended(sessions, made.session_id) == "its lifetime was over"
    assert world.runtime.launched[0].killed.is_set()


async def test_a_paused_session_can_be_destroyed_extended_and_given_hosts(
    world: World, sessions: Sessions
) -> None:
    made = await paused(sessions)
    assert (await sessions.extend(ME, made.session_id, 100)).phase is Phase.PAUSED
    assert (await sessions.allow(ME, made.session_id, ("none",)))[0].phase is Phase.PAUSED
    await sessions.destroy(ME, made.session_id)
    assert world.runtime.launched[0].killed.is_set()
    with pytest.raises(errors.SessionNotFound, match="destroyed by its owner"):
        await sessions.resume(ME, made.session_id)


async def test_a_session_that_is_destroyed_while_it_is_paused_is_gone(
    world: World, sessions: Sessions
) -> None:
    made = await sessions.create(ME, SessionSpec())
    pausing = asyncio.ensure_future(sessions.pause(ME, made.session_id))
    await asyncio.sleep(0)
    await sessions.destroy(ME, made.session_id)
    with pytest.raises(errors.SandboxDied, match="meanwhile"):
        await pausing
    assert sessions.get(ME, made.session_id).phase is Phase.ENDED


# Standing sessions.


async def test_the_standing_session_stays_the_standing_one_while_it_is_paused(
    world: World, sessions: Sessions
) -> None:
    made = await sessions.auto(ME, SessionSpec(tenant="t"))
    await sessions.pause(ME, made.session_id)
    again = await sessions.auto(ME, SessionSpec(tenant="t"))
    assert again.session_id == made.session_id
    with pytest.raises(errors.SessionPaused) as caught:
        sessions.open_now(ME, again.session_id, {"op": "ping"}, nowhere)
    assert made.session_id in caught.value.hint
    assert len(world.runtime.launched) == 1


# Families.


async def test_a_parent_is_paused_and_resumed_with_its_children(
    world: World, sessions: Sessions
) -> None:
    parent, first, _ = await family(sessions, 2)
    await sessions.pause(ME, parent.session_id)
    assert phases(sessions) == [Phase.PAUSED] * 3
    with pytest.raises(errors.SessionPaused) as caught:
        await sessions.resume(ME, first.session_id)
    assert parent.session_id in caught.value.hint
    await sessions.resume(ME, parent.session_id)
    assert phases(sessions) == [Phase.ACTIVE] * 3
    assert not any(guest.frozen for guest in world.runtime.launched)


async def test_a_child_is_paused_alone(world: World, sessions: Sessions) -> None:
    _, child = await family(sessions)
    await sessions.pause(ME, child.session_id)
    assert [guest.frozen for guest in world.runtime.launched] == [False, True]


async def test_a_family_is_paused_as_a_whole_or_not_at_all(
    world: World, sessions: Sessions
) -> None:
    parent, *_ = await family(sessions, 2)
    world.runtime.launched[2].fails_to_freeze = True
    with pytest.raises(errors.ToolFailed):
        await sessions.pause(ME, parent.session_id)
    assert phases(sessions) == [Phase.ACTIVE] * 3
    assert not any(guest.frozen for guest in world.runtime.launched)


async def test_a_child_that_is_being_made_while_its_parent_is_paused_is_paused_too(
    world: World, sessions: Sessions
) -> None:
    parent = await sessions.create(ME, SessionSpec())
    world.runtime.gate.clear()
    making = asyncio.ensure_future(sessions.run_subagent(ME, parent.session_id))
    await until(lambda: len(world.runtime.specs) == 2)
    await sessions.pause(ME, parent.session_id)
    world.runtime.gate.set()
    assert (await making).phase is Phase.PAUSED
    assert world.runtime.launched[1].frozen
    await sessions.resume(ME, parent.session_id)
    assert phases(sessions) == [Phase.ACTIVE] * 2


async def test_a_paused_parent_that_ends_takes_its_paused_children_along(
    world: World, sessions: Sessions
) -> None:
    parent, *_ = await family(sessions, 2)
    await sessions.pause(ME, parent.session_id)
    await sessions.destroy(ME, parent.session_id)
    assert sessions.listing(ME) == []
    assert all(guest.killed.is_set() for guest in world.runtime.launched)


# Restarts.


async def test_a_paused_session_is_adopted_paused_and_frozen_again(world: World) -> None:
    async with world.running() as sessions:
        made = await paused(sessions)
    guest = FakeGuest(world.runtime.launched[0].sandbox_id)
    world.runtime.survivors = [guest]
    async with world.running() as sessions:
        assert phases(sessions) == [Phase.PAUSED]
        # Perhaps the gateway before was killed before it had frozen it.
        await until(lambda: guest.frozen)
        with pytest.raises(errors.SessionPaused):
            sessions.open_now(ME, made.session_id, {"op": "ping"}, nowhere)
        await sessions.resume(ME, made.session_id)
        assert phases(sessions) == [Phase.ACTIVE]
        assert not guest.frozen
