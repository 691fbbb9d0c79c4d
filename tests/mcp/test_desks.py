"""Desks by themselves, at a gateway that only counts."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from k8e import errors
from k8e.mcp import desks
from k8e.mcp.clients import Client
from k8e.mcp.desks import Desk, LooseDesk

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

    async def create_session(self, **_: float) -> str:
        self.made += 1
        self.asked.set()
        name = f"s{self.made}"
        await self.may.wait()
        self.living.append(name)
        return name

    async def destroy_session(self, session_id: str) -> None:
        self.living.remove(session_id)


@pytest.fixture
def gateway() -> Counting:
    return Counting()


async def nothing(session_id: str) -> str:
    return session_id


async def test_sessions_that_nobody_names_again_do_not_pile_up(gateway: Counting) -> None:
    desk = LooseDesk(cast("Client", gateway))
    first = await desk.within("", nothing)
    kept = await desk.within("", nothing)
    assert await desk.find(kept) == kept
    for _ in range(desks.MAX_UNNAMED + 3):
        await desk.within("", nothing)
    await desk.settled()
    assert len(gateway.living) == desks.MAX_UNNAMED + 1
    assert kept in gateway.living
    assert first not in gateway.living
    with pytest.raises(errors.SessionNotFound):
        await desk.find(first)
    await desk.close()
    assert gateway.living == []


async def test_session_in_use_is_not_destroyed_for_others(gateway: Counting) -> None:
    desk = LooseDesk(cast("Client", gateway))

    async def long(session_id: str) -> bool:
        for _ in range(2 * desks.MAX_UNNAMED):
            await desk.within("", nothing)
        await asyncio.sleep(0)
        return session_id in gateway.living

    assert await desk.within("", long)
    await desk.close()


async def test_reading_without_a_session_makes_none(gateway: Counting) -> None:
    desk = LooseDesk(cast("Client", gateway))
    with pytest.raises(errors.InvalidRequest, match="session_id"):
        await desk.within("", nothing, fresh=False)
    assert gateway.made == 0


@pytest.mark.parametrize("cancelled", [False, True])
async def test_session_that_is_made_while_the_desk_closes_is_not_left(
    gateway: Counting, cancelled: bool
) -> None:
    desk = Desk(cast("Client", gateway))
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
