"""A session's id is free when the session has ended, for everybody; nothing comes with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from pathlib import Path

import pytest

from k8e import errors
from k8e.egress.policy import Policy
from k8e.guest import wire
from k8e.model import Phase, Principal, Session, SessionSpec
from k8e.sessions import service
from k8e.sessions.approval_store import SqliteApprovalStore
from k8e.sessions.approvals import MAX_PENDING, Approvals
from k8e.sessions.service import Sessions
from tests.sessions.fakes import ME, OTHER, World, until

SPEC = SessionSpec(session_id="chosen")


async def told(sessions: Sessions, session: Session) -> list[str]:
    """The kinds of events of a session, and the commands that were run."""
    lines, _ = await sessions.events.read(session)
    found = [json.loads(line) for line in lines]
    return [item.get("command") or item["kind"] for item in found]


def run(sessions: Sessions, principal: Principal, command: str) -> None:
    call = {"op": "exec", "argv": ["/bin/sh", "-c", command]}
    assert sessions.open_now(principal, "chosen", call, lambda kind, body: None) is not None


@pytest.mark.parametrize("next_owner", [ME, OTHER], ids=["its owner", "somebody else"])
async def test_the_id_of_an_ended_session_is_free(
    sessions: Sessions, next_owner: Principal
) -> None:
    first = await sessions.create(ME, SPEC)
    await sessions.destroy(ME, "chosen")
    second = await sessions.create(next_owner, SPEC)
    assert second.session_id == first.session_id
    assert second.sandbox_id != first.sandbox_id
    assert sessions.get(next_owner, "chosen") == second


async def test_the_next_owner_of_an_id_learns_nothing_of_the_last(sessions: Sessions) -> None:
    await sessions.create(ME, SPEC)
    run(sessions, ME, "cat secrets")
    await sessions.destroy(ME, "chosen")
    await sessions.create(OTHER, SPEC)
    run(sessions, OTHER, "ls")
    theirs = await told(sessions, sessions.get(OTHER, "chosen"))
    assert theirs == ["session.created", "ls"]
    assert len(sessions.listing(OTHER, ended=True)) == 1


async def test_the_last_owner_of_an_id_keeps_what_was_theirs_and_gets_no_more(
    sessions: Sessions,
) -> None:
    first = await sessions.create(ME, SPEC)
    run(sessions, ME, "cat secrets")
    await sessions.destroy(ME, "chosen")
    second = await sessions.create(OTHER, SPEC)
    run(sessions, OTHER, "ls")
    mine = sessions.get(ME, "chosen")
    assert (mine.phase, mine.sandbox_id) == (Phase.ENDED, first.sandbox_id)
    assert "cat secrets" in await told(sessions, mine)
    assert "ls" not in await told(sessions, mine)
    with pytest.raises(errors.SessionNotFound, match="it ended"):
        run(sessions, ME, "id")
    with pytest.raises(errors.SessionNotFound):
        await sessions.destroy(ME, "chosen")
    with pytest.raises(errors.SessionNotFound):
        await sessions.extend(ME, "chosen", 60)
    with pytest.raises(errors.SessionNotFound):
        await sessions.allow(ME, "chosen", ("open",))
    assert sessions.get(OTHER, "chosen") == second


async def test_both_owners_of_an_id_survive_a_restart(world: World) -> None:
    async with world.running() as sessions:
        first = await sessions.create(ME, SPEC)
        await sessions.destroy(ME, "chosen")
        second = await sessions.create(OTHER, SPEC)
        world.runtime.survivors = world.runtime.launched[1:]
    async with world.running() as sessions:
        assert sessions.get(ME, "chosen").sandbox_id == first.sandbox_id
        assert sessions.get(OTHER, "chosen").sandbox_id == second.sandbox_id
        assert sessions.get(OTHER, "chosen").phase is Phase.ACTIVE
        assert "session.ended" in await told(sessions, sessions.get(ME, "chosen"))
        assert "session.ended" not in await told(sessions, sessions.get(OTHER, "chosen"))


@pytest.mark.parametrize("next_owner", [ME, OTHER], ids=["its owner", "somebody else"])
async def test_a_creation_waits_for_the_end_of_the_session_that_had_the_id(
    world: World, sessions: Sessions, next_owner: Principal
) -> None:
    first = await sessions.create(ME, SPEC)
    live = sessions._live["chosen"]  # pyright: ignore[reportPrivateUsage]
    async with live.turning:  # its sandbox cannot be ended yet
        ending = asyncio.create_task(sessions.destroy(ME, "chosen"))
        await until(lambda: live.ending)
        making = asyncio.create_task(sessions.create(next_owner, SPEC))
        await asyncio.wait([making], timeout=0.05)
        assert not making.done()
    await ending
    assert (await making).sandbox_id != first.sandbox_id
    assert world.runtime.launched[0].killed.is_set()
    assert not world.runtime.launched[1].killed.is_set()
    assert sessions.get(next_owner, "chosen").phase is Phase.ACTIVE


async def test_a_session_that_does_not_end_keeps_its_id(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "END_SECONDS", 0.05)
    await sessions.create(ME, SPEC)
    live = sessions._live["chosen"]  # pyright: ignore[reportPrivateUsage]
    async with live.turning:
        ending = asyncio.create_task(sessions.destroy(ME, "chosen"))
        await until(lambda: live.ending)
        with pytest.raises(errors.Conflict):
            await sessions.create(OTHER, SPEC)
    await ending


async def test_of_many_who_want_a_free_id_one_gets_it(world: World, sessions: Sessions) -> None:
    await sessions.create(ME, SPEC)
    ending = asyncio.create_task(sessions.destroy(ME, "chosen"))
    wanting = [sessions.create(Principal(f"caller-{number}"), SPEC) for number in range(8)]
    found = await asyncio.gather(*wanting, return_exceptions=True)
    await ending
    made = [item for item in found if isinstance(item, Session)]
    assert len(made) == 1
    assert {type(item) for item in found} == {Session, errors.Conflict}
    assert sessions.count() == 1
    owner = Principal(made[0].owner)
    assert sessions.get(owner, "chosen").phase is Phase.ACTIVE


async def test_a_change_of_policy_that_outlives_its_session_changes_no_other(
    world: World, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the last owner allowed must not become the next owner's at the next restart."""
    await sessions.create(ME, SPEC)
    begun, go_on = asyncio.Event(), asyncio.Event()
    network = sessions._network  # pyright: ignore[reportPrivateUsage]
    bind = network.bind

    async def slow(sandbox_id: str, policy: Policy) -> None:
        begun.set()
        await go_on.wait()
        await bind(sandbox_id, policy)

    async def read(words: tuple[str, ...]) -> tuple[tuple[str, ...], Policy]:
        return words, Policy()

    with monkeypatch.context() as patch:
        patch.setattr(network, "bind", slow)
        patch.setattr(network, "read", read)
        changing = asyncio.create_task(sessions.allow(ME, "chosen", ("example.com",)))
        await asyncio.wait_for(begun.wait(), 5)
    await sessions.destroy(ME, "chosen")
    second = await sessions.create(OTHER, SPEC)
    go_on.set()
    with contextlib.suppress(errors.K8eError):
        await changing
    assert sessions.get(OTHER, "chosen").allowed_hosts == second.allowed_hosts
    with contextlib.closing(sqlite3.connect(world.settings.data_dir / "sessions.db")) as database:
        query = "SELECT count(*) FROM sessions WHERE rebinding=1 AND phase != 'ended'"
        assert database.execute(query).fetchone() == (0,)


