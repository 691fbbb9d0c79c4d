"""Desks by themselves, at a gateway that only counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import cast

import pytest

from k8e import errors
from k8e.mcp import connection
from k8e.mcp.client import ToolClient
from k8e.mcp.connection import ClientDesks, ConnectionSessions

pytestmark = pytest.mark.anyio


class Counting:
    """Makes names of sessions, at once or when it is let."""

    tenant_id = ""

    def __init__(self) -> None:
        self.made = 0
        self.living: list[str] = []
        self.asked = asyncio.Event()
        self.may = asyncio.Event()
        self.may.set()
        self.ended = asyncio.Queue[str]()

    async def create_session(self, **_: float) -> str:
        self.made += 1
        self.asked.set()
        name = f"s{self.made}"
        await self.may.wait()
        self.living.append(name)
        return name

    async def destroy_session(self, session_id: str) -> None:
        self.living.remove(session_id)
        self.ended.put_nowait(session_id)


@pytest.fixture
def gateway() -> Counting:
    return Counting()


async def nothing(session_id: str) -> str:
    return session_id


@pytest.fixture
async def desks_of_clients(gateway: Counting) -> AsyncGenerator[ClientDesks]:
    held = ClientDesks(cast("ToolClient", gateway))
    yield held
    await held.close()
    assert gateway.living == []


async def own(held: ClientDesks, name: str) -> str:
    """The session in which a call of a client runs that names none."""
    with held.use(name) as desk:
        return await desk.within("", nothing)


async def test_client_without_a_connection_keeps_one_session(
    gateway: Counting, desks_of_clients: ClientDesks
) -> None:
    first = await own(desks_of_clients, "one")
    assert await own(desks_of_clients, "one") == first
    other = await own(desks_of_clients, "two")
    nameless = await own(desks_of_clients, "")
    assert await own(desks_of_clients, "") == nameless
    assert len({first, other, nameless}) == gateway.made == 3
    with desks_of_clients.use("two") as desk, pytest.raises(errors.SessionNotFound):
        await desk.find(first)


async def test_calls_of_one_client_at_once_make_one_session(
    gateway: Counting, desks_of_clients: ClientDesks
) -> None:
    found = await asyncio.gather(*(own(desks_of_clients, "one") for _ in range(20)))
    assert (set(found), gateway.made) == ({"s1"}, 1)


async def test_clients_do_not_pile_up(gateway: Counting, desks_of_clients: ClientDesks) -> None:
    first, second = [await own(desks_of_clients, name) for name in ("first", "second")]
    for number in range(connection.MAX_CLIENTS - 1):
        assert await own(desks_of_clients, "first") == first
        await own(desks_of_clients, f"{number}" * 10_000)
    async with asyncio.timeout(5):
        assert await gateway.ended.get() == second
    assert len(gateway.living) == connection.MAX_CLIENTS
    assert first in gateway.living


async def test_names_that_only_differ_late_are_different_clients(
    desks_of_clients: ClientDesks,
) -> None:
    long = "n" * connection.MAX_NAME
    found = [await own(desks_of_clients, name) for name in (long, long + "a", long + "b")]
    assert len(set(found)) == 3


async def test_session_in_use_is_not_destroyed_for_others(
    gateway: Counting, desks_of_clients: ClientDesks
) -> None:
    async def long(session_id: str) -> bool:
        for number in range(2 * connection.MAX_CLIENTS):
            await own(desks_of_clients, str(number))
        await asyncio.sleep(0)
        return session_id in gateway.living

    with desks_of_clients.use("busy") as desk:
        assert await desk.within("", long)


async def test_client_that_stays_away_loses_its_sessions(
    gateway: Counting, desks_of_clients: ClientDesks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CLIENT_SECONDS", 0.01)
    with desks_of_clients.use("one") as desk:
        await desk.within("", nothing)
        await desk.made(gateway.create_session())
        assert len(gateway.living) == 2
    async with asyncio.timeout(5):
        assert [await gateway.ended.get() for _ in range(2)] == ["s1", "s2"]
    monkeypatch.undo()
    assert await own(desks_of_clients, "one") == "s3"


@pytest.mark.parametrize("cancelled", [False, True])
async def test_session_that_is_made_while_the_desk_closes_is_not_left(
    gateway: Counting, cancelled: bool
) -> None:
    desk = ConnectionSessions(cast("ToolClient", gateway))
    gateway.may.clear()
    working = asyncio.create_task(desk.within("", nothing))
    async with asyncio.timeout(5):
        await gateway.asked.wait()
    if cancelled:
        working.cancel()
    closing = asyncio.create_task(desk.close())
    await asyncio.sleep(0)
    gateway.may.set()
    async with asyncio.timeout(5):
        await closing
    with pytest.raises(asyncio.CancelledError if cancelled else errors.Conflict):
        await working
    assert (gateway.made, gateway.living) == (1, [])
