"""A database that restarts under load, or is away for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

from k8e import errors
from k8e.auth.keys import Keys
from k8e.model import Phase
from k8e.postgres import engine as engines
from k8e.postgres import keys as postgres_keys
from k8e.postgres.stores import open_stores
from tests.stores import servers
from tests.stores.contracts import BASE, OTHER
from tests.stores.servers import PostgresServer
from tests.stores.test_sharing import until

pytestmark = pytest.mark.anyio


@pytest.fixture
def own() -> Generator[PostgresServer]:
    """A server that the test may stop."""
    if servers.programs() is None:
        pytest.skip("PostgreSQL is not installed (Debian: postgresql)")
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


async def test_a_restart_under_load_loses_nothing_that_was_confirmed(
    own: PostgresServer, tmp_path: Path
) -> None:
    stores = await open_stores(own.url(own.create()), tmp_path)
    confirmed: list[str] = []
    enough = asyncio.Event()

    async def work(worker: int) -> None:
        for number in range(40):
            name = f"{worker}-{number}"
            session = replace(OTHER, session_id=f"s-{name}", sandbox_id=f"sb-{name}")
            await stores.sessions.insert(session)
            confirmed.append(session.session_id)
            if len(confirmed) > 40:
                enough.set()

    async def restart() -> None:
        await enough.wait()
        await asyncio.to_thread(own.stop, at_once=True)
        await asyncio.to_thread(own.start)

    await asyncio.gather(restart(), *map(work, range(4)))
    assert len(confirmed) == 160
    await stores.close()
    again = await open_stores(own.url("k8e_1"), tmp_path)
    assert {item.session_id for item in again.sessions.unended()} == set(confirmed)
    await again.close()


async def test_while_the_database_is_away_reads_go_on_and_writes_fail_in_time(
    own: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = await open_stores(own.url(own.create()), tmp_path)
    made = await Keys(stores.keys).create("laptop")
    await stores.sessions.insert(BASE)
    await stores.sessions.insert(OTHER)
    monkeypatch.setattr(engines, "PATIENCE", 0.5)
    await asyncio.to_thread(own.stop)
    await until(lambda: not stores.engine.reachable)
    assert stores.sessions.get("sess-a") == BASE
    assert Keys(stores.keys).of_secret(made.secret) == made.key
    late = replace(OTHER, session_id="late", sandbox_id="sb-late")
    with pytest.raises(errors.StoreUnreachable, match="does not answer") as refused:
        await stores.sessions.insert(late)
    assert "not-shown" not in str(refused.value)
    with pytest.raises(errors.StoreUnreachable):
        await stores.approvals.get("approval-1")
    with pytest.raises(errors.StoreUnreachable):
        await stores.sessions.end("sess-a", "ended meanwhile", 5.0)
    monkeypatch.setattr(postgres_keys, "TRUST_SECONDS", 0.0)
    with pytest.raises(errors.StoreUnreachable, match="which keys are good"):
        stores.keys.hashed(b"digest")
    await asyncio.to_thread(own.start)
    await until(lambda: stores.engine.reachable)

    def ended() -> bool:
        found = stores.sessions.get("sess-a")
        return found is not None and found.phase is Phase.ENDED

    await until(ended)  # what has ended is written down when that can be done
    assert [item.session_id for item in stores.sessions.unended()] == ["sess-b"]
    monkeypatch.setattr(engines, "PATIENCE", 60.0)
    await stores.sessions.insert(replace(late, session_id="later", sandbox_id="sb-later"))
    assert stores.sessions.get("late") is None or stores.sessions.get("late") != late
    await stores.close()
