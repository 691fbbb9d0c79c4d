"""Lifetimes of sessions: they end when idle or expired, by their owner, or with their owner.

A principal's name is never given to another one. So no client could use or end the sessions that a
removed principal leaves; and sandboxes that run without an owner are a risk for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from k8e import errors, link
from k8e.audit import act
from k8e.model import Session
from k8e.runtimes.base import Guest, NotRemoved
from k8e.sessions import journal
from k8e.sessions import live as sessions_live
from k8e.sessions.events import Events
from k8e.sessions.live import IDLE, Live, RunningOperation
from k8e.sessions.network import Network
from k8e.sessions.secrets import Secrets
from k8e.sessions.snapshots import Snapshots
from k8e.sessions.store import SessionStore
from k8e.sessions.subagents import Children
from k8e.sessions.tasks import Spawn, Tasks

DEATH_NOTICE = 2.0  # seconds between the loss of a link and the news that the sandbox died
PING_SECONDS = 15.0  # seconds that a busy sandbox may need for the simplest answer

End = Callable[[Live, str], Awaitable[None]]


class LifetimeWatch:
    """Decides when a session has to end, and ends it."""

    def __init__(self, spawn: Spawn, end: End) -> None:
        self._spawn = spawn
        self._end = end

    def start(self, session: Session, guest: Guest) -> Live:
        """Begin with a live session; its lifetime is watched from :meth:`watch` on."""
        return Live(session, guest, on_due=self._on_due, on_overdue=self._on_overdue)

    def watch(self, live: Live) -> None:
        live.watcher = self._spawn(self._watch(live))
        live.schedule()

    async def _watch(self, live: Live) -> None:
        """Clean up when a sandbox ends by itself."""
        reason = await live.guest.wait()
        if live.ending is None:
            await self._end(live, reason)

    def _on_due(self, live: Live) -> None:
        reason = live.why_over()
        if reason == IDLE and live.may_work:
            self._spawn(self._end_idle(live))
        elif reason:
            self._spawn(self._finish(live, reason))
        else:
            live.schedule()

    async def _finish(self, live: Live, reason: str) -> None:
        if live.ending is None and not live.why_over():  # it was used since this was decided
            live.schedule()
            return
        await self._end(live, reason)

    async def _end_idle(self, live: Live) -> None:
        """End a session that is not used, unless a background run is still under way."""
        for one in (live, *live.children):
            if one.has_background:
                one.has_background = False  # another may begin while we ask
                turns = one.turns
                if await sessions_live.count_background_runs(one.guest) or one.turns != turns:
                    one.has_background = True
                    one.touch()
        if live.ending is None:
            self._on_due(live)

    def _on_overdue(self, live: Live, operation: RunningOperation) -> None:
        self._spawn(self._check_guest(live))

    async def _check_guest(self, live: Live) -> None:
        """End a session whose guest does not answer: a program can stop it from starting others."""
        turns = live.turns
        try:
            connected = await live.guest.connect()
            await link.request(connected, {"op": "ping"}, seconds=PING_SECONDS)
        except (errors.K8eError, OSError):  # a guest may report its failure as the latter
            if live.ending is None and live.turns == turns:
                await self._end(live, "its guest stopped answering")

    def lost(self, live: Live, operation: RunningOperation) -> None:
        if not operation.done:
            self._spawn(self._explain_loss(live, operation))

    async def _explain_loss(self, live: Live, operation: RunningOperation) -> None:
        """Tell the client that waits for an operation why its link broke."""
        try:
            async with asyncio.timeout(DEATH_NOTICE):
                operation.fail(errors.SandboxDied(await live.guest.wait()))
        except TimeoutError:
            operation.fail(errors.GuestFailed("the link to the guest was lost"))


log = logging.getLogger(__name__)

BY_OWNER = "destroyed by its owner"
KEEP_ENDED = 24 * 3600.0  # seconds that an ended session can still be asked about


class SessionEnder:
    """Ends sessions of ``live``, the gateway's own table of them."""

    def __init__(
        self,
        live: dict[str, Live],
        store: SessionStore,
        network: Network,
        events: Events,
        children: Children,
    ) -> None:
        self._live = live
        self._store = store
        self._network = network
        self._events = events
        self._children = children
        self.on_end: list[Callable[[Session], None]] = []
        """Called with each session that has ended."""

    async def end(self, live: Live, reason: str) -> None:
        """End a session once, however many callers ask for it."""
        if live.ending is None:
            live.ending = asyncio.create_task(self._end(live, reason))
        await asyncio.shield(live.ending)

    async def _end(self, live: Live, reason: str) -> None:
        session_id = live.session.session_id
        if reason != BY_OWNER:
            act.begin(None)  # a timer or a watcher, which does not do this itself
        log.info("session %s ends: %s", session_id, reason)
        live.stop()
        # Not awaited: neither a full disk nor an unreachable database may delay it.
        with contextlib.suppress(sqlite3.Error):
            # Otherwise a gateway after us would resume it.
            self._store.begin_end(session_id, reason)
        try:
            await self._remove(live, reason)
        except NotRemoved as error:  # its owner is rid of it; a background task removes the rest
            live.left = error.message
        except Exception:
            # Its owner is rid of it; the next start of a gateway tries again to remove the rest.
            log.exception("not everything of session %s could be removed", session_id)
        finally:
            await self._forget(live, reason)

    async def _remove(self, live: Live, reason: str) -> None:
        """End the sandbox and its network, whatever else fails on the way."""
        try:
            self._tell(live, reason)
            await self._children.end(live, reason, self.end)
        finally:
            try:
                async with live.turning:
                    await live.guest.kill()
            finally:
                await self._disconnect(live)

    async def _disconnect(self, live: Live) -> None:
        """Take its network away, even if its removal fails: it must not reach anything."""
        try:
            journal.note_rest(self._network, self._events, live)
        finally:
            await self._network.detach(live.session.sandbox_id)

    def _tell(self, live: Live, reason: str) -> None:
        """Note the limits that it met last, and fail the operations that still run."""
        met = live.limits.tell(live.limits.news())
        journal.note_limits(self._events, live.session, met)
        for operation in list(live.running):
            try:
                operation.fail(errors.SandboxDied(reason))
            except Exception:  # one client's failure must not affect the others
                log.exception("an operation of session %s", live.session.session_id)

    async def _forget(self, live: Live, reason: str) -> None:
        session_id = live.session.session_id
        if self._live.get(session_id) is live:
            del self._live[session_id]
        live.leave()
        try:
            await self._store.end(session_id, reason, time.time())
        except (sqlite3.Error, errors.StoreUnreachable):
            # The next gateway finds no sandbox, and ends it again.
            log.exception("the end of session %s cannot be written down", session_id)
        self._events.end(live.session, reason)
        with contextlib.suppress(sqlite3.Error):
            self._store.forget_ended(time.time() - KEEP_ENDED, live.session.owner)
        for tell in self.on_end:
            tell(live.session)


