"""Tools that wait for a person's approval: an action, or more hosts for a session.

The gateway keeps what was asked and decided. A yes from the client's own user in a dialog is passed
on with the agent's credential, so it counts only where the gateway says that its approvals are
advisory. Where there is an approver's secret, only a person who knows it can approve, outside of
this server.

Words are those of a session's policy: names, ``*.wildcards``, networks, each with an optional port
or several. They are compared by what they allow, not by their spelling. A word that is not surely
covered counts as new: asking once too often does no harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from k8e import errors
from k8e.client import approvals
from k8e.client.approvals import BINDING_NOTE, Approval, visible
from k8e.mcp.calls import PersonAnswer, PersonQuestion, Reply, ToolCall

NONE, STRICT = HARMLESS = ("none", "strict")
"""Words that only take something away."""
OPEN, DEFAULT = "open", "default"
OWN_WORDS = (*HARMLESS, OPEN, DEFAULT)
ANY = ""
"""Stands for every port."""


class _Place(NamedTuple):
    """A destination that one word allows."""

    name: str
    below: bool
    """Whether it is the names below that are meant."""
    network: ipaddress.IPv4Network | ipaddress.IPv6Network | None
    port: str

    def holds(self, other: _Place) -> bool:
        """Whether this includes all of ``other``."""
        return self.port in (ANY, other.port) and self._holds_target(other)

    def _holds_target(self, other: _Place) -> bool:
        if self.network is not None or other.network is not None:
            around, inside = self.network, other.network
            if around is None or inside is None or around.version != inside.version:
                return False
            return inside.network_address in around and inside.prefixlen >= around.prefixlen
        is_below = self.below and other.name.endswith("." + self.name)
        return is_below or (other.name == self.name and other.below == self.below)

    def word(self) -> str:
        target = ("*." if self.below else "") + self.name
        if self.network is not None:
            is_six = self.port and self.network.version == 6
            target = f"[{self.network}]" if is_six else str(self.network)
        if self.port:
            return f"{target}:{self.port}"
        return f"{target}." if target in OWN_WORDS else target  # a host of that name


def split_hosts(asked: Sequence[str], free: Iterable[str]) -> tuple[list[str], list[str]]:
    """The words that need no approval, and those that a person must approve.

    A host without a port, of which some ports are free, stands for these: who wants another one
    has to say so.
    """
    words = {_tidy(word) for word in free} | set(HARMLESS)
    known = [place for word in words for place in _places(word)]
    now: list[str] = []
    later: list[str] = []
    for word in asked:
        places = _places(word)
        for place in places:
            found = _free(place, known, is_open=OPEN in words)
            now += found
            later += [] if found else [place.word()]
        if not places:  # a word of its own, or one that the gateway will refuse
            (now if _tidy(word) in words & set(OWN_WORDS) else later).append(word)
    return list(dict.fromkeys(now)), list(dict.fromkeys(later))


def _free(place: _Place, known: list[_Place], *, is_open: bool) -> list[str]:
    """The part of a place that needs no approval: all of it, some of its ports, or nothing."""
    if any(one.holds(place) for one in known) or (is_open and place.network is None):
        return [place.word()]
    if place.port:
        return []
    ports = [one.port for one in known if one.holds(place._replace(port=one.port))]
    return [place._replace(port=port).word() for port in sorted(set(ports), key=int)]


def kept_strict(words: Sequence[str], before: Iterable[str]) -> list[str]:
    """The words, with ``strict`` if it was set before: dropping it would allow more."""
    strict = any(_tidy(word) == STRICT for word in before)
    return [*words, STRICT] if strict and STRICT not in map(_tidy, words) else list(words)


def loosening(remove: Iterable[str]) -> list[str]:
    """Words whose removal would allow more."""
    return [word for word in remove if _tidy(word) in HARMLESS]


def _places(word: str) -> list[_Place]:
    """The destinations of a word, port by port; nothing if it is neither a name nor a network."""
    text = _tidy(word)
    if text in OWN_WORDS:
        return []
    target, ports = _ports(text)
    if not ports or not all(port == ANY or port.isdecimal() for port in ports):
        return []
    try:
        network = ipaddress.ip_network(target, strict=False)
        return [_Place("", False, network, port) for port in ports]
    except ValueError:
        pass
    try:
        name = target.removeprefix("*.").removesuffix(".")
        name = name if name.isascii() else name.encode("idna").decode("ascii")
    except UnicodeError:
        return []
    if not name or set(name) & set("*:/[]@%, "):
        return []
    below = target.startswith("*.")
    return [_Place(name, below, None, port) for port in ports]


def _ports(text: str) -> tuple[str, list[str]]:
    """The target of a word, and its ports without leading zeros."""
    if text.startswith("["):
        target, _, rest = text[1:].partition("]")
        if rest and not rest.startswith(":"):
            return target, []
        target, ports = target, rest[1:] if rest else None
    elif text.count(":") == 1:
        target, _, ports = text.partition(":")
    else:
        target, ports = text, None
    if ports is None:
        return target, [ANY]
    return target, [port.strip().lstrip("0") or "0" for port in ports.split(",")]


def _tidy(word: str) -> str:
    return word.strip().lower()


HEARTBEAT = 10.0  # seconds between two messages to a waiting client
DECLINED = "declined"
ADMIN = "admin"


async def confirm_action(call: ToolCall) -> Reply:
    approval_id = call.get("approval_id")
    if not approval_id and not call.get("action").strip():
        raise errors.InvalidRequest(
            "sandbox_confirm_action needs the argument 'action'",
            hint="say what you are about to do, in the words that a person will read",
        )
    return Reply(await decide(call, await _session(call), call.get("action")))


async def allow_hosts(call: ToolCall) -> Reply:
    add: list[str] = call.get("add", [])
    remove: list[str] = call.get("remove", [])
    if not add and not remove:
        raise errors.InvalidRequest("there are no hosts", hint="name some in `add` or `remove`")
    if looser := loosening(remove):
        raise errors.InvalidRequest(
            f"without {looser[0]!r} the session could reach more, so it cannot be removed here",
            hint="a person can: k8e sandbox allow-hosts SESSION --remove WORD",
        )
    session_id, client = await _session(call), call.client
    fields: dict[str, Any] = {"approved": True}
    egress = await client.egress(session_id)
    now, later = split_hosts(add, [*call.allowed_hosts, *egress.rules])
    if later:
        fields = await decide(call, session_id, action_of(session_id, later))
        now = [*now, *later] if fields["approved"] else now
    told = egress.allowed_hosts
    if now or remove:
        told = await client.change_allowed_hosts(session_id, add=now, remove=remove)
    return Reply({**fields, "hosts": told})


async def create_with(call: ToolCall, session_id: str, asked: list[str]) -> dict[str, Any]:
    """Allow hosts for a new session, in which nothing has run."""
    egress = await call.client.egress(session_id)
    free = [*call.allowed_hosts, *egress.rules, *egress.allowed_hosts]
    now, later = split_hosts(asked, free)
    words = kept_strict(now, egress.allowed_hosts)
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


def how_to_approve(call: ToolCall, pending: Approval) -> str:
    """Text for a person, with commands on lines of their own, to be pasted."""
    yes, no = (
        approvals.command(pending.approval_id, call.client.endpoint, reject=reject)
        for reject in (False, True)
    )
    secret = "" if pending.advisory else f" {BINDING_NOTE}"
    return f"A person approves in a terminal:\n{yes}\nor rejects:\n{no}\n{secret}".rstrip(" ")


# Asking and waiting.


def _asked_before(call: ToolCall) -> str:
    """The approval that this call refers to."""
    before = call.asker.answered
    return call.get("approval_id") or (before.state if before else "")


async def _session(call: ToolCall) -> str:
    """The named session, the one of the approval, or the connection's own."""
    named = call.session_id
    if not named and (approval_id := _asked_before(call)):
        named = (await call.client.get_approval(approval_id)).session_id
    return await call.desk.find(named) if named else await call.desk.default()


