"""Conversations and tokens of one gateway, without real sandboxes."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from k8e import errors
from k8e.auth import tokens
from k8e.auth.keys import KeyQuota, Keys
from k8e.auth.store import SqliteKeyStore
from k8e.auth.tokens import LEEWAY
from k8e.errors import TokenRefused
from k8e.gateway.conversations import ConversationCalls
from k8e.gateway.stores import Stores
from k8e.gateway.tokens import SandboxTokens, TokenCalls, TokenDesk, grant_of, with_key
from k8e.guest import wire
from k8e.model import Principal, Role, Scope, SessionSpec
from k8e.sessions.service import Sessions
from tests.sessions.fakes import ME, World, until

pytestmark = pytest.mark.anyio


class Site(NamedTuple):
    """A gateway, as far as this needs it."""

    world: World
    sessions: Sessions
    desk: TokenDesk
    renewing: SandboxTokens

    async def open(self, user: str = "ada", **spec: Any) -> dict[str, Any]:
        calls = ConversationCalls(self.desk, self.sessions, "default")
        call = {"conversation_id": "c-1", "user_id": user, "spec": spec or None}
        return await calls.open_conversation(ME, call)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncGenerator[Site]:
    world = World(tmp_path)
    async with world.running() as sessions:
        stores = Stores(*cast("tuple[Any, Any, Any]", (None,) * 3))
        desk = TokenDesk(world.settings, stores, sessions)
        renewing = SandboxTokens(desk, sessions)
        try:
            yield Site(world, sessions, desk, renewing)
        finally:
            await renewing.stop()
            desk.close()


@pytest.mark.parametrize(
    "spec",
    [{"template": "there-is-none"}, {"allowed_hosts": ["http://x"]}, {"lifetime": 1e9}],
    ids=str,
)
async def test_a_sandbox_that_could_not_be_made_binds_nobody(
    site: Site, spec: dict[str, Any]
) -> None:
    with pytest.raises(errors.K8eError):
        await site.open(**spec)
    made = await site.open(user="ben", env={"A": "1"})
    assert made["created"]
    assert (await site.open(user="ben"))["session_id"] == made["session_id"]


async def test_a_conversation_that_was_let_go_while_its_sandbox_was_made_has_one(
    site: Site,
) -> None:
    site.world.runtime.gate.clear()
    slow = asyncio.create_task(site.open())
    await site.world.runtime.asked.wait()
    store = site.desk.conversations._store  # pyright: ignore[reportPrivateUsage]
    known = await store.find(ME.name, "default", "c-1")
    assert known is not None
    await store.remove(known)  # as somebody does who could not make it
    quick = asyncio.create_task(site.open())
    await until(lambda: len(site.world.runtime.specs) == 2)
    site.world.runtime.gate.set()
    opened = await asyncio.gather(slow, quick)
    assert len({item["session_id"] for item in opened}) == 1
    assert [item.session_id for item in site.sessions.alive()] == [opened[0]["session_id"]]


async def test_a_token_is_not_good_for_a_later_sandbox_of_the_same_id(site: Site) -> None:
    spec = SessionSpec(session_id="mine")
    first = await site.sessions.create(ME, spec)
    issued = await site.desk.issue(first)
    await site.desk.recognise(issued.token)
    await site.sessions.destroy(ME, "mine")
    await site.renewing.stop()  # waits for what it has begun
    later = await site.sessions.create(ME, spec)
    with pytest.raises(TokenRefused, match="revoked"):
        await site.desk.recognise(issued.token)
    await site.desk.recognise((await site.desk.issue(later)).token)


async def test_a_token_of_an_earlier_gateway_is_not_good_for_a_later_sandbox(site: Site) -> None:
    session = await site.sessions.create(ME, SessionSpec(session_id="mine"))
    of = site.desk.tokens
    before = tokens.Tokens(
        of.signer,
        of._revocations,  # pyright: ignore[reportPrivateUsage]
        now=lambda: session.created_at - LEEWAY - 1,
    )
    issued = await before.mint(grant_of(session, frozenset({"exec"}), "k8e-rest"))
    with pytest.raises(TokenRefused, match="earlier sandbox"):
        await site.desk.recognise(issued.token)


async def test_a_request_under_way_ends_when_its_token_is_revoked(site: Site) -> None:
    opened = await site.open()
    _, grant = await site.desk.recognise(opened["token"])
    other = replace(grant, sandbox_id="sess-other")
    begun: list[str] = []

    async def wait(of: tokens.Grant) -> None:
        async with site.desk.while_good(of):
            begun.append(of.sandbox_id)
            await asyncio.Event().wait()

    mine, theirs = (asyncio.create_task(wait(of)) for of in (grant, other))
    await until(lambda: len(begun) == 2)
    calls = TokenCalls(site.desk, site.sessions)
    await calls.revoke_tokens(ME, {"session_id": opened["session_id"]})
    with pytest.raises(TokenRefused, match="revoked meanwhile"):
        await mine
    assert not theirs.done()
    theirs.cancel()
    await asyncio.wait([theirs])
    talk = site.world.runtime.launched[0].talk
    await until(lambda: talk.calls)  # the sandbox's own token went with the others
    assert talk.calls[0]["op"] == "token"
    talk.answer(wire.RESULT, wire.pack({}))


@pytest.mark.parametrize("name", ["x" * 129, "a/b", "\ud800"], ids=ascii)
@pytest.mark.parametrize("field", ["conversation_id", "user_id", "tenant"])
async def test_only_what_can_be_a_name_is_revoked(site: Site, field: str, name: str) -> None:
    call = {field: name} if field != "tenant" else {"tenant": name, "user_id": "ada"}
    with pytest.raises(errors.InvalidRequest):
        await TokenCalls(site.desk, site.sessions).revoke_tokens(ME, call)


async def test_a_token_is_renewed_later_where_the_database_fails(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = await site.open()

    async def issue(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(site.desk, "issue", issue)
    session = site.sessions.find(opened["session_id"], ME.name)
    assert session is not None
    before = site.renewing._timers[session.session_id]  # pyright: ignore[reportPrivateUsage]
    await site.renewing._renew(session)  # pyright: ignore[reportPrivateUsage]
    after = site.renewing._timers[session.session_id]  # pyright: ignore[reportPrivateUsage]
    assert after.when() < before.when()
    assert "is not renewed" in caplog.text


async def test_a_token_ends_with_the_api_key_or_with_its_old_secret(tmp_path: Path) -> None:
    store = SqliteKeyStore(tmp_path / "keys.db")
    try:
        known = Keys(store)
        made = await known.create("ci", "1h", ["agent"], KeyQuota(rate=7.0))
        scope = Scope("sess-1", frozenset({"exec"}))
        caller = Principal(made.key.owner, frozenset({Role.AGENT}), scope=scope)
        found = with_key(caller, time.time(), known)
        assert (found.rate, found.scope, found.roles) == (7.0, scope, caller.roles)
        issued_at = time.time()
        await known.rotate("ci")
        with pytest.raises(TokenRefused, match="replaced"):
            with_key(caller, issued_at, known)
        with_key(caller, time.time(), known)
        await known.delete("ci")
        with pytest.raises(TokenRefused, match="ended"):
            with_key(caller, time.time(), known)
        assert with_key(ME, 0, known) is ME
    finally:
        store.close()
