"""What approvals promise: bound, single use, in time, decided by whoever knows the secret."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from k8e import errors
from k8e.model import Principal, Role, SessionSpec
from k8e.sessions import approvals as module
from k8e.sessions import approvals as sessions_approvals
from k8e.sessions import live
from k8e.sessions.approval_store import SqliteApprovalStore
from k8e.sessions.approvals import MAX_EXPIRES, MAX_PENDING, Approval, Approvals
from k8e.sessions.service import Sessions
from tests.sessions.fakes import PATIENCE, World

OWNER = frozenset({Role.AGENT, Role.ADMIN})
ME, OTHER = Principal("me", OWNER), Principal("somebody-else", OWNER)
SECRET = "correct horse battery"
HOUR = 3600.0
ACTION = "drop the table \x1b[2Kusers\n"


@pytest.fixture
async def approvals(world: World, sessions: Sessions) -> AsyncGenerator[Approvals]:
    store = SqliteApprovalStore(world.settings.data_dir / "approvals.db")
    yield Approvals(store, sessions)
    store.close()


@pytest.fixture
async def asked(approvals: Approvals, sessions: Sessions) -> Approval:
    session = await sessions.create(ME, SessionSpec(session_id="mine"))
    return await approvals.ask(ME, session.session_id, ACTION)


def waiting(approvals: Approvals, approval_id: str) -> asyncio.Task[Approval]:
    return asyncio.create_task(approvals.wait(ME, approval_id, seconds=PATIENCE))


async def test_a_yes_wakes_the_one_that_waits_and_is_good_once(
    approvals: Approvals, asked: Approval
) -> None:
    first, second = (waiting(approvals, asked.approval_id) for _ in range(2))
    await asyncio.sleep(0)  # so that both wait
    decided = await approvals.decide(ME, asked.approval_id, approved=True, reason="fine")
    assert decided.advisory, "nobody is the approver, so anybody is"
    told = await asyncio.gather(first, second, return_exceptions=True)
    (yes,) = (item for item in told if isinstance(item, Approval))
    (no,) = (item for item in told if isinstance(item, errors.Conflict))
    assert (yes.status, yes.reason, yes.action) == ("approved", "fine", ACTION)
    assert "was used already" in no.message
    with pytest.raises(errors.Conflict, match="was used already"):
        await approvals.wait(ME, asked.approval_id)


async def test_a_no_is_told_as_often_as_it_is_asked_for(
    approvals: Approvals, asked: Approval
) -> None:
    await approvals.decide(ME, asked.approval_id, approved=False, reason="never")
    for _ in range(2):
        found = await approvals.wait(ME, asked.approval_id)
        assert (found.status, found.reason) == ("rejected", "never")


async def test_the_first_decision_stands(approvals: Approvals, asked: Approval) -> None:
    await approvals.decide(ME, asked.approval_id, approved=False)
    with pytest.raises(errors.Conflict, match="was rejected already"):
        await approvals.decide(ME, asked.approval_id, approved=True)


@pytest.mark.parametrize(
    ("session_id", "action"), [("other", ACTION), ("", "drop"), ("mine", ACTION + " ")]
)
async def test_an_approval_of_something_else_is_none(
    approvals: Approvals, asked: Approval, session_id: str, action: str
) -> None:
    await approvals.decide(ME, asked.approval_id, approved=True)
    with pytest.raises(errors.Conflict, match="was asked for another"):
        await approvals.wait(ME, asked.approval_id, session_id=session_id, action=action)
    same = await approvals.wait(ME, asked.approval_id, session_id="mine", action=ACTION)
    assert same.status == "approved", "a wrong question uses nothing up"


async def test_what_expires_is_neither_approved_nor_used(
    approvals: Approvals, asked: Approval
) -> None:
    short = await approvals.ask(ME, "mine", ACTION, expires=0.05)
    with pytest.raises(errors.TimedOut, match="has expired"):
        await approvals.wait(ME, short.approval_id)
    with pytest.raises(errors.TimedOut, match="has expired"):
        await approvals.decide(ME, short.approval_id, approved=True)
    assert [item.approval_id for item in await approvals.pending(ME)] == [asked.approval_id]


async def test_nobody_deciding_in_time_leaves_it_pending(
    approvals: Approvals, asked: Approval
) -> None:
    with pytest.raises(errors.TimedOut, match="nobody decided"):
        await approvals.wait(ME, asked.approval_id, seconds=0.01)
    assert (await approvals.get(ME, asked.approval_id)).status == "pending"


async def test_the_end_of_the_session_is_the_end_of_its_approvals(
    approvals: Approvals, sessions: Sessions, asked: Approval
) -> None:
    task = waiting(approvals, asked.approval_id)
    await asyncio.sleep(0)
    await sessions.destroy(ME, "mine")
    with pytest.raises(errors.SessionNotFound, match="approvals with it"):
        await task
    await sessions.create(ME, SessionSpec(session_id="mine"))
    assert await approvals.pending(ME) == []
    with pytest.raises(errors.ApprovalNotFound, match="not found"):
        await approvals.decide(ME, asked.approval_id, approved=True)


def rows(world: World) -> int:
    with contextlib.closing(sqlite3.connect(world.settings.data_dir / "approvals.db")) as database:
        return int(database.execute("SELECT count(*) FROM approvals").fetchone()[0])


async def test_nothing_is_kept_of_the_approvals_of_sessions_that_ended(
    approvals: Approvals, sessions: Sessions, asked: Approval, world: World
) -> None:
    other = await sessions.create(ME, SessionSpec())
    await approvals.ask(ME, other.session_id, ACTION, expires=MAX_EXPIRES)
    await sessions.destroy(ME, "mine")
    assert rows(world) == 1, "the other session lives on"
    await sessions.destroy(ME, other.session_id)
    assert rows(world) == 0


async def test_approvals_of_sessions_that_ended_without_a_gateway_are_removed(
    sessions: Sessions, world: World
) -> None:
    store = SqliteApprovalStore(world.settings.data_dir / "approvals.db")
    deadline = live.boot_time() + HOUR
    gone = ("me", "gone", "sb-gone", ACTION, "pending", time.time(), time.time() + HOUR, deadline)
    store.insert(Approval("approval-gone", *gone))
    await sessions.create(ME, SessionSpec(session_id="mine"))
    await Approvals(store, sessions).ask(ME, "mine", ACTION)
    assert store.sandboxes().value == [sessions.get(ME, "mine").sandbox_id]
    store.close()


async def test_a_session_keeps_only_so_many_old_approvals(
    approvals: Approvals, asked: Approval, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 10)
    for _ in range(30):
        again = await approvals.ask(ME, "mine", ACTION)
        await approvals.decide(ME, again.approval_id, approved=False)
    assert rows(world) <= 10
    assert (await approvals.get(ME, asked.approval_id)).status == "pending", (
        "it can still be decided on"
    )


@pytest.mark.parametrize("jump", [-48 * HOUR, 48 * HOUR])
async def test_setting_the_date_neither_ends_an_approval_nor_revives_it(
    approvals: Approvals, asked: Approval, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    real, ticking = time.time, live.boot_time
    await approvals.decide(ME, asked.approval_id, approved=True)
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    assert (await approvals.get(ME, asked.approval_id)).status == "approved"
    monkeypatch.setattr(live, "boot_time", lambda: ticking() + HOUR + 1)
    with pytest.raises(errors.TimedOut, match="has expired"):
        await approvals.wait(ME, asked.approval_id)


async def test_of_two_approvers_that_come_at_once_the_first_stays(approvals: Approvals) -> None:
    first, second = (
        asyncio.create_task(approvals.approver.configure(secret, ""))
        for secret in (SECRET, "the agent's own secret")
    )
    await first
    with pytest.raises(errors.Conflict, match="already"):
        await second
    await approvals.approver.check(SECRET)


async def test_somebody_elses_approval_looks_as_if_it_did_not_exist(
    approvals: Approvals, asked: Approval
) -> None:
    for approval_id in (asked.approval_id, "nothing", "\ud800"):
        with pytest.raises(errors.ApprovalNotFound, match="not found"):
            await approvals.get(OTHER, approval_id)
        with pytest.raises(errors.ApprovalNotFound):
            await approvals.decide(OTHER, approval_id, approved=True)
    assert await approvals.pending(OTHER) == []
    with pytest.raises(errors.SessionNotFound):
        await approvals.ask(OTHER, "mine", ACTION)


async def test_with_an_approver_only_the_secret_decides(
    approvals: Approvals, asked: Approval
) -> None:
    await approvals.approver.configure(SECRET, "")
    assert not (await approvals.get(ME, asked.approval_id)).advisory
    for secret in ("", "wrong" * 5, SECRET + "\n", "x" * 5000):
        with pytest.raises(errors.Denied, match="secret"):
            await approvals.decide(ME, asked.approval_id, approved=True, secret=secret)
    decided = await approvals.decide(ME, asked.approval_id, approved=True, secret=SECRET)
    assert not decided.advisory
    assert not (await approvals.wait(ME, asked.approval_id)).advisory


async def test_the_role_of_an_approver_needs_no_secret(
    approvals: Approvals, asked: Approval
) -> None:
    await approvals.approver.configure(SECRET, "")
    person = Principal(ME.name, frozenset({Role.APPROVER}))
    assert not (await approvals.decide(person, asked.approval_id, approved=True)).advisory


async def test_an_agent_never_approves_with_a_secret_or_without(
    approvals: Approvals, asked: Approval
) -> None:
    agent = Principal(ME.name)
    with pytest.raises(errors.Denied, match="an agent cannot approve"):
        await approvals.decide(agent, asked.approval_id, approved=True)
    await approvals.approver.configure(SECRET, "")
    with pytest.raises(errors.Denied, match="an agent cannot approve"):
        await approvals.decide(agent, asked.approval_id, approved=True, secret=SECRET)
    assert (await approvals.get(ME, asked.approval_id)).status == "pending"


async def test_an_approver_decides_for_everybody_but_cannot_act_on_it(
    approvals: Approvals, asked: Approval
) -> None:
    person = Principal("person", frozenset({Role.APPROVER, Role.AGENT}))
    assert [item.approval_id for item in await approvals.pending(person)] == [asked.approval_id]
    assert (await approvals.get(person, asked.approval_id)).action == ACTION
    decided = await approvals.decide(person, asked.approval_id, approved=True)
    assert decided.advisory, "who manages keys could have made one for an approver"
    with pytest.raises(errors.ApprovalNotFound):
        await approvals.wait(person, asked.approval_id)
    assert (await approvals.wait(ME, asked.approval_id)).approval_id == asked.approval_id


async def test_an_approver_is_replaced_only_by_who_knows_the_secret(approvals: Approvals) -> None:
    with pytest.raises(errors.InvalidRequest, match="12 to 1024"):
        await approvals.approver.configure("short", "")
    await approvals.approver.configure(SECRET, "")
    with pytest.raises(errors.Conflict, match="already"):
        await approvals.approver.configure("another secret", "")
    with pytest.raises(errors.Denied):
        await approvals.approver.configure("another secret", "not the secret")
    await approvals.approver.configure("another secret", SECRET)
    await approvals.approver.check("another secret")
    with pytest.raises(errors.Denied):
        await approvals.approver.check(SECRET)


async def test_guessing_is_slowed_down(
    approvals: Approvals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_approvals, "MAX_WRONG", 2)
    await approvals.approver.configure(SECRET, "")
    for _ in range(2):
        with pytest.raises(errors.Denied):
            await approvals.approver.check("a wrong secret")
    with pytest.raises(errors.LimitExceeded, match="wrong secrets"):
        await approvals.approver.check(SECRET)


async def test_the_secret_is_kept_only_as_a_hash(world: World, approvals: Approvals) -> None:
    await approvals.approver.configure(SECRET, "")
    for path in world.settings.data_dir.glob("approvals.db*"):
        assert SECRET.encode() not in path.read_bytes()
        assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        ("", errors.InvalidRequest),
        (" \n", errors.InvalidRequest),
        ("a\0b", errors.InvalidRequest),
        ("\udc80", errors.InvalidRequest),
        ("x" * 20_000, errors.LimitExceeded),
    ],
)
async def test_an_action_that_is_no_text_is_refused(
    approvals: Approvals, asked: Approval, action: str, kind: type[errors.K8eError]
) -> None:
    with pytest.raises(kind):
        await approvals.ask(ME, "mine", action)
    with pytest.raises(errors.InvalidRequest):
        await approvals.ask(ME, "mine", ACTION, expires=float("nan"))
    with pytest.raises(errors.InvalidRequest):
        await approvals.wait(ME, asked.approval_id, seconds=float("nan"))


async def test_a_session_has_only_so_many_pending(approvals: Approvals, asked: Approval) -> None:
    for _ in range(MAX_PENDING - 1):
        await approvals.ask(ME, "mine", ACTION)
    with pytest.raises(errors.LimitExceeded, match="wait for approval"):
        await approvals.ask(ME, "mine", ACTION)


def test_a_newer_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "approvals.db"
    SqliteApprovalStore(path).close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version=99")
    database.close()
    with pytest.raises(errors.StateUnusable, match="newer k8e"):
        SqliteApprovalStore(path)


async def test_what_a_paused_session_asked_for_can_be_decided_on(
    approvals: Approvals, sessions: Sessions, asked: Approval
) -> None:
    await sessions.pause(ME, "mine")
    assert (await approvals.decide(ME, asked.approval_id, approved=True)).status == "approved"
    assert (await approvals.wait(ME, asked.approval_id)).approval_id == asked.approval_id


async def test_who_asks_for_much_hides_nothing_that_others_ask_for(
    approvals: Approvals, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LISTED", 1 << 20)
    loud = [await sessions.create(OTHER, SessionSpec()) for _ in range(2)]
    for session in loud:
        for _ in range(MAX_PENDING):
            await approvals.ask(OTHER, session.session_id, "\U0001f4a3" * module.MAX_ACTION)
    session = await sessions.create(ME, SessionSpec())
    asked = [
        (await approvals.ask(ME, session.session_id, f"action {n}")).approval_id for n in range(3)
    ]
    told = await approvals.pending(Principal("approver", frozenset({Role.APPROVER})))
    assert [item.approval_id for item in told if item.owner == ME.name] == asked
    assert 3 < len(told) < 20
    assert sum(len(item.action.encode()) for item in told) < 1 << 20
    assert [item.approval_id for item in await approvals.pending(ME)] == asked


async def test_a_yes_of_before_there_was_an_approver_is_of_no_use_after(
    approvals: Approvals, asked: Approval
) -> None:
    await approvals.decide(ME, asked.approval_id, approved=True)
    await approvals.approver.configure(SECRET, "")
    assert (await approvals.get(ME, asked.approval_id)).status == "expired"
    with pytest.raises(errors.TimedOut, match="expired"):
        await approvals.wait(ME, asked.approval_id)