async def decide(call: ToolCall, session_id: str, action: str) -> dict[str, Any]:
    """Ask for an action, or come back for it, with whichever way there is to reach a person."""
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
            hint="call again with the session and the words that were approved, or ask again",
        )


async def _register(call: ToolCall, session_id: str, action: str) -> Approval:
    return await call.client.confirm_action(session_id, action, wait=False)


async def _ask(call: ToolCall, pending: Approval) -> dict[str, Any]:
    """Ask in the client; a decision made elsewhere at the same time counts too."""
    question = PersonQuestion(await _message(call, pending), pending.approval_id)
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
        task.exception()  # retrieved, or asyncio would warn


async def _message(call: ToolCall, pending: Approval) -> str:
    action = visible(pending.action)
    if await _counts_here(call, pending):
        return f"The agent asks for leave: {action}"
    return (
        f"The agent asks for leave: {action}\nOnly the approver can allow it, in a terminal:\n"
        f"{approvals.command(pending.approval_id, call.client.endpoint)}\n{BINDING_NOTE}\n"
        "Accept here to wait for that, or decline."
    )


async def _counts_here(call: ToolCall, pending: Approval) -> bool:
    """Whether a yes in the client's dialog can be a decision."""
    return pending.advisory and ADMIN in (await call.client.status())["roles"]


async def _take(call: ToolCall, pending: Approval, answer: PersonAnswer) -> dict[str, Any]:
    """The person's answer in the client's dialog."""
    if answer.action == "cancel":
        return _told(pending, note=f"The dialog was closed. {how_to_approve(call, pending)}")
    yes = answer.action == "accept" and answer.approve
    if not await _counts_here(call, pending):
        if answer.action == "accept":
            return await _wait(call, pending)
        return {**_told(pending), "status": DECLINED}
    with contextlib.suppress(errors.Conflict):  # decided elsewhere at the same time; that counts
        await call.client.approve_action(
            pending.approval_id, yes, answer.reason or "in the client's dialog"
        )
    return await _wait(call, pending)


async def _wait(call: ToolCall, pending: Approval) -> dict[str, Any]:
    """Wait for the decision; a client that listens is told that we still wait."""
    deciding = asyncio.ensure_future(
        call.client.confirm_action(
            pending.session_id, pending.action, call["timeout"], approval_id=pending.approval_id
        )
    )
    beats = 0
    try:
        while not deciding.done():
            # A client that listens is told at once how to approve.
            soon = call.teller.heard and not beats
            await asyncio.wait({deciding}, timeout=0.2 if soon else HEARTBEAT)
            if not deciding.done() and call.teller.heard:
                beats += 1
                await call.teller.tell(
                    beats, f"waiting for a person. {how_to_approve(call, pending)}"
                )
        return _told(deciding.result())
    except errors.TimedOut:
        return _told(pending, note=f"There is no decision yet. {how_to_approve(call, pending)}")
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
