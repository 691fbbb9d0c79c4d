"""Approvals through the SDK, over both wires and on both runtimes."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import pytest

from k8e import Approval, AsyncSandboxClient, SandboxClient, errors
from k8e.client.approvals import visible
from tests.places import NewPlace, Place, eventually

ACTION = "delete \u202e/workspace\x1b[1A"
SECRET = "not for the agent"
PATIENCE = 60.0


@pytest.fixture
def pool() -> Generator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def pending(client: SandboxClient, session_id: str) -> Approval:
    (found,) = eventually(lambda: client.list_approvals(session_id))
    return found


def test_who_asks_waits_until_somebody_decides(
    client: SandboxClient, session_id: str, pool: ThreadPoolExecutor
) -> None:
    task = pool.submit(client.confirm_action, session_id, ACTION, PATIENCE)
    asked = pending(client, session_id)
    assert (asked.action, asked.status, asked.approved) == (ACTION, "pending", False)
    decided = client.approve_action(asked.approval_id, reason="go on")
    assert (decided.approved, decided.advisory) == (True, True)
    found = task.result(PATIENCE)
    assert (found.approved, found.status, found.reason) == (True, "approved", "go on")
    assert found.approval_id == asked.approval_id
    assert client.get_approval(asked.approval_id).status == "used"
    assert client.list_approvals(session_id) == []


def test_a_refusal_is_an_answer_and_not_an_error(client: SandboxClient, session_id: str) -> None:
    asked = client.confirm_action(session_id, ACTION, wait=False)
    client.approve_action(asked.approval_id, False, "no")
    found = client.confirm_action(session_id, ACTION, approval_id=asked.approval_id)
    assert (found.approved, found.status, found.reason) == (False, "rejected", "no")


def test_a_yes_to_another_action_is_none(client: SandboxClient, session_id: str) -> None:
    asked = client.confirm_action(session_id, ACTION, wait=False)
    client.approve_action(asked.approval_id)
    with pytest.raises(errors.Conflict, match="another action"):
        client.confirm_action(session_id, "anything", approval_id=asked.approval_id)
    assert client.confirm_action(session_id, ACTION, approval_id=asked.approval_id).approved
    with pytest.raises(errors.Conflict, match="used already"):
        client.confirm_action(session_id, ACTION, approval_id=asked.approval_id)


def test_waiting_ends_in_time_and_can_be_taken_up_again(
    client: SandboxClient, session_id: str
) -> None:
    with pytest.raises(errors.TimedOut, match="nobody decided"):
        client.confirm_action(session_id, ACTION, 0.05)
    asked = pending(client, session_id)
    client.approve_action(asked.approval_id)
    assert client.confirm_action(session_id, ACTION, approval_id=asked.approval_id).approved
    with pytest.raises(errors.ApprovalNotFound):
        client.approve_action("approval-of-nobody")
    with pytest.raises(errors.SessionNotFound):
        client.confirm_action("no-such-session", ACTION)


@pytest.mark.anyio
async def test_the_asynchronous_client_asks_and_decides(place: Place, session_id: str) -> None:
    async with AsyncSandboxClient(place.endpoint) as client, asyncio.timeout(PATIENCE):
        asked = await client.confirm_action(session_id, ACTION, wait=False)
        task = asyncio.create_task(
            client.confirm_action(session_id, ACTION, approval_id=asked.approval_id)
        )
        assert [item.approval_id for item in await client.list_approvals(session_id)] == [
            asked.approval_id
        ]
        await client.approve_action(asked.approval_id, False, "later")
        assert (await task).reason == "later"
        assert (await client.get_approval(asked.approval_id)).status == "rejected"
        assert not await client.has_approver()
        with pytest.raises(errors.InvalidRequest):
            await client.set_approver("short")


def test_a_pending_approval_and_the_approver_survive_a_crash(
    new_place: NewPlace, runtime: str
) -> None:
    place = new_place()
    place.json("gateway", "--background")
    with SandboxClient(place.endpoint) as client:
        session_id = client.create_session(runtime)
        client.set_approver(SECRET)
        open_one, yes = (
            client.confirm_action(session_id, ACTION, wait=False).approval_id for _ in range(2)
        )
        client.approve_action(yes, secret=SECRET)
    place.kill_gateway()
    place.json("gateway", "--background")
    with SandboxClient(place.endpoint) as client:
        assert [item.approval_id for item in client.list_approvals()] == [open_one]
        found = client.confirm_action(session_id, ACTION, approval_id=yes)
        assert (found.approved, found.advisory) == (True, False)
        with pytest.raises(errors.Denied, match="secret"):
            client.approve_action(open_one)
        client.approve_action(open_one, False, secret=SECRET)
    place.kill_gateway()
    place.json("gateway", "--background")
    with SandboxClient(place.endpoint) as client:
        with pytest.raises(errors.Conflict, match="used already"):
            client.confirm_action(session_id, ACTION, approval_id=yes)
        assert not client.confirm_action(session_id, ACTION, approval_id=open_one).approved


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("rm -rf /", "rm -rf /"),
        ("naïve 日本", "naïve 日本"),
        ("a\x1b[2Jb\r\nc\t", "a\\x1b[2Jb\\r\\nc\\t"),
        ("\u202egnp", "\\u202egnp"),
        ("\u200b\u2028\u00a0", "\\u200b\\u2028\\xa0"),
        ("a\\x1b", "a\\\\x1b"),
    ],
)
def test_what_a_terminal_would_act_on_is_spelled_out(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert visible(text).isprintable()
