"""Calls about keys and the approver whose caller goes away, or is what they are about."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from k8e import errors
from k8e.audit.act import AuditCaller
from k8e.audit.rows import Filter
from k8e.audit.trail import Trail
from k8e.auth import keys
from k8e.auth.keys import Keys
from k8e.auth.store import SqliteKeyStore
from k8e.gateway import audit
from k8e.gateway.service import Gateway
from k8e.model import Principal, Role, SessionSpec
from k8e.sessions.approval_store import SqliteApprovalStore
from k8e.sessions.approvals import Approvals
from tests.sessions.fakes import World

LOCAL = Principal("local", frozenset(Role))
PATIENCE = 60.0


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncGenerator[Gateway]:
    world, known = World(tmp_path), SqliteKeyStore(tmp_path / "keys.db")
    approvals = SqliteApprovalStore(tmp_path / "approvals.db")
    trail = Trail(tmp_path / "audit", max_bytes=1 << 20, max_age=0)
    async with trail.running(), world.running() as sessions:
        made = Gateway(world.settings, sessions, Approvals(approvals, sessions), Keys(known))
        audit.attach(made, trail)
        yield made
    approvals.close()
    known.close()


async def ask(
    gateway: Gateway, principal: Principal, operation: str, **call: Any
) -> dict[str, Any]:
    caller = AuditCaller(principal.name, "socket")
    return await gateway.operations.dispatch(caller, principal, operation, call)


async def rows(gateway: Gateway, action: str) -> list[dict[str, Any]]:
    trail = gateway.operations.trail
    assert trail is not None
    page = await trail.newest(Filter(action=action), 100)
    return [json.loads(line)["detail"] for line in page.lines]


async def test_every_key_of_an_approver_goes_though_the_caller_leaves_at_once(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [
        await gateway.keys.create(f"boss-{number}", "", ["approver", "agent"])
        for number in range(3)
    ]
    await gateway.keys.create("agent")
    for item in made:
        await gateway.sessions.create(keys.principal(item.key), SessionSpec())
    evict, begun, go_on = gateway.sessions.evictions.evict, asyncio.Event(), asyncio.Event()

    async def slowly(owner: str, reason: str) -> int:
        begun.set()
        await go_on.wait()
        return await evict(owner, reason)

    monkeypatch.setattr(gateway.sessions.evictions, "evict", slowly)
    call = {"secret": "correct horse battery"}
    task = asyncio.create_task(ask(gateway, LOCAL, "set_approver", **call))
    await asyncio.wait_for(begun.wait(), PATIENCE)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [key.name for key, _ in gateway.keys.listing()] == ["agent"]
    assert [item["name"] for item in await rows(gateway, "key.deleted")] == [
        "boss-0",
        "boss-1",
        "boss-2",
    ]
    assert await rows(gateway, "approver.set") == [{"left": True}]
    ended = asyncio.Event()
    gateway.sessions.on_end.append(lambda _: ended.set() if not gateway.sessions.count() else None)
    go_on.set()
    await asyncio.wait_for(ended.wait(), PATIENCE)


async def test_keys_that_go_with_the_first_secret_are_named(gateway: Gateway) -> None:
    await gateway.keys.create("boss", "", ["approver"])
    told = await ask(gateway, LOCAL, "set_approver", secret="correct horse battery")
    assert told == {"configured": True, "keys_deleted": ["boss"]}
    assert await rows(gateway, "approver.set") == [{"keys_deleted": ["boss"]}]


async def test_a_key_does_not_rotate_itself_and_lose_its_secret(gateway: Gateway) -> None:
    made = await gateway.keys.create("boss", "", ["admin"])
    other = await gateway.keys.create("other", "", ["admin"])
    with pytest.raises(errors.Denied, match="cannot rotate itself"):
        await ask(gateway, keys.principal(made.key), "rotate_api_key", name="boss")
    assert gateway.keys.of_secret(made.secret) == made.key
    told = await ask(gateway, keys.principal(other.key), "rotate_api_key", name="boss")
    assert gateway.keys.of_secret(told["key"]).name == "boss"
