"""What every store of conversations does; a class of tests that gives it a ``store`` runs this."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from k8e.sessions.conversations import Conversation, ConversationStore

CHAT = Conversation("key:a", "default", "c-1", "ann", "sess-1", "", 1_790_000_000.0)


class ConversationStoreContract:
    """Derive from this, and define a fixture ``store``."""

    async def test_the_first_claim_stands(self, store: ConversationStore) -> None:
        assert await store.find(CHAT.owner, CHAT.tenant, CHAT.conversation_id) is None
        assert await store.claim(CHAT) == CHAT
        late = replace(CHAT, session_id="sess-2", user_id="ben", options="x", claimed_at=1.0)
        assert await store.claim(late) == CHAT
        assert await store.find(CHAT.owner, CHAT.tenant, CHAT.conversation_id) == CHAT

    async def test_of_many_claims_at_once_one_stands(self, store: ConversationStore) -> None:
        wanted = [replace(CHAT, session_id=f"sess-{number}") for number in range(20)]
        found = await asyncio.gather(*map(store.claim, wanted))
        assert len({item.session_id for item in found}) == 1
        swaps = [replace(CHAT, session_id=f"next-{number}") for number in range(20)]
        before = found[0].session_id
        found = await asyncio.gather(*(store.claim(item, before) for item in swaps))
        assert len({item.session_id for item in found}) == 1
        assert found[0].session_id.startswith("next-")

    async def test_another_session_takes_the_place_of_the_one_that_is_named(
        self, store: ConversationStore
    ) -> None:
        await store.claim(CHAT)
        after = replace(CHAT, session_id="sess-2", user_id="ben", options="x", claimed_at=2.0)
        assert await store.claim(after, "sess-1") == after
        assert await store.claim(replace(CHAT, session_id="sess-3"), "sess-1") == after
        assert await store.find(CHAT.owner, CHAT.tenant, CHAT.conversation_id) == after

    async def test_a_swap_of_what_was_forgotten_is_a_first_claim(
        self, store: ConversationStore
    ) -> None:
        assert await store.claim(CHAT, "sess-0") == CHAT

    async def test_owners_and_tenants_have_conversations_of_their_own(
        self, store: ConversationStore
    ) -> None:
        others = [
            replace(CHAT, owner="key:b", session_id="sess-2"),
            replace(CHAT, tenant="other", session_id="sess-3"),
            replace(CHAT, conversation_id="C-1", session_id="sess-4"),
        ]
        for item in (CHAT, *others):
            assert await store.claim(item) == item
        await store.evict("key:a")
        assert await store.find("key:a", "default", "c-1") is None
        assert await store.find("key:a", "other", "c-1") is None
        assert await store.find("key:b", "default", "c-1") == others[0]

    async def test_a_conversation_is_forgotten_only_with_its_session(
        self, store: ConversationStore
    ) -> None:
        await store.claim(CHAT)
        await store.remove(replace(CHAT, session_id="sess-0"))
        assert await store.find(CHAT.owner, CHAT.tenant, CHAT.conversation_id) == CHAT
        await store.remove(CHAT)
        assert await store.find(CHAT.owner, CHAT.tenant, CHAT.conversation_id) is None

    async def test_the_oldest_come_first(self, store: ConversationStore) -> None:
        rows = [
            replace(CHAT, conversation_id=f"c-{age}", session_id=f"sess-{age}", claimed_at=age)
            for age in (3.0, 1.0, 2.0, 4.0)
        ]
        for item in rows:
            await store.claim(item)
        assert await store.oldest(4.0, 2) == [rows[1], rows[2]]
        assert await store.oldest(4.0, 9) == [rows[1], rows[2], rows[0]]

    async def test_what_is_no_text_is_nowhere(self, store: ConversationStore) -> None:
        assert await store.find("key:a", "default", "\ud800") is None
