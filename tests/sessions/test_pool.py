"""What the warm pool decides: who gets what, when it is refilled, what is thrown away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from k8e import errors
from k8e.model import MIB, Limits, SessionSpec
from k8e.sessions import pool as shelves
from k8e.sessions.demand import REMEMBERED
from k8e.sessions.service import Sessions
from tests.sessions.fakes import ME, PATIENCE, FakeGuest, World, until


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr("k8e.sessions.pool.HEAD_START", 0.001)
    return World(tmp_path, pool_min=2, pool_max=4)


@pytest.fixture
async def sessions(world: World) -> AsyncGenerator[Sessions]:
    async with world.running() as sessions:
        await until(lambda: sessions.pool.ready == 2)
        yield sessions


async def test_a_session_gets_a_sandbox_that_was_ready_and_settled(
    world: World, sessions: Sessions
) -> None:
    first, second = world.runtime.launched
    assert first.settled == {"python": ()}
    assert first.env is None
    made = await sessions.create(ME, SessionSpec(env={"A": "1"}))
    assert made.sandbox_id == first.sandbox_id
    assert sessions.get(ME, made.session_id).sandbox_id == first.sandbox_id
    assert first.env == {"A": "1"}
    assert first.limits == Limits()
    assert second.env is None
    (pool,) = sessions.pool.listing()
    assert (pool["hits"], pool["misses"]) == (1, 0)


async def test_a_claimed_sandbox_is_replaced_and_never_handed_out_again(
    world: World, sessions: Sessions
) -> None:
    made = await sessions.create(ME, SessionSpec())
    await until(lambda: sessions.pool.ready == 2)
    await sessions.destroy(ME, made.session_id)
    others = {(await sessions.create(ME, SessionSpec())).sandbox_id for _ in range(2)}
    assert made.sandbox_id not in others
    assert len(others) == 2


async def test_limits_of_a_session_are_bound_when_it_claims(
    world: World, sessions: Sessions
) -> None:
    limits = Limits(memory=64 * MIB)
    await sessions.create(ME, SessionSpec(limits=limits))
    assert world.runtime.launched[0].limits == limits


async def test_a_rush_makes_the_pool_larger_and_more_than_it_has_starts_cold(
    world: World, sessions: Sessions
) -> None:
    made = await asyncio.gather(*(sessions.create(ME, SessionSpec()) for _ in range(5)))
    assert len({item.sandbox_id for item in made}) == 5
    (pool,) = sessions.pool.listing()
    assert (pool["hits"], pool["misses"], pool["target"]) == (2, 3, 4)
    await until(lambda: sessions.pool.ready == 4)


async def test_a_sandbox_that_dies_while_it_waits_is_not_handed_out(
    world: World, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = world.runtime.launched[0]
    dead.death.set_result("it ended")
    await dead.was_killed()
    made = await sessions.create(ME, SessionSpec())
    assert made.sandbox_id == world.runtime.launched[1].sandbox_id


async def test_a_request_that_is_refused_costs_no_sandbox(world: World, sessions: Sessions) -> None:
    await sessions.create(ME, SessionSpec(session_id="mine"))
    await until(lambda: sessions.pool.ready == 2)
    with pytest.raises(errors.Conflict):
        await sessions.create(ME, SessionSpec(session_id="mine"))
    assert sessions.pool.ready == 2


async def test_a_child_gets_no_sandbox_of_the_pool(world: World, sessions: Sessions) -> None:
    parent = await sessions.create(ME, SessionSpec())
    await until(lambda: sessions.pool.ready == 2)
    child = await sessions.run_subagent(ME, parent.session_id)
    assert world.runtime.launched[-1].sandbox_id == child.sandbox_id
    assert world.runtime.specs[-1].workspace_of == parent.sandbox_id
    assert sessions.pool.ready == 2


async def test_draining_replaces_what_is_ready(world: World, sessions: Sessions) -> None:
    old = world.runtime.launched[:2]
    assert sessions.warming.drain("") == 2
    for guest in old:
        await guest.was_killed()
    await until(lambda: sessions.pool.ready == 2)
    made = await sessions.create(ME, SessionSpec())
    assert made.sandbox_id not in {item.sandbox_id for item in old}


class Clock:
    """The time of the pool and of the loop that wakes it, which the test can advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ahead = 0.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", self.monotonic)
        monkeypatch.setattr(shelves, "time", self)

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead

    def advance(self, seconds: float) -> None:
        self._ahead += seconds


