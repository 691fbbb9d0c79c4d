"""Approvals: an agent asks for an action, an approver decides, and the agent may act on it once."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import sqlite3
import time
from collections import Counter, deque
from collections.abc import Generator
from dataclasses import replace

from k8e import errors
from k8e.model import Phase, Principal, Role, Session, new_id
from k8e.sessions import live
from k8e.sessions.approval_store import (
    APPROVED,
    EXPIRED,
    PENDING,
    REJECTED,
    USED,
    Approval,
    ApprovalStore,
    PendingApproval,
)
from k8e.sessions.service import Sessions

MIN_SECRET = 12  # characters
MAX_SECRET = 1024
MAX_WRONG = 10  # wrong secrets …
WRONG_SECONDS = 60.0  # … in this time, after which none is tried any more
# 32 MiB and a tenth of a second for each guess.
_SCRYPT = {"n": 1 << 15, "r": 8, "p": 1, "maxmem": 64 << 20, "dklen": 32}


def _hash(secret: str, salt: bytes) -> bytes:
    return hashlib.scrypt(secret.encode("utf-8", "surrogateescape"), salt=salt, **_SCRYPT)


class Approver:
    """The approver's secret, as a salted hash, and the check of it."""

    def __init__(self, store: ApprovalStore) -> None:
        self._store = store
        self._one = asyncio.Lock()  # a flood of guesses takes the memory and the CPU of one
        self._wrong: deque[float] = deque()

    async def configured(self) -> bool:
        return await self._store.approver() is not None

    async def configure(self, secret: str, current: str) -> None:
        """Set the secret; to replace one, the caller must know it."""
        if not MIN_SECRET <= len(secret) <= MAX_SECRET:
            raise errors.InvalidRequest(
                f"an approver's secret has {MIN_SECRET} to {MAX_SECRET} characters"
            )
        salt = os.urandom(16)
        # One at a time, to the end: of two that come at once, the second needs the first's secret.
        async with self._one:
            if await self.configured():
                if not current:
                    raise errors.Conflict(
                        "there is an approver already",
                        hint="k8e approver init --replace asks for the current secret",
                    )
                await self._compare(current)
            digest = await asyncio.to_thread(_hash, secret, salt)
            await self._store.set_approver(salt, digest)

    async def check(self, secret: str) -> None:
        """Return if the secret is right; raise if not."""
        if not secret:
            raise errors.Denied(
                "this needs the approver's secret",
                hint="set K8E_APPROVER_SECRET, use --secret-file, or answer on a terminal",
            )
        async with self._one:
            await self._compare(secret)

    async def _compare(self, secret: str) -> None:
        self._refuse_floods()
        known = await self._store.approver()
        right = (
            known is not None
            and len(secret) <= MAX_SECRET
            and hmac.compare_digest(await asyncio.to_thread(_hash, secret, known[0]), known[1])
        )
        if not right:
            self._wrong.append(time.monotonic())
            raise errors.Denied(
                "this is not the approver's secret",
                hint="it is what k8e approver init printed, or the passphrase given there",
            )

    def _refuse_floods(self) -> None:
        while self._wrong and self._wrong[0] < time.monotonic() - WRONG_SECONDS:
            self._wrong.popleft()
        if len(self._wrong) >= MAX_WRONG:
            raise errors.LimitExceeded(
                f"{MAX_WRONG} wrong secrets within {WRONG_SECONDS:g} s",
                hint="wait a minute; another client may be guessing",
            )


log = logging.getLogger(__name__)

MAX_ACTION = 16 << 10  # characters
MAX_REASON = 4 << 10
MAX_PENDING = 100  # of one session
MAX_KEPT = 1000
"""Approvals of one session that are stored, including those that can no longer be acted on."""
MAX_LISTED = 8 << 20
"""Bytes of one list of approvals, about: clients take frames of 16 MiB."""
LISTED_EACH = 1 << 10  # of them, for one approval beside its text
EXPIRES = 3600.0
"""Seconds in which an action can be approved and acted on, unless the asker says otherwise."""
MAX_EXPIRES = 7 * 24 * 3600.0
WAIT = 300.0
"""Seconds that an asker waits, unless it says otherwise."""
KEEP = 24 * 3600.0  # seconds that an expired one of a live session can still be asked about