async def test_approvals_of_the_last_owner_neither_count_nor_hold_for_the_next(
    sessions: Sessions, tmp_path: Path
) -> None:
    store = SqliteApprovalStore(tmp_path / "approvals.db")
    approvals = Approvals(store, sessions)
    await sessions.create(ME, SPEC)
    asked = [await approvals.ask(ME, "chosen", f"action {number}") for number in range(MAX_PENDING)]
    await sessions.destroy(ME, "chosen")
    await sessions.create(OTHER, SPEC)
    theirs = await approvals.ask(OTHER, "chosen", "another action")
    assert await approvals.pending(OTHER) == [theirs]
    assert await approvals.pending(ME) == []
    for principal in (ME, OTHER):
        with pytest.raises(errors.K8eError):
            await approvals.wait(principal, asked[0].approval_id, seconds=0.01)
    store.close()


async def test_a_run_of_the_last_owner_is_not_found_by_the_next(
    world: World, sessions: Sessions
) -> None:
    await sessions.create(ME, SPEC)
    run(sessions, ME, "sleep 1000")
    first = world.runtime.launched[0].talk
    await sessions.destroy(ME, "chosen")
    await sessions.create(OTHER, SPEC)
    frames: list[int] = []
    exec_id = first.calls[0]["id"]
    sessions.open_now(
        OTHER, "chosen", {"op": "attach", "id": exec_id}, lambda kind, body: frames.append(kind)
    )
    assert world.runtime.launched[1].talk.calls[-1]["id"] == exec_id  # its own guest is asked …
    assert first.calls[-1]["op"] == "exec"  # … and not the one of before
    first.answer(wire.OUT, b"")
    assert frames == []
