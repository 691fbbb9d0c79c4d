"""Sessions of two gateways on one database, on a runtime without sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from k8e import errors
from k8e.model import Phase, SessionSpec
from k8e.postgres.stores import open_stores
from k8e.sessions.service import Sessions
from tests.sessions.fakes import ME, World

pytestmark = pytest.mark.anyio


class Site(NamedTuple):
    """One gateway, as far as this needs it."""

    world: World
    sessions: Sessions


@pytest.fixture
async def pair(database_url: str, tmp_path: Path) -> AsyncGenerator[list[Site]]:
    async with AsyncExitStack() as stack:
        sites: list[Site] = []
        for name in ("one", "two"):
            folder = tmp_path / name
            folder.mkdir()
            shared = await open_stores(database_url, folder, lease=600.0)
            stack.push_async_callback(shared.close)
            world = World(folder)
            sessions = await stack.enter_async_context(world.running(shared.sessions))
            sites.append(Site(world, sessions))
        yield sites


def launched(pair: list[Site]) -> int:
    return sum(len(site.world.runtime.launched) for site in pair)


async def test_twenty_creations_of_one_request_make_one_session(pair: list[Site]) -> None:
    spec = SessionSpec(request_id="once")
    made = await asyncio.gather(*(pair[n % 2].sessions.create(ME, spec) for n in range(20)))
    assert len({session.session_id for session in made}) == 1
    assert {session.phase for session in made} == {Phase.ACTIVE}
    assert launched(pair) == 1
    with pytest.raises(errors.Conflict, match="different session"):
        await pair[1].sessions.create(ME, SessionSpec(request_id="once", tenant="other"))


async def test_a_standing_session_of_another_gateway_is_named(pair: list[Site]) -> None:
    made = await pair[0].sessions.auto(ME, SessionSpec(tenant="t"))
    with pytest.raises(errors.SessionElsewhere, match=made.session_id):
        await pair[1].sessions.auto(ME, SessionSpec(tenant="t"))
    for use in (
        pair[1].sessions.destroy(ME, made.session_id),
        pair[1].sessions.extend(ME, made.session_id, 60),
        pair[1].sessions.pause(ME, made.session_id),
    ):
        with pytest.raises(errors.SessionElsewhere, match="runs on gateway"):
            await use
    await pair[0].sessions.destroy(ME, made.session_id)
    again = await pair[1].sessions.auto(ME, SessionSpec(tenant="t"))
    assert again.session_id != made.session_id