async def test_a_pool_shrinks_by_itself_when_its_rush_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    world = World(tmp_path, pool_min=1, pool_max=8)
    async with world.running() as sessions:
        made = await asyncio.gather(*(sessions.create(ME, SessionSpec()) for _ in range(4)))
        await until(lambda: sessions.pool.ready == 4)
        ready = waiting(world, {session.sandbox_id for session in made})
        clock.advance(REMEMBERED - 2 * PATIENCE)
        await until(lambda: sessions.pool.listing()[0]["target"] == 4)
        assert sessions.pool.ready == 4
        clock.advance(2 * PATIENCE)
        await until(lambda: sessions.pool.ready == 1)
        for guest in ready[1:]:
            await guest.was_killed()
        assert not ready[0].killed.is_set()
        assert sessions.pool.listing()[0]["target"] == 1


async def test_draining_and_another_image_do_not_forget_a_rush(tmp_path: Path) -> None:
    world = World(tmp_path, pool_min=0, pool_max=8)
    async with world.running() as sessions:
        await asyncio.gather(*(sessions.create(ME, SessionSpec()) for _ in range(4)))
        await until(lambda: sessions.pool.ready == 4)
        before = sessions.pool.listing()[0]
        for renew in (lambda: sessions.warming.drain(""), lambda: sessions.pool.replace(bool)):
            waiting = world.runtime.launched[-4:]
            assert renew() == 4
            for guest in waiting:
                await guest.was_killed()
            await until(lambda: sessions.pool.ready == 4)
            assert sessions.pool.listing()[0] == before


async def test_a_template_that_changes_keeps_its_demand_and_one_that_went_does_not(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, pool_min=0, pool_max=8)
    async with world.running() as sessions:
        await sessions.templates.apply({"name": "data"}, "me")
        spec = await sessions.templates.specify({"template": "data"})
        await asyncio.gather(*(sessions.create(ME, spec) for _ in range(3)))
        await until(lambda: sessions.pool.ready == 3)
        old = world.runtime.launched[-3:]
        changed = {"name": "data", "limits": {"memory": 512 * MIB}}
        await sessions.templates.apply(changed, "me")
        for guest in old:
            await guest.was_killed()
        await until(lambda: sessions.pool.ready == 3)
        assert [numbers(sessions, what)["data"] for what in ("target", "misses")] == [3, 3]
        await sessions.templates.delete("data", "me")
        await sessions.templates.apply(changed, "me")
        told = await sessions.warming.set("data", "", 0, 8, wait=True)
        assert (told["target"], told["hits"], told["misses"]) == (0, 0, 0)


async def test_sizes_can_be_changed_and_awaited(world: World, sessions: Sessions) -> None:
    told = await sessions.warming.set("", "", 3, None, wait=True)
    assert (told["ready"], told["min"], told["max"]) == (3, 3, 4)
    told = await sessions.warming.set("", "", 0, 1, wait=True)
    assert told["ready"] == 0
    for guest in world.runtime.launched:
        await guest.was_killed()
    with pytest.raises(errors.InvalidRequest):
        await sessions.warming.set("", "", 5, 2, wait=False)


async def test_what_cannot_be_started_is_told_and_tried_again(
    world: World, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelves, "LONGEST_PAUSE", 0.01)
    world.runtime.failure = errors.ToolFailed("the disk is full")
    with pytest.raises(errors.GuestFailed, match="the disk is full"):
        await sessions.warming.set("", "", 4, 4, wait=True)
    assert sessions.pool.listing()[0]["failure"] == "the disk is full"
    world.runtime.failure = None
    await until(lambda: sessions.pool.ready == 4)
    assert sessions.pool.listing()[0]["failure"] == ""


async def test_a_gateway_that_ends_leaves_no_sandbox_of_its_pool(world: World) -> None:
    async with world.running() as sessions:
        await until(lambda: sessions.pool.ready == 2)
        kept = await sessions.create(ME, SessionSpec())
        world.runtime.gate.clear()
        await until(lambda: len(world.runtime.specs) > len(world.runtime.launched))
    mine = [item for item in world.runtime.launched if item.sandbox_id == kept.sandbox_id]
    others: list[FakeGuest] = [item for item in world.runtime.launched if item not in mine]
    assert [item.killed.is_set() for item in mine] == [False]
    assert all(item.killed.is_set() for item in others)


