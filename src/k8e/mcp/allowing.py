"""Tools that wait for a person: leave for an action, and more hosts for a session.

The gateway keeps what was asked and decided. A yes that the client's own user gives in a dialog is
passed on with the agent's credential, so it counts only where the gateway says that its approvals
are advisory. Where there is an approver's secret, only who knows it can say yes, outside of us.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from k8e import errors
from k8e.client import approving
from k8e.client.approving import BINDING_NOTE, Approval, visible
from k8e.mcp import hosts
from k8e.mcp.calls import Answer, Call, Question, Reply

HEARTBEAT = 10.0  # seconds between two words to a client that waits
DECLINED = "declined"
ADMIN = "admin"


async def confirm_action(call: Call) -> Reply:
    approval_id = call.get("approval_id")
    if not approval_id and not call.get("action").strip():
        raise errors.InvalidRequest(
            "sandbox_confirm_action needs the argument 'action'",
            hint="say what you are about to do, in the words that a person will read",
        )
    return Reply(await decide(call, await _session(call), call.get("action")))


async def allow_hosts(call: Call) -> Reply:
    add: list[str] = call.get("add", [])
    remove: list[str] = call.get("remove", [])
    if not add and not remove:
        raise errors.InvalidRequest("there are no hosts", hint="name some in `add` or `remove`")
    if looser := hosts.loosening(remove):
        raise errors.InvalidRequest(
            f"without {looser[0]!r} the session could reach more, so it cannot be removed here",
            hint="a person can: k8e sandbox allow-hosts SESSION --remove WORD",
        )
    session_id, client = await _session(call), call.client
    fields: dict[str, Any] = {"approved": True}
    egress = await client.egress(session_id)
    now, later = hosts.split(add, [*call.allowed_hosts, *egress.rules])
    if later:
        fields = await decide(call, session_id, action_of(session_id, later))
        now = [*now, *later] if fields["approved"] else now
    told = egress.allowed_hosts
    if now or remove:
        told = await client.change_allowed_hosts(session_id, add=now, remove=remove)
    return Reply({**fields, "hosts": told})


async def create_with(call: Call, session_id: str, asked: list[str]) -> dict[str, Any]:
    """Give a new session, in which nothing has run, the hosts that it may have by now."""
    egress = await call.client.egress(session_id)
    free = [*call.allowed_hosts, *egress.rules, *egress.allowed_hosts]
    now, later = hosts.split(asked, free)
    words = hosts.kept_strict(now, egress.allowed_hosts)
    told = await call.client.update_allowed_hosts(session_id, words)
    if not later:
        return {"allowed_hosts": told}
    pending = await _register(call, session_id, action_of(session_id, later))
    note = (
        f"{', '.join(later)}: that waits for a person. {how_to_approve(call, pending)} Then call "
        f"sandbox_allow_hosts with session_id {session_id}, approval_id {pending.approval_id} and "
        f"add {later}."
    )
    return {"allowed_hosts": told, "approval_id": pending.approval_id, "note": note}


def action_of(session_id: str, words: list[str]) -> str:
    """The text that a person reads; the same words always make the same text."""
    return f"let session {session_id} reach {', '.join(sorted(set(words)))}"


def how_to_approve(call: Call, pending: Approval) -> str:
    """Words for a person, with commands that stand on lines of their own, to be pasted."""
    yes, no = (
        approving.command(pending.approval_id, call.client.endpoint, reject=reject)
        for reject in (False, True)
    )
    secret = "" if pending.advisory else f" {BINDING_NOTE}"
    return f"A person approves in a terminal:\n{yes}\nor rejects:\n{no}\n{secret}".rstrip(" ")


# Asking and waiting.


def _asked_before(call: Call) -> str:
    """The approval that this call comes back for."""
    before = call.asker.answered
    return call.get("approval_id") or (before.state if before else "")


async def _session(call: Call) -> str:
    """The session that is meant: the one named, or that of before, or the connection's own."""
    named = call.session_id
    if not named and (approval_id := _asked_before(call)):
        named = (await call.client.get_approval(approval_id)).session_id
    return await call.desk.find(named) if named else await call.desk.default()