class Approvals:
    """All approvals of this gateway, on one event loop."""

    def __init__(self, store: ApprovalStore, sessions: Sessions) -> None:
        self._store = store
        self._sessions = sessions
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._looked = False
        self.approver = Approver(store)
        store.on_change.append(self._wake)
        sessions.on_end.append(self._session_ended)

    # Asking.

    async def ask(
        self, principal: Principal, session_id: str, action: str, expires: float = 0
    ) -> Approval:
        """Register an action; the approval holds for this session, this text and this time."""
        session = self._living(principal, session_id)
        self._sessions.refuse_if_elsewhere(session)  # its own gateway counts them, and notes them
        _check_text(action, "the action", MAX_ACTION)
        if not 0 <= expires <= MAX_EXPIRES:  # so that NaN is refused too
            raise errors.InvalidRequest(f"an approval lives up to {MAX_EXPIRES:g} seconds")
        now = live.boot_time()
        if await self._store.count_pending(session.sandbox_id, now) >= MAX_PENDING:
            raise errors.LimitExceeded(
                f"{MAX_PENDING} actions of session {session_id} wait for approval",
                hint="decide on some: k8e sandbox approvals, k8e sandbox approve ID --reject",
            )
        self._sessions.events.admit()
        await self._make_room(session, now)
        created_at, seconds = time.time(), expires or EXPIRES
        asked = Approval(
            approval_id=new_id("approval"),
            owner=principal.name,
            session_id=session_id,
            sandbox_id=session.sandbox_id,
            action=action,
            status=PENDING,
            created_at=created_at,
            expires_at=created_at + seconds,
            deadline=now + seconds,
        )
        await self._store.insert(asked)
        log.info("approval %s is asked for by session %s", asked.approval_id, session_id)
        self._sessions.events.write(
            session, "approval.asked", approval_id=asked.approval_id, action=action
        )
        return await self._seen(asked)

    async def _make_room(self, session: Session, now: float) -> None:
        """Delete approvals that can no longer be used, so that the file stays small."""
        if not self._looked:  # sessions may have ended while no gateway ran
            self._looked = True
            for sandbox_id in set(await self._store.sandboxes()) - self._sessions.sandboxes():
                await self._store.forget_sandbox(sandbox_id)
        await self._store.forget(now - KEEP)
        if await self._store.count(session.sandbox_id) >= MAX_KEPT:
            await self._store.forget_oldest(session.sandbox_id, now, MAX_KEPT // 2)

    async def wait(
        self, principal: Principal, approval_id: str, *, seconds: float = 0, **bound: str
    ) -> Approval:
        """Wait for the decision; a yes is given to one caller, once.

        ``bound`` are the session_id and action that the caller means; an empty one is not compared.
        """
        if not seconds >= 0:
            raise errors.InvalidRequest("the time to wait cannot be negative")
        deadline = live.boot_time() + (seconds or WAIT)
        asked: Approval | None = None
        with self._listening(approval_id) as changed:
            while True:
                changed.clear()
                if asked is not None and await self._store.get(approval_id) is None:
                    raise _ended(asked.session_id)
                asked = found = await self._own(principal, approval_id)
                _check_bound(found, bound)
                self._living(principal, found.session_id, found.sandbox_id)
                if found.status == APPROVED and await self._store.use(
                    approval_id, live.boot_time()
                ):
                    log.info("approval %s is used", approval_id)
                    return found
                if found.status == REJECTED:
                    return found
                if found.status != PENDING:
                    raise _over(found)
                left = min(deadline, found.deadline) - live.boot_time()
                if left <= 0:
                    raise errors.TimedOut(
                        f"nobody decided on approval {approval_id} in time",
                        hint="it can still be approved until it expires: "
                        f"k8e sandbox confirm --approval-id {approval_id} waits for it again",
                    )
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(left, live.LONGEST_NAP)):
                        await changed.wait()

    @contextlib.contextmanager
    def _listening(self, approval_id: str) -> Generator[asyncio.Event]:
        """An event that is set whenever something happens to an approval."""
        changed = asyncio.Event()
        self._waiting.setdefault(approval_id, set()).add(changed)
        try:
            yield changed
        finally:
            self._waiting[approval_id].discard(changed)
            if not self._waiting[approval_id]:
                del self._waiting[approval_id]

    def _wake(self, approval_id: str) -> None:
        for changed in self._waiting.get(approval_id, ()):
            changed.set()

    # Deciding.

    async def decide(
        self,
        principal: Principal,
        approval_id: str,
        *,
        approved: bool,
        reason: str = "",
        secret: str = "",
    ) -> Approval:
        """Decide yes or no, once.

        With the approver's role, on any caller's action; else as the gateway's owner, with the
        approver's secret. Where there is no such secret, the decision is only advisory.
        """
        _check_text(reason or "-", "the reason", MAX_REASON)
        may_approve = Role.APPROVER in principal.roles
        if not may_approve and Role.ADMIN not in principal.roles:
            raise errors.Denied(
                "an agent cannot approve, neither its own actions nor those of others",
                hint="an approver's key can: k8e sandbox api-key create NAME --role approver",
            )
        binding = await self.approver.configured()
        if not may_approve and binding:
            await self.approver.check(secret)
        found = await self.get(principal, approval_id)
        if found.status != PENDING:
            raise _over(found)
        session = self._living(Principal(found.owner), found.session_id, found.sandbox_id)
        if approved:
            self._sessions.events.admit()
        decided = replace(
            found,
            status=APPROVED if approved else REJECTED,
            decided_at=time.time(),
            advisory=not binding,
            reason=reason,
        )
        if not await self._store.decide(decided, live.boot_time()):
            raise _over(await self.get(principal, approval_id))
        log.info("approval %s is %s", approval_id, decided.status)
        self._sessions.events.write(
            session,
            "approval.decided",
            approval_id=approval_id,
            status=decided.status,
            advisory=decided.advisory,
            reason=reason,
        )
        self._wake(approval_id)
        return decided

    # Finding.

    async def get(self, principal: Principal, approval_id: str) -> Approval:
        """Get one of the caller's own approvals; an approver gets any."""
        found = await self._store.get(approval_id)
        if found is None or not _may_see(principal, found):
            raise _not_found(approval_id)
        return await self._seen(found)

    async def _own(self, principal: Principal, approval_id: str) -> Approval:
        """Get an approval that the caller asked for; seeing another caller's is not enough."""
        found = await self._store.get(approval_id)
        if found is None or found.owner != principal.name:
            raise _not_found(approval_id)
        return await self._seen(found)

    async def pending(self, principal: Principal, session_id: str = "") -> list[Approval]:
        """Undecided approvals, oldest first; an approver gets those of all owners."""
        owner = "" if Role.APPROVER in principal.roles else principal.name
        waiting = await self._store.pending(live.boot_time(), owner)
        owners = {item.owner for item in waiting}
        living = {
            item.sandbox_id for owner in owners for item in self._sessions.listing(Principal(owner))
        }
        meant = [
            item
            for item in waiting
            if item.sandbox_id in living and session_id in ("", item.session_id)
        ]
        found = await self._store.several(_fair(meant))
        return [await self._seen(item) for item in found]

    async def _seen(self, approval: Approval) -> Approval:
        """An approval as it is now: it may have expired, or an approver been set up since."""
        told = live.date_of(approval.deadline, approval.expires_at)
        approval = replace(approval, expires_at=told)
        if approval.status in (PENDING, APPROVED) and approval.deadline <= live.boot_time():
            return replace(approval, status=EXPIRED)
        binding = await self.approver.configured()
        if approval.status == APPROVED and approval.advisory and binding:
            # Before there was an approver, any caller could have given this yes.
            return replace(approval, status=EXPIRED)
        return replace(approval, advisory=not binding) if approval.status == PENDING else approval

    def _living(self, principal: Principal, session_id: str, sandbox_id: str = "") -> Session:
        session = self._sessions.get(principal, session_id)
        same = sandbox_id in ("", session.sandbox_id)
        if session.phase not in (Phase.ACTIVE, Phase.PAUSED) or not same:
            raise _ended(session_id)
        return session

    def _session_ended(self, session: Session) -> None:
        """Delete a session's approvals, and end all waits for them."""
        try:
            self._store.forget_sandbox(session.sandbox_id)
        except sqlite3.Error:  # no one can act on them: sandboxes' ids are not used again
            log.exception("approvals of session %s could not be removed", session.session_id)
        # Waits for other sessions' approvals find nothing changed.
        for approval_id in list(self._waiting):
            self._wake(approval_id)


