"""How many sandboxes start at once: for sessions, and ahead of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from k8e.model import SessionSpec
from tests.sessions.fakes import ME, World, until

TURNS = 100  # of the loop, in which whatever could be started would be


def starting(world: World) -> int:
    return len(world.runtime.specs) - len(world.runtime.launched)


async def settled(world: World) -> int:
    """How many are starting, once no more of them begin."""
    for _ in range(TURNS):
        await asyncio.sleep(0)
    return starting(world)


@pytest.mark.parametrize(("cpus", "most"), [(1, 2), (2, 2), (3, 3), (16, 16)])
async def test_as_many_sandboxes_start_at_once_as_there_are_cpus_and_two_at_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: int, most: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cpus)
    world = World(tmp_path)
    world.runtime.gate.clear()
    async with world.running() as sessions:
        asked = asyncio.gather(*(sessions.create(ME, SessionSpec()) for _ in range(most + 5)))
        await until(lambda: starting(world) == most)
        assert await settled(world) == most
        world.runtime.gate.set()
        made = await asked
    assert len({session.sandbox_id for session in made}) == most + 5


@pytest.mark.parametrize(("cpus", "ahead"), [(1, 1), (2, 1), (4, 3)])
async def test_refilling_leaves_a_cpu_to_a_session_that_comes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: int, ahead: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cpus)
    world = World(tmp_path, pool_max=8)
    world.runtime.gate.clear()
    async with world.running() as sessions:
        filling = asyncio.create_task(sessions.warming.set("", "", 8, 8, wait=True))
        await until(lambda: starting(world) == ahead)
        assert await settled(world) == ahead
        creating = asyncio.create_task(sessions.create(ME, SessionSpec()))
        await until(lambda: starting(world) == ahead + 1)
        world.runtime.gate.set()
        await creating
        assert (await filling)["ready"] == 8
