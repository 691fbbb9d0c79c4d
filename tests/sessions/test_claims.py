"""What becomes of claims: who gets a ready sandbox, and what operators are told of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from k8e import errors, metrics
from k8e.model import Limits, SessionSpec
from k8e.sessions import creation
from k8e.sessions.service import Sessions
from tests.sessions.fakes import ME, World, until

FAILURES = [errors.GuestFailed("no answer"), FileNotFoundError("/proc/1/root"), TimeoutError()]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr("k8e.sessions.pool.HEAD_START", 0.001)
    return World(tmp_path, pool_min=3, pool_max=3)


@pytest.fixture
async def sessions(world: World) -> AsyncGenerator[Sessions]:
    async with world.running() as sessions:
        await until(lambda: sessions.pool.ready == 3)
        yield sessions


class Told:
    """What the metrics count from now on."""

    def __init__(self) -> None:
        self._before = self._read()

    def _read(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for family in text_string_to_metric_families(metrics.render().decode()):
            for sample in family.samples:
                if sample.name in ("k8e_pool_claims_total", "k8e_claim_seconds_count"):
                    found[next(iter(sample.labels.values()))] += int(sample.value)
        return found

    def since(self) -> dict[str, int]:
        """Only what has been counted since."""
        return dict(self._read() - self._before)


def hits_and_misses(sessions: Sessions) -> tuple[int, int]:
    (pool,) = sessions.pool.listing()
    return pool["hits"], pool["misses"]


async def test_hits_and_misses_are_counted_alike_by_the_pool_and_by_the_metrics(
    world: World, sessions: Sessions
) -> None:
    told = Told()
    await asyncio.gather(*(sessions.create(ME, SessionSpec()) for _ in range(5)))
    assert told.since() == {"hit": 3, "miss": 2, "warm": 3, "cold": 2}
    assert hits_and_misses(sessions) == (3, 2)


async def test_a_session_that_no_ready_sandbox_suits_is_a_miss_for_both(
    world: World, sessions: Sessions
) -> None:
    told = Told()
    await sessions.create(ME, SessionSpec(limits=Limits(cpus=8)))
    assert told.since() == {"miss": 1, "cold": 1}
    assert hits_and_misses(sessions) == (0, 1)


async def test_without_a_pool_there_is_neither_a_hit_nor_a_miss(tmp_path: Path) -> None:
    async with World(tmp_path, pool_max=0).running() as sessions:
        told = Told()
        await sessions.create(ME, SessionSpec())
        assert told.since() == {"cold": 1}


async def test_a_child_is_no_claim(world: World, sessions: Sessions) -> None:
    parent = await sessions.create(ME, SessionSpec())
    told = Told()
    await sessions.run_subagent(ME, parent.session_id)
    assert told.since() == {}


@pytest.mark.parametrize("failure", FAILURES)
async def test_after_a_sandbox_that_cannot_be_bound_the_next_ready_one_is_used(
    world: World, sessions: Sessions, failure: Exception
) -> None:
    told = Told()
    bad, good = world.runtime.launched[:2]
    bad.unhealthy = failure
    made = await sessions.create(ME, SessionSpec(env={"A": "1"}))
    assert made.sandbox_id == good.sandbox_id
    assert (bad.killed.is_set(), good.env) == (True, {"A": "1"})
    assert told.since() == {"unhealthy": 1, "hit": 1, "warm": 1}
    assert hits_and_misses(sessions) == (1, 0)
    await until(lambda: sessions.pool.ready == 3)


async def test_a_session_uses_up_no_more_than_two_sandboxes_before_one_is_started_for_it(
    world: World, sessions: Sessions
) -> None:
    told = Told()
    ready = world.runtime.launched[:3]
    for guest in ready:
        guest.unhealthy = errors.GuestFailed("no answer")
    made = await sessions.create(ME, SessionSpec())
    assert made.sandbox_id not in {guest.sandbox_id for guest in ready}
    assert [guest.killed.is_set() for guest in ready] == [True, True, False]
    assert told.since() == {"unhealthy": 2, "miss": 1, "cold": 1}
    assert hits_and_misses(sessions) == (0, 1)


async def test_a_sandbox_that_does_not_answer_costs_the_time_of_all_tries(
    world: World, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(creation, "BIND_SECONDS", 0.01)
    silent, other = world.runtime.launched[:2]
    silent.answers.clear()
    told = Told()
    made = await sessions.create(ME, SessionSpec())
    assert silent.killed.is_set()
    assert made.sandbox_id not in (silent.sandbox_id, other.sandbox_id)
    assert told.since() == {"unhealthy": 1, "miss": 1, "cold": 1}


async def test_a_try_that_fails_is_no_second_claim_for_the_size_of_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k8e.sessions.pool.HEAD_START", 0.001)
    world = World(tmp_path, pool_min=1, pool_max=8)
    async with world.running() as sessions:
        await until(lambda: sessions.pool.ready == 1)
        world.runtime.launched[0].unhealthy = errors.GuestFailed("no answer")
        await sessions.create(ME, SessionSpec())
        assert sessions.pool.listing()[0]["target"] == 1
