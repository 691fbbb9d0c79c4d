"""How many sessions a principal and a tenant may have, and how quickly they may make them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from k8e import errors, settings
from k8e.model import Principal, SessionSpec
from k8e.sessions.quotas import MOST_BUCKETS, PERIOD, QuotaHolder, Quotas
from tests.sessions.fakes import ME, OTHER, World


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def quotas(clock: Clock | None = None, **values: int) -> Quotas:
    none: dict[str, Any] = {
        "min_free_disk": 0,
        "max_sessions_per_principal": 0,
        "max_sessions_per_tenant": 0,
        "max_creations_per_principal": 0,
        "max_creations_per_tenant": 0,
    }
    none["data_dir"] = Path("/")
    return Quotas(settings.load({}, **(none | values)), clock or Clock())


def make(made: Quotas, times: int, principal: Principal = ME, tenant: str = "a") -> None:
    for _ in range(times):
        made.admit(principal, tenant, [])


def test_a_principal_cannot_have_more_sessions_than_its_limit_whatever_it_calls_its_tenants():
    alive = [QuotaHolder("me", "a"), QuotaHolder("me", "b"), QuotaHolder("somebody-else", "a")]
    made = quotas(max_sessions_per_principal=2)
    with pytest.raises(errors.LimitExceeded) as caught:
        made.admit(ME, "c", alive)
    told = "principal 'me' has 2 sessions; the limit is 2 (K8E_MAX_SESSIONS_PER_PRINCIPAL)"
    assert caught.value.message == told
    assert "raise K8E_MAX_SESSIONS_PER_PRINCIPAL" in caught.value.hint
    made.admit(OTHER, "a", alive)


def test_a_tenant_cannot_have_more_sessions_than_its_limit_and_another_one_can():
    alive = [QuotaHolder("me", "a"), QuotaHolder("me", "a"), QuotaHolder("somebody-else", "b")]
    made = quotas(max_sessions_per_tenant=2)
    with pytest.raises(errors.LimitExceeded, match="tenant 'a' has 2 sessions; the limit is 2"):
        made.admit(ME, "a", alive)
    made.admit(ME, "b", alive)
    made.admit(OTHER, "a", alive)  # somebody else's tenant of the same name is another one


@pytest.mark.parametrize("whose", ["principal", "tenant"])
def test_creations_are_limited_per_minute_and_come_back_evenly(whose: str):
    clock = Clock()
    made = quotas(clock, **{f"max_creations_per_{whose}": 6})
    make(made, 6)
    with pytest.raises(errors.LimitExceeded) as caught:
        make(made, 1)
    assert f"K8E_MAX_CREATIONS_PER_{whose.upper()}" in caught.value.message
    assert "try again in 10 s" in caught.value.hint
    clock.now += PERIOD / 6
    make(made, 1)
    with pytest.raises(errors.LimitExceeded):
        make(made, 1)
    clock.now += 100 * PERIOD
    make(made, 6)
    with pytest.raises(errors.LimitExceeded):
        make(made, 1)


def test_a_refused_creation_counts_for_nobody():
    clock = Clock()
    made = quotas(clock, max_creations_per_principal=10, max_creations_per_tenant=2)
    make(made, 2)
    for _ in range(20):
        with pytest.raises(errors.LimitExceeded):
            make(made, 1)
    make(made, 2, tenant="b")


def test_a_principal_with_a_quota_of_its_own_has_that_one():
    made = quotas(max_sessions_per_principal=100, max_creations_per_principal=1)
    made.sessions_of = lambda owner: 1 if owner == ME.name else 0
    shown = Principal(ME.name, label="key:laptop")
    with pytest.raises(errors.LimitExceeded) as caught:
        made.admit(shown, "a", [QuotaHolder("me", "x")])
    told = "principal 'key:laptop' has 1 sessions; the limit is 1 (--max-sessions of its key)"
    assert caught.value.message == told
    assert caught.value.hint.endswith("make a key that may have more")
    for who in (ME, OTHER):
        make(made, 1, who)
        with pytest.raises(errors.LimitExceeded, match="within a minute"):
            make(made, 1, who)


def test_who_made_nothing_for_a_while_is_forgotten():
    clock = Clock()
    made = quotas(clock, max_creations_per_tenant=5)
    for number in range(MOST_BUCKETS):
        make(made, 1, tenant=f"t{number}")
    clock.now += PERIOD
    make(made, 1, tenant="one-more")
    assert len(made._buckets) == 1  # pyright: ignore[reportPrivateUsage]


async def test_sessions_that_are_being_made_count_too(tmp_path: Path):
    async with World(tmp_path, max_sessions_per_tenant=2).running() as sessions:
        making = [sessions.create(ME, SessionSpec()) for _ in range(5)]
        done = await asyncio.gather(*making, return_exceptions=True)
        refused = [item for item in done if isinstance(item, errors.LimitExceeded)]
        assert len(refused) == 3
        other = await sessions.create(ME, SessionSpec(tenant="other"))
        assert other.spec.tenant == "other"
        await sessions.destroy(ME, sessions.listing(ME, tenant="default")[0].session_id)
        await sessions.create(ME, SessionSpec())


async def test_a_session_that_was_just_made_counts_once(tmp_path: Path):
    world = World(tmp_path, max_sessions_per_tenant=2, max_sessions=2)
    async with world.running() as sessions:
        second: list[asyncio.Task[Any]] = []

        def seen(session: Any, kind: str, *_: Any) -> None:
            if kind == "session.created" and not second:
                assert sessions.count() == 1
                second.append(asyncio.create_task(sessions.create(ME, SessionSpec())))

        sessions.events.observers.append(seen)
        await sessions.create(ME, SessionSpec())
        await second[0]
        assert sessions.count() == 2


async def test_a_request_that_is_repeated_is_one_creation(tmp_path: Path):
    async with World(tmp_path, max_creations_per_principal=1).running() as sessions:
        spec = SessionSpec(request_id="once")
        first = await sessions.create(ME, spec)
        assert (await sessions.create(ME, spec)).session_id == first.session_id
        with pytest.raises(errors.LimitExceeded, match="K8E_MAX_CREATIONS_PER_PRINCIPAL"):
            await sessions.create(ME, SessionSpec())


async def test_sub_agents_count_as_sessions_of_their_tenant(tmp_path: Path):
    async with World(tmp_path, max_sessions_per_tenant=2).running() as sessions:
        parent = await sessions.create(ME, SessionSpec())
        await sessions.run_subagent(ME, parent.session_id)
        with pytest.raises(errors.LimitExceeded, match="K8E_MAX_SESSIONS_PER_TENANT"):
            await sessions.run_subagent(ME, parent.session_id)


def test_no_session_is_made_on_a_disk_that_is_nearly_full():
    with pytest.raises(errors.LimitExceeded, match="K8E_MIN_FREE_DISK") as caught:
        make(quotas(min_free_disk=1 << 60), 1)
    assert "new sessions need 1099511627776 MiB" in caught.value.message
    make(quotas(min_free_disk=1), 1)