EndSession = Callable[[Live, str], Coroutine[Any, Any, None]]


class Evictions:
    """Remembers removed owners, and removes their sessions and data."""

    def __init__(
        self, live: dict[str, Live], snapshots: Snapshots, secrets: Secrets, end: EndSession
    ) -> None:
        self._live = live
        self._snapshots = snapshots
        self._secrets = secrets
        self._end = end
        self._gone: set[str] = set()
        self._tasks = Tasks()

    async def evict(self, owner: str, reason: str) -> int:
        """End all sessions of an owner, also those that are being made; return how many there were.

        Once begun it runs to the end, even if its caller disconnects: a key may delete
        itself.
        """
        self._gone.add(owner)
        return await self._tasks.to_the_end(self._evict(owner, reason))

    async def _evict(self, owner: str, reason: str) -> int:
        self._secrets.evict(owner)  # first, so that no session gets one any more
        found = [live for live in self._live.values() if live.session.owner == owner]
        async with asyncio.TaskGroup() as group:
            for live in found:
                group.create_task(self._end(live, reason))
        await self._snapshots.evict(owner)
        return len(found)

    async def check(self, live: Live) -> None:
        """Refuse a session that was being made when its owner was removed."""
        if live.session.owner in self._gone:
            await self._end(live, "its owner is gone")
            raise errors.Denied("the principal that asked for this session was removed")

    def check_owner(self, owner: str) -> None:
        """Refuse and remove data of an owner who was removed while it was being stored."""
        if owner in self._gone:
            self._secrets.evict(owner)
            raise errors.Denied("the principal that asked for this was removed")

    async def sweep(self, gone: set[str]) -> None:
        """Remove what an earlier gateway left of owners that are known to be removed.

        Not of all unknown owners: the list of keys may have been lost, and put back later.
        """
        owners = {live.session.owner for live in self._live.values()}
        owners |= self._snapshots.owners() | self._secrets.owners()
        for owner in sorted(owners & gone):
            log.warning("%s was removed, so its sessions and data are removed too", owner)
            await self.evict(owner, "its owner is gone")