def _fair(waiting: list[PendingApproval]) -> list[str]:
    """Approvals that fit into one answer: each owner's oldest, then the second, and so on.

    So a caller with many long requests cannot hide those of others.
    """
    turns: Counter[str] = Counter()
    order: list[tuple[int, int]] = []
    for place, item in enumerate(waiting):
        order.append((turns[item.owner], place))
        turns[item.owner] += 1
    left, found = MAX_LISTED, list[str]()
    for _, place in sorted(order):
        left -= LISTED_EACH + 4 * waiting[place].length
        if left < 0:
            break
        found.append(waiting[place].approval_id)
    return found


def _may_see(principal: Principal, approval: Approval) -> bool:
    return approval.owner == principal.name or Role.APPROVER in principal.roles


def _ended(session_id: str) -> errors.SessionNotFound:
    return errors.SessionNotFound(
        f"session {session_id} not found (it ended, and its approvals with it)",
        hint="k8e sandbox sessions lists yours",
    )


def _not_found(approval_id: str) -> errors.ApprovalNotFound:
    return errors.ApprovalNotFound(
        f"approval {approval_id[:80]} not found",
        hint="it may have ended with its session; k8e sandbox approvals lists those that wait for "
        "a decision",
    )


def _check_text(text: str, what: str, limit: int) -> None:
    if not text.strip():
        raise errors.InvalidRequest(f"{what} is empty")
    if len(text) > limit:
        raise errors.LimitExceeded(f"{what} has more than {limit} characters")
    if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        raise errors.InvalidRequest(f"{what} is not valid text")


def _check_bound(approval: Approval, bound: dict[str, str]) -> None:
    for name, value in bound.items():
        if value and value != getattr(approval, name):
            raise errors.Conflict(
                f"approval {approval.approval_id} was asked for another {name.removesuffix('_id')}",
                hint="ask for what you want to do: an approval is for one session and one action",
            )


def _over(approval: Approval) -> errors.K8eError:
    """The error that says why an approval can no longer be used."""
    if approval.status == EXPIRED:
        return errors.TimedOut(
            f"approval {approval.approval_id} has expired", hint="ask for the action again"
        )
    state = "was used already" if approval.status == USED else f"was {approval.status} already"
    return errors.Conflict(
        f"approval {approval.approval_id} {state}", hint="ask for the action again"
    )
