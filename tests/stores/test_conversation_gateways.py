"""Conversations and their tokens on two gateways of one database, without real sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from k8e import errors
from k8e.gateway.conversations import ConversationCalls
from k8e.gateway.stores import Stores
from k8e.gateway.tokens import SandboxTokens, TokenCalls, TokenDesk
from k8e.model import Phase
from k8e.postgres.stores import PostgresStores, open_stores
from k8e.sessions.service import Sessions
from k8e.settings import Settings
from tests.sessions.fakes import ME, World
from tests.stores.servers import PATIENCE

pytestmark = pytest.mark.anyio


class Site(NamedTuple):
    """One gateway, as far as this needs it."""

    world: World
    sessions: Sessions
    desk: TokenDesk
    shared: PostgresStores

    async def open(self, conversation: str = "c-1", user: str = "ada", **more: Any) -> Any:
        calls = ConversationCalls(self.desk, self.sessions, "default")
        call = {"conversation_id": conversation, "user_id": user, **more}
        return await calls.open_conversation(ME, call)


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
            stores = Stores(shared.sessions, shared.keys, shared.approvals, shared)
            settings = Settings(home=folder, data_dir=folder, run_dir=folder)
            desk = TokenDesk(settings, stores, sessions)
            tokens = SandboxTokens(desk, sessions)
            stack.push_async_callback(tokens.stop)
            sites.append(Site(world, sessions, desk, shared))
        yield sites


async def test_twenty_over_two_gateways_make_one_sandbox(pair: list[Site]) -> None:
    opened = await asyncio.gather(*(pair[number % 2].open() for number in range(20)))
    assert len({item["session_id"] for item in opened}) == 1
    assert sum(item["created"] for item in opened) >= 1
    assert sum(len(site.world.runtime.launched) for site in pair) == 1
    assert {item["session"]["phase"] for item in opened} == {Phase.ACTIVE}
    with pytest.raises(errors.Conflict, match="another user's"):
        await pair[1].open(user="eve")


async def test_a_token_of_one_gateway_is_good_and_revoked_on_the_other(pair: list[Site]) -> None:
    opened = await pair[0].open()
    principal, grant = await pair[1].desk.recognise(opened["token"])
    assert principal.name == ME.name
    assert principal.scope is not None
    assert principal.scope.session_id == grant.sandbox_id == opened["session_id"]
    await TokenCalls(pair[0].desk, pair[0].sessions).revoke_tokens(
        ME, {"session_id": opened["session_id"]}
    )
    with pytest.raises(errors.TokenRefused, match="revoked"):
        await pair[1].desk.recognise(opened["token"])


async def test_tokens_end_everywhere_with_their_sandbox(pair: list[Site]) -> None:
    opened = await pair[0].open()
    await pair[0].sessions.destroy(ME, opened["session_id"])
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                await pair[1].desk.recognise(opened["token"])
            except errors.TokenRefused:
                break
            await asyncio.sleep(0)
    again = await pair[1].open()
    assert again["session_id"] != opened["session_id"]
