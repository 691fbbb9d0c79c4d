"""Conversations: which session is whose sandbox, and the store that says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

from k8e import errors
from k8e.model import Phase, Session, SessionSpec
from k8e.sessions import conversations
from k8e.sessions.conversations import Conversation, Conversations, SqliteConversations
from tests.sessions.conversation_stores import ConversationStoreContract

pytestmark = pytest.mark.anyio
LIVE = Session("x", "key:a", SessionSpec(), "gvisor", "sb-x", Phase.ACTIVE, 0, 0)


@pytest.fixture
def store(tmp_path: Path) -> Generator[SqliteConversations]:
    store = SqliteConversations(tmp_path / "conversations.db")
    yield store
    store.close()


class TestSqliteConversations(ConversationStoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Generator[SqliteConversations]:
        store = SqliteConversations(tmp_path / "conversations.db")
        yield store
        store.close()


class Table:
    """The sessions that there are, by id."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}

    def add(self, session_id: str, phase: Phase = Phase.ACTIVE) -> None:
        self.sessions[session_id] = replace(LIVE, session_id=session_id, phase=phase)

    def find(self, session_id: str, owner: str) -> Session | None:
        return self.sessions.get(session_id)


async def test_twenty_who_ask_at_once_get_one_session(store: SqliteConversations) -> None:
    rules = Conversations(store, Table().find)
    asked = [rules.session_id("key:a", "default", "c", "ann") for _ in range(20)]
    assert len(set(await asyncio.gather(*asked))) == 1


async def test_a_conversation_gets_another_session_when_its_own_has_ended(
    store: SqliteConversations,
) -> None:
    table = Table()
    rules = Conversations(store, table.find)
    first = await rules.session_id("key:a", "default", "c", "ann")
    for phase in (Phase.CREATING, Phase.ACTIVE, Phase.PAUSED):
        table.add(first, phase)
        assert await rules.session_id("key:a", "default", "c", "ann") == first
    table.add(first, Phase.ENDED)
    asked = [rules.session_id("key:a", "default", "c", "ben", "other") for _ in range(20)]
    second = set(await asyncio.gather(*asked))
    assert (len(second), first in second) == (1, False)


async def test_a_session_is_never_another_users(store: SqliteConversations) -> None:
    rules = Conversations(store, Table().find)
    await rules.session_id("key:a", "default", "c", "ann", "fast")
    with pytest.raises(errors.Conflict, match="another user's"):
        await rules.session_id("key:a", "default", "c", "ben")
    with pytest.raises(errors.Conflict, match="asked to be different"):
        await rules.session_id("key:a", "default", "c", "ann", "slow")
    assert await rules.session_id("key:a", "default", "c", "ann")
    assert await rules.session_id("key:a", "other", "c", "ben"), "of another tenant"


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a b", "-a", "x" * 129, "\ud800", "a\n"])
async def test_an_id_can_name_a_folder(store: SqliteConversations, name: str) -> None:
    rules = Conversations(store, Table().find)
    with pytest.raises(errors.InvalidRequest, match="conversation_id"):
        await rules.session_id("key:a", "default", name, "ann")
    with pytest.raises(errors.InvalidRequest, match="user_id"):
        await rules.session_id("key:a", "default", "c", name)
    assert await rules.session_id("key:a", "default", "C01:17.5_a@b+c=~-", "x" * 128)


async def test_conversations_without_a_sandbox_are_forgotten_after_a_while(
    store: SqliteConversations,
) -> None:
    table = Table()
    table.add("sess-live")
    table.add("sess-over", Phase.ENDED)
    old = time.time() - conversations.KEEP_SECONDS - 1
    for name in ("live", "over", "gone"):
        await store.claim(Conversation("key:a", "default", name, "u", f"sess-{name}", "", old))
    rules = Conversations(store, table.find)
    for number in range(conversations.SWEEP_EVERY + 1):
        await rules.session_id("key:a", "default", f"new-{number}", "ann")
    assert await store.find("key:a", "default", "live") is not None
    assert await store.find("key:a", "default", "over") is None
    assert await store.find("key:a", "default", "gone") is None
