"""Several gateways on one database, as their stores see each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from k8e import errors
from k8e.auth.keys import Keys, Unknown
from k8e.auth.store import Key
from k8e.model import Phase, Session, SessionSpec
from k8e.postgres.stores import PostgresStores, open_stores
from k8e.sessions.approval_store import APPROVED
from k8e.sessions.store import Most
from tests.stores.contracts import BASE, OTHER, approval

pytestmark = pytest.mark.anyio
PATIENCE = 60.0
LEASE = 1.0


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds():  # noqa: ASYNC110 - what is awaited is news from another connection
            await asyncio.sleep(0.01)


class Sites:
    """Stores of several gateways, each with a data folder of its own."""

    def __init__(self, url: str, folder: Path, stack: AsyncExitStack) -> None:
        self._url = url
        self._folder = folder
        self._stack = stack

    async def open(self, name: str, lease: float = 60.0) -> PostgresStores:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        stores = await open_stores(self._url, folder, lease=lease)
        self._stack.push_async_callback(stores.close)
        return stores


@pytest.fixture
async def sites(database_url: str, tmp_path: Path) -> AsyncGenerator[Sites]:
    async with AsyncExitStack() as stack:
        yield Sites(database_url, tmp_path, stack)


async def test_a_session_is_known_everywhere_and_says_where_it_is(sites: Sites) -> None:
    one, two = await sites.open("one"), await sites.open("two")
    await one.gateways.announce("10.0.0.1:50051")
    await one.sessions.insert(BASE)
    await until(lambda: two.sessions.get("sess-a"))
    assert two.sessions.get("sess-a") == BASE
    assert two.sessions.unended() == [], "it is not this gateway's to adopt"
    assert [item.session_id for item in two.sessions.others()] == ["sess-a"]
    place = two.sessions.elsewhere(BASE)
    assert place is not None
    await until(lambda: two.gateways.elsewhere(one.engine.gateway_id).address)
    found = two.sessions.elsewhere(BASE)
    assert found is not None
    assert found.address == "10.0.0.1:50051"
    await one.sessions.end("sess-a", "done", 5.0)
    await until(lambda: two.sessions.of_owner("me") == [])


async def test_of_twenty_claims_over_two_gateways_one_stands(sites: Sites) -> None:
    both = await sites.open("one"), await sites.open("two")
    wanted = [replace(BASE, session_id=f"s-{n}", sandbox_id=f"sb-{n}") for n in range(20)]

    async def claim(number: int, session: Session) -> str:
        store = both[number % 2].sessions
        try:
            await store.insert(session)
        except errors.Conflict:
            winner = store.find_request("me", "once")
            assert winner is not None, "who lost knows who won"
            found = await store.settled(winner)
            # A session of this gateway's own is waited for by its service, not by the store.
            assert found.phase is Phase.ACTIVE or store.elsewhere(winner) is None
            return found.session_id
        await store.activate(session)
        return session.session_id

    found = await asyncio.gather(*(claim(*item) for item in enumerate(wanted)))
    assert len(set(found)) == 1


async def test_limits_hold_over_all_gateways(sites: Sites) -> None:
    both = await sites.open("one"), await sites.open("two")
    for stores in both:
        stores.sessions.most_of = lambda _: Most(principal=5, tenant=3)

    async def make(number: int) -> bool:
        ids = {"session_id": f"s-{number}", "sandbox_id": f"sb-{number}"}
        spec = SessionSpec(tenant="a" if number < 10 else "b")
        try:
            await both[number % 2].sessions.insert(replace(OTHER, **ids, spec=spec))
        except errors.LimitExceeded:
            return False
        return True

    assert sum(await asyncio.gather(*map(make, range(10)))) == 3
    assert sum(await asyncio.gather(*map(make, range(10, 20)))) == 2


async def test_a_deleted_key_is_refused_on_every_gateway_at_once(sites: Sites) -> None:
    one, two = await sites.open("one"), await sites.open("two")
    here, there = Keys(one.keys), Keys(two.keys)
    ended: list[Key] = []
    two.keys.on_end.append(ended.append)
    made = await here.create("laptop")
    other = await here.create("other")
    await until(lambda: two.keys.named("laptop") and two.keys.named("other"))
    assert there.of_secret(made.secret) == made.key
    begun = asyncio.Event()

    async def call() -> None:
        async with there.while_valid(made.key):
            begun.set()
            await asyncio.Event().wait()

    running = asyncio.create_task(call())
    await begun.wait()
    await here.delete("laptop")
    with pytest.raises(Unknown, match="deleted"):
        await asyncio.wait_for(running, PATIENCE)
    with pytest.raises(Unknown, match="deleted"):
        there.of_secret(made.secret)
    assert [bool(key.revoked_at) for key in ended] == [True]
    new = await here.rotate("other")
    await until(lambda: len(ended) == 2)
    with pytest.raises(Unknown, match="not known"):
        there.of_secret(other.secret)
    assert there.of_secret(new.secret).name == "other"


async def test_a_decision_on_one_gateway_wakes_who_waits_on_another(sites: Sites) -> None:
    one, two = await sites.open("one"), await sites.open("two")
    changed: list[str] = []
    one.approvals.on_change.append(changed.append)
    made = approval()
    await one.approvals.insert(made)
    now = made.deadline - 100
    assert await two.approvals.decide(replace(made, status=APPROVED), now)
    await until(lambda: changed == [made.approval_id])
    assert await one.approvals.use(made.approval_id, now)
    assert not await two.approvals.use(made.approval_id, now)


async def test_the_sessions_of_a_gateway_that_is_gone_are_ended_and_say_so(sites: Sites) -> None:
    one, two = await sites.open("one", LEASE), await sites.open("two", LEASE)
    await one.sessions.insert(BASE)
    await two.sessions.insert(OTHER)
    lost: list[Session] = []
    one.sessions.on_lost.append(lost.append)
    mine = two.engine.gateway_id
    await one.gateways.stop()  # it lives, and says so no more

    def reason() -> str:
        found = two.sessions.get("sess-a")
        return found.ended_reason if found is not None else ""

    await until(reason)
    assert "did not renew its lease of 1 s" in reason()
    await until(lambda: lost)
    assert [item.session_id for item in lost] == ["sess-a"], "it learns of its loss"
    assert [item.session_id for item in two.sessions.unended()] == ["sess-b"]
    await until(lambda: [row.gateway_id for row in two.gateways.living()] == [mine])


async def test_a_gateway_that_comes_back_in_time_finds_its_sessions(
    database_url: str, tmp_path: Path
) -> None:
    stores = await open_stores(database_url, tmp_path)
    await stores.sessions.insert(BASE)
    await stores.sessions.activate(BASE)
    await stores.close()
    again = await open_stores(database_url, tmp_path)
    assert again.sessions.unended() == [replace(BASE, phase=Phase.ACTIVE)]
    await again.close()