async def decide(call: Call, session_id: str, action: str) -> dict[str, Any]:
    """Ask for an action, or come back for it, as far as anybody can be reached."""
    before = call.asker.answered
    if approval_id := _asked_before(call):
        pending = await call.client.get_approval(approval_id)
        _same(pending, session_id, action)
        if pending.status != "pending":
            return await _wait(call, pending)
    else:
        pending = await _register(call, session_id, action)
    if before is not None:
        return await _take(call, pending, before)
    if call.asker.available:
        return await _ask(call, pending)
    if call.get("approval_id") or call.get("wait", False):
        return await _wait(call, pending)
    return _told(pending, note=f"{how_to_approve(call, pending)} Then call again with approval_id.")


def _same(pending: Approval, session_id: str, action: str) -> None:
    if pending.session_id != session_id or (action and pending.action != action):
        raise errors.Conflict(
            f"approval {pending.approval_id} was asked for another session or action",
            hint="call again with the session and the words that were approved, or ask anew",
        )


async def _register(call: Call, session_id: str, action: str) -> Approval:
    return await call.client.confirm_action(session_id, action, wait=False)


async def _ask(call: Call, pending: Approval) -> dict[str, Any]:
    """In the client; and whoever decides elsewhere meanwhile is heard too."""
    question = Question(await _message(call, pending), pending.approval_id)
    dialog = asyncio.ensure_future(call.asker.ask(question))
    elsewhere = asyncio.ensure_future(_wait(call, pending))
    try:
        await asyncio.wait({dialog, elsewhere}, return_when=asyncio.FIRST_COMPLETED)
        if dialog.done():
            answer = dialog.result()
            if not elsewhere.done():
                await _stop(elsewhere)
                return await _take(call, pending, answer)
        return await elsewhere
    finally:
        await _stop(dialog)
        await _stop(elsewhere)


async def _stop(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # so that nobody complains that it was not looked at


async def _message(call: Call, pending: Approval) -> str:
    action = visible(pending.action)
    if await _counts_here(call, pending):
        return f"The agent asks for leave: {action}"
    return (
        f"The agent asks for leave: {action}\nOnly the approver can allow it, in a terminal:\n"
        f"{approving.command(pending.approval_id, call.client.endpoint)}\n{BINDING_NOTE}\n"
        "Accept here to wait for that, or decline."
    )


async def _counts_here(call: Call, pending: Approval) -> bool:
    """Whether a yes in the client's dialog can be a decision."""
    return pending.advisory and ADMIN in (await call.client.status())["roles"]


async def _take(call: Call, pending: Approval, answer: Answer) -> dict[str, Any]:
    """What the person did in the client's dialog."""
    if answer.action == "cancel":
        return _told(pending, note=f"The dialog was closed. {how_to_approve(call, pending)}")
    yes = answer.action == "accept" and answer.approve
    if not await _counts_here(call, pending):
        if answer.action == "accept":
            return await _wait(call, pending)
        return {**_told(pending), "status": DECLINED}
    with contextlib.suppress(errors.Conflict):  # decided elsewhere meanwhile; that counts
        await call.client.approve_action(
            pending.approval_id, yes, answer.reason or "in the client's dialog"
        )
    return await _wait(call, pending)


async def _wait(call: Call, pending: Approval) -> dict[str, Any]:
    """The decision, if it comes in time; a client that listens hears that we still wait."""
    deciding = asyncio.ensure_future(
        call.client.confirm_action(
            pending.session_id, pending.action, call["timeout"], approval_id=pending.approval_id
        )
    )
    beats = 0
    try:
        while not deciding.done():
            soon = call.teller.heard and not beats  # who listens is told at once how to approve
            await asyncio.wait({deciding}, timeout=0.2 if soon else HEARTBEAT)
            if not deciding.done() and call.teller.heard:
                beats += 1
                await call.teller.tell(
                    beats, f"waiting for a person. {how_to_approve(call, pending)}"
                )
        return _told(deciding.result())
    except errors.TimedOut:
        return _told(pending, note=f"Nobody decided yet. {how_to_approve(call, pending)}")
    finally:
        await _stop(deciding)


def _told(found: Approval, note: str = "") -> dict[str, Any]:
    fields: dict[str, Any] = {
        "approval_id": found.approval_id,
        "approved": found.approved,
        "status": found.status,
        "advisory": found.advisory,
    }
    if found.reason:
        fields["reason"] = found.reason
    return {**fields, "note": note} if note else fields