async def test_with_a_pool_of_no_size_nothing_is_started_ahead(tmp_path: Path) -> None:
    world = World(tmp_path, pool_max=0)
    async with world.running() as sessions:
        await sessions.create(ME, SessionSpec())
        assert len(world.runtime.specs) == 1
        assert sessions.pool.listing() == []


async def test_a_template_that_changes_replaces_what_waits_for_it(
    world: World, sessions: Sessions
) -> None:
    await sessions.templates.apply({"name": "data", "pool": {"min": 1, "max": 2}}, "me")
    await until(lambda: sessions.pool.ready == 3)
    old = world.runtime.launched[-1]
    await sessions.templates.apply(
        {"name": "data", "pool": {"min": 1, "max": 2}, "limits": {"memory": 512 * MIB}}, "me"
    )
    await old.was_killed()
    await until(lambda: sessions.pool.ready == 3)
    spec = await sessions.templates.specify({"template": "data"})
    made = await sessions.create(ME, spec)
    new = world.runtime.launched[-1]
    assert made.sandbox_id == new.sandbox_id
    assert world.runtime.specs[-1].limits.memory == 512 * MIB
    await sessions.templates.delete("data", "me")
    assert [pool["template"] for pool in sessions.pool.listing()] == ["default"]


async def test_a_template_that_is_used_gets_a_pool_of_its_own(
    world: World, sessions: Sessions
) -> None:
    await sessions.templates.apply({"name": "rare"}, "me")
    spec = await sessions.templates.specify({"template": "rare"})
    first = await sessions.create(ME, spec)
    assert first.sandbox_id not in {item.sandbox_id for item in world.runtime.launched[:2]}
    await until(lambda: sessions.pool.ready == 3)
    waiting = world.runtime.launched[-1]
    assert (await sessions.create(ME, spec)).sandbox_id == waiting.sandbox_id


async def test_more_cpus_than_a_running_sandbox_can_get_mean_a_new_one(
    world: World, sessions: Sessions
) -> None:
    made = await sessions.create(ME, SessionSpec(limits=Limits(cpus=8)))
    assert made.sandbox_id not in {item.sandbox_id for item in world.runtime.launched[:2]}
    assert world.runtime.specs[-1].limits.cpus == 8
    fewer = await sessions.create(ME, SessionSpec(limits=Limits(cpus=1)))
    assert fewer.sandbox_id == world.runtime.launched[0].sandbox_id


async def test_a_template_that_changes_while_its_runtime_is_tried_is_kept_as_it_is_then(
    world: World, sessions: Sessions
) -> None:
    for memory in (256, 512):
        recipe = {"name": "two", "pool": {"min": 1}, "limits": {"memory": memory * MIB}}
        await sessions.templates.apply(recipe, "me")
    await sessions.templates.apply({"name": "gone", "pool": {"min": 1}}, "me")
    await sessions.templates.delete("gone", "me")
    await until(lambda: sessions.pool.ready == 3)
    assert [pool["template"] for pool in sessions.pool.listing()] == ["default", "two"]
    waiting = [guest for guest in world.runtime.launched if not guest.killed.is_set()]
    sizes = {spec.sandbox_id: spec.limits.memory for spec in world.runtime.specs}
    assert [sizes[guest.sandbox_id] for guest in waiting].count(512 * MIB) == 1


async def test_nothing_is_kept_ready_once_the_gateway_is_being_stopped(
    world: World, sessions: Sessions
) -> None:
    await sessions.pool.stop()
    made = await sessions.create(ME, SessionSpec())
    assert made.sandbox_id == world.runtime.launched[-1].sandbox_id
    assert sessions.pool.listing() == []
    with pytest.raises(errors.GatewayUnreachable):
        await sessions.warming.set("", "", 1, 1, wait=False)


# What all templates together may have.


@pytest.fixture
def tight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A gateway on which no more than four sandboxes wait."""
    monkeypatch.setattr("k8e.sessions.pool.HEAD_START", 0.001)
    monkeypatch.setattr(shelves, "ROOM_SECONDS", 0.01)
    return World(tmp_path, pool_min=0, pool_max=4, pool_total=4)


def numbers(sessions: Sessions, what: str) -> dict[str, int]:
    return {pool["template"]: pool[what] for pool in sessions.pool.listing()}


def waiting(world: World, made: set[str]) -> list[FakeGuest]:
    """The sandboxes that are there and no session's."""
    alive = [guest for guest in world.runtime.launched if not guest.killed.is_set()]
    return [guest for guest in alive if guest.sandbox_id not in made]


