"""Deadlines hold whatever somebody does to the machine's date, and what was half done goes on."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from k8e import errors
from k8e.egress.policy import Policy
from k8e.model import Phase, SessionSpec
from k8e.sessions import adoption, live
from k8e.sessions.service import Sessions
from k8e.sessions.store import SqliteSessionStore
from tests.sessions.fakes import ME, FakeGuest, World

HOUR = 3600.0


def held(sessions: Sessions, session_id: str) -> live.Live:
    return sessions._live[session_id]  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("jump", [-48 * HOUR, 48 * HOUR])
async def test_setting_the_date_neither_ends_a_session_nor_keeps_it(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    made = await sessions.create(ME, SessionSpec(lifetime=HOUR, idle_timeout=2 * HOUR))
    one, real, ticking = held(sessions, made.session_id), time.time, live.boot_time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    assert one.why_over() == ""
    told = sessions.get(ME, made.session_id).expires_at
    assert told == pytest.approx(real() + jump + HOUR, abs=5), "the date is told anew"
    monkeypatch.setattr(live, "boot_time", lambda: ticking() + HOUR + 1)
    assert one.why_over() == "its lifetime was over"


async def test_a_date_that_was_not_set_is_told_as_it_was(sessions: Sessions) -> None:
    made = await sessions.create(ME, SessionSpec(lifetime=HOUR))
    assert sessions.get(ME, made.session_id).expires_at == made.expires_at


async def test_no_timer_sleeps_longer_than_a_machine_may_have_slept(sessions: Sessions) -> None:
    made = await sessions.create(ME, SessionSpec(lifetime=HOUR, idle_timeout=HOUR))
    timer = held(sessions, made.session_id)._timer  # pyright: ignore[reportPrivateUsage]
    assert timer is not None
    assert timer.when() - time.monotonic() <= live.LONGEST_NAP


async def test_a_deadline_means_the_same_to_the_next_gateway_at_another_date(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.running() as sessions:
        made = await sessions.create(ME, SessionSpec(lifetime=HOUR))
        world.runtime.survivors = world.runtime.launched
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 48 * HOUR)
    async with world.running() as sessions:
        assert sessions.get(ME, made.session_id).phase is Phase.ACTIVE
        assert held(sessions, made.session_id).session.deadline == made.deadline
        assert held(sessions, made.session_id).why_over() == ""


async def test_a_removal_that_had_begun_is_finished_with_its_reason(world: World) -> None:
    async with world.running() as sessions:
        made = await sessions.create(ME, SessionSpec())
        world.runtime.survivors = world.runtime.launched
    store = SqliteSessionStore(world.settings.data_dir / "sessions.db")
    store.begin_end(made.session_id, "destroyed by its owner")
    store.close()
    async with world.running() as sessions:
        found = sessions.get(ME, made.session_id)
        assert (found.phase, found.ended_reason) == (Phase.ENDED, "destroyed by its owner")
        await world.runtime.launched[0].was_killed()


class Binding:
    """A network that notes what is bound, or refuses it."""

    def __init__(self, failure: errors.K8eError | None = None) -> None:
        self.bound: list[tuple[str, Policy]] = []
        self.failure = failure

    async def read(self, words: tuple[str, ...]) -> tuple[tuple[str, ...], Policy]:
        if self.failure is not None:
            raise self.failure
        return words, Policy(open="open" in words)

    async def bind(self, sandbox_id: str, policy: Policy) -> None:
        self.bound.append((sandbox_id, policy))


@pytest.mark.parametrize("failure", [None, errors.RuntimeUnusable("no network")])
async def test_a_change_of_policy_that_had_begun_is_finished_or_closes(
    sessions: Sessions, world: World, failure: errors.K8eError | None
) -> None:
    made = await sessions.create(ME, SessionSpec())
    other = await sessions.create(ME, SessionSpec())
    store = SqliteSessionStore(world.settings.data_dir / "sessions.db")
    store.allow(made, ("open",), under_way=True)
    network = Binding(failure)
    alive = {name: held(sessions, name) for name in (made.session_id, other.session_id)}
    await adoption.finish_policies(store, network, alive)  # pyright: ignore[reportArgumentType]
    assert network.bound == [(made.sandbox_id, Policy(open=failure is None))]
    words = ("none",) if failure else ("open",)
    assert alive[made.session_id].session.allowed_hosts == words
    assert sessions.get(ME, made.session_id).allowed_hosts == words
    assert store.half_allowed() == []
    store.close()


async def test_a_change_of_policy_is_finished_when_its_client_leaves(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await sessions.create(ME, SessionSpec())
    network = sessions._network  # pyright: ignore[reportPrivateUsage]
    began, go_on = asyncio.Event(), asyncio.Event()

    async def bind(sandbox_id: str, policy: Policy) -> None:
        began.set()
        await go_on.wait()

    monkeypatch.setattr(network, "read", Binding().read)
    monkeypatch.setattr(network, "bind", bind)
    changing = asyncio.create_task(sessions.allow(ME, made.session_id, ("open",)))
    async with asyncio.timeout(5):
        await began.wait()
        changing.cancel()
        await asyncio.wait([changing])
        go_on.set()
        async with held(sessions, made.session_id).policy:
            assert held(sessions, made.session_id).session.allowed_hosts == ("open",)
    assert changing.cancelled()


async def test_children_of_an_older_release_end_with_their_parent(world: World) -> None:
    store = SqliteSessionStore(world.settings.data_dir / "sessions.db")
    async with world.running() as sessions:
        parent = await sessions.create(ME, SessionSpec(lifetime=HOUR))
        child = await sessions.run_subagent(ME, parent.session_id)
        world.runtime.survivors = list[FakeGuest](world.runtime.launched)
    for one in (parent, child):
        store.extend(one.session_id, parent.expires_at, 0)
    store.close()
    async with world.running() as sessions:
        longer = await sessions.extend(ME, parent.session_id, 2 * HOUR)
        found = held(sessions, child.session_id).session
        assert found == replace(found, deadline=longer.deadline, expires_at=longer.expires_at)
