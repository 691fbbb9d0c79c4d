"""What every store of signing keys and revocations does; test classes give it a ``store``."""

from __future__ import annotations

import asyncio
from typing import Protocol

from k8e.auth.token_store import RevocationStore, SigningKey, SigningKeyStore


class TokenStore(SigningKeyStore, RevocationStore, Protocol):
    """Both, as one object."""


def key(kid: str, made_at: float = 1.0) -> SigningKey:
    return SigningKey(kid, kid.encode().ljust(32, b"\0"), made_at, made_at + 5)


class TokenStoreContract:
    """Derive from this, and define a fixture ``store``."""

    async def test_keys_come_back_in_the_order_of_their_making(self, store: TokenStore) -> None:
        assert await store.keys() == []
        assert await store.add(key("b"), "")
        assert await store.add(key("a", 2.0), "b")
        assert await store.keys() == [key("b"), key("a", 2.0)]
        await store.remove("b")
        assert await store.keys() == [key("a", 2.0)]
        await store.remove("b")

    async def test_of_many_that_follow_a_key_one_is_added(self, store: TokenStore) -> None:
        first = await asyncio.gather(*(store.add(key(f"a{n}"), "") for n in range(8)))
        assert sum(first) == 1
        newest = (await store.keys())[-1].kid
        second = await asyncio.gather(*(store.add(key(f"b{n}"), newest) for n in range(8)))
        assert sum(second) == 1
        assert not await store.add(key("c"), "")
        assert len(await store.keys()) == 2

    async def test_a_revocation_is_seen_by_its_subject(self, store: TokenStore) -> None:
        assert await store.issued_before(["token 1", "user a"]) == 0
        await store.revoke("user a", issued_before=10.5, until=100)
        assert await store.issued_before(["token 1", "user a"]) == 10.5
        assert await store.issued_before(["user b"]) == 0
        await store.revoke("token 1", issued_before=20, until=100)
        assert await store.issued_before(["token 1", "user a"]) == 20

    async def test_the_later_of_two_revocations_holds(self, store: TokenStore) -> None:
        await store.revoke("a", issued_before=20, until=50)
        await store.revoke("a", issued_before=10, until=100)
        assert await store.issued_before(["a"]) == 20
        await store.forget(60)
        assert await store.issued_before(["a"]) == 20
        await store.forget(101)
        assert await store.issued_before(["a"]) == 0

    async def test_a_subject_that_is_no_text_was_never_revoked(self, store: TokenStore) -> None:
        assert await store.issued_before(["\ud800"]) == 0