async def test_templates_share_what_may_wait_and_no_session_is_refused_for_it(tight: World) -> None:
    made: set[str] = set()
    async with tight.running() as sessions:
        for name in ("a", "b"):
            await sessions.templates.apply({"name": name}, "me")
            spec = await sessions.templates.specify({"template": name})
            for session in await asyncio.gather(*(sessions.create(ME, spec) for _ in range(5))):
                made.add(session.sandbox_id)
            await until(lambda: sessions.pool.ready == 4)
        await until(lambda: numbers(sessions, "ready") == {"a": 2, "b": 2})
        assert numbers(sessions, "target") == {"a": 2, "b": 2}
        await until(lambda: len(waiting(tight, made)) == 4)
        assert len(made) == 10


async def test_never_more_wait_than_may_though_another_template_wants_some(tight: World) -> None:
    async with tight.running() as sessions:
        await sessions.warming.set("", "", 4, 4, wait=True)
        await sessions.templates.apply({"name": "b", "pool": {"min": 3, "max": 3}}, "me")
        async with asyncio.timeout(PATIENCE):
            while numbers(sessions, "ready") != {"b": 2, "default": 2}:
                assert sessions.pool.ready <= 4
                await asyncio.sleep(0)
        assert numbers(sessions, "target") == {"b": 2, "default": 2}


async def test_room_that_comes_free_is_used_by_those_who_lack_it(tight: World) -> None:
    async with tight.running() as sessions:
        await sessions.warming.set("", "", 4, 4, wait=True)
        await sessions.templates.apply({"name": "b", "pool": {"min": 4, "max": 4}}, "me")
        await until(lambda: numbers(sessions, "ready") == {"b": 2, "default": 2})
        await sessions.warming.set("", "", 0, 0, wait=False)
        await until(lambda: numbers(sessions, "ready") == {"b": 4, "default": 0})


async def test_an_operator_who_asks_for_more_than_may_wait_is_told(tight: World) -> None:
    async with tight.running() as sessions:
        with pytest.raises(errors.InvalidRequest, match="more than all templates together") as told:
            await sessions.warming.set("", "", 5, 5, wait=True)
        assert "K8E_POOL_TOTAL" in told.value.hint


async def test_a_template_that_asks_for_more_than_may_wait_is_refused(tight: World) -> None:
    async with tight.running() as sessions:
        with pytest.raises(errors.InvalidRequest, match="more than all templates together") as told:
            await sessions.templates.apply({"name": "a", "pool": {"min": 5}}, "me")
        assert "K8E_POOL_TOTAL" in told.value.hint
        await sessions.templates.apply({"name": "a", "pool": {"min": 4}}, "me")
        await until(lambda: sessions.pool.ready == 4)


async def test_a_file_that_asks_for_more_than_may_wait_gets_what_there_is_and_the_log_says_so(
    tight: World, caplog: pytest.LogCaptureFixture
) -> None:
    tight.settings.template_dir.mkdir(parents=True, exist_ok=True)
    (tight.settings.template_dir / "a.yaml").write_text("pool: {min: 9}\n", "utf-8")
    async with tight.running() as sessions:
        await until(lambda: sessions.pool.ready == 4)
    assert "template a wants 9 ready sandboxes, all together may have 4" in caplog.text


async def test_without_a_usual_size_only_templates_that_say_how_many_are_started_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k8e.sessions.pool.HEAD_START", 0.001)
    async with World(tmp_path, pool_max=0).running() as sessions:
        await sessions.templates.apply({"name": "a", "pool": {"min": 1}}, "me")
        await until(lambda: numbers(sessions, "ready") == {"a": 1})


async def test_with_no_room_at_all_sessions_start_cold(tmp_path: Path) -> None:
    world = World(tmp_path, pool_min=2, pool_max=4, pool_total=0)
    async with world.running() as sessions:
        await asyncio.gather(*(sessions.create(ME, SessionSpec()) for _ in range(3)))
        assert len(world.runtime.specs) == 3
        assert sessions.pool.ready == 0
