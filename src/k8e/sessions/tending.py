"""Looks after live sessions: notices their deaths, that nobody uses them, and that time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from k8e import errors, link
from k8e.model import Session
from k8e.runtimes.base import Guest
from k8e.sessions import working
from k8e.sessions.live import IDLE, Live
from k8e.sessions.operations import Operation

DEATH_NOTICE = 2.0  # seconds between the loss of a link and the news that the sandbox died
PING_SECONDS = 15.0  # that a busy sandbox may need for the least of answers

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
End = Callable[[Live, str], Awaitable[None]]


class Tender:
    """Decides when a session has to end; ending it is its owner's."""

    def __init__(self, spawn: Spawn, end: End) -> None:
        self._spawn = spawn
        self._end = end

    def tend(self, session: Session, guest: Guest) -> Live:
        """A session that is looked after from :meth:`watch` on."""
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
        await self._end(live, reason)

    async def _end_idle(self, live: Live) -> None:
        """End a session that is not used, unless a background run is still under way."""
        for one in (live, *live.children):
            if one.has_background:
                one.has_background = False  # another may begin while we ask
                turns = one.turns
                if await working.count_background_runs(one.guest) or one.turns != turns:
                    one.has_background = True
                    one.touch()
        if live.ending is None:
            self._on_due(live)

    def _on_overdue(self, live: Live, operation: Operation) -> None:
        self._spawn(self._check_guest(live))

    async def _check_guest(self, live: Live) -> None:
        """End a session whose guest does not answer: a program can stop what starts others."""
        turns = live.turns
        try:
            connected = await live.guest.connect()
            await link.request(connected, {"op": "ping"}, seconds=PING_SECONDS)
        except (errors.K8eError, OSError):  # the latter is what a guest may call its failure
            if live.ending is None and live.turns == turns:
                await self._end(live, "its guest stopped answering")

    def lost(self, live: Live, operation: Operation) -> None:
        if not operation.done:
            self._spawn(self._explain_loss(live, operation))

    async def _explain_loss(self, live: Live, operation: Operation) -> None:
        """Tell whoever waits for an operation why its link broke."""
        try:
            async with asyncio.timeout(DEATH_NOTICE):
                operation.fail(errors.SandboxDied(await live.guest.wait()))
        except TimeoutError:
            operation.fail(errors.GuestFailed("the link to the guest was lost"))
