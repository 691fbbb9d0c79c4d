"""Pausing sessions: their programs stand still and use no CPU until they are resumed.

A session that is written down as paused may still be about to be frozen, or just have been thawed:
the gateway that adopts it freezes it again. The other way round, a frozen sandbox is never taken
for active.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

from k8e import errors
from k8e.model import Phase
from k8e.sessions import refusals
from k8e.sessions.live import Live
from k8e.sessions.store import SessionStore
from k8e.sessions.tasks import Tasks

log = logging.getLogger(__name__)


class Pauses:
    """Freezes and thaws sessions, each with its children."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._tasks = Tasks("a session was not paused or resumed")

    async def pause(self, live: Live) -> None:
        """Stop a session and its children; all of them, or none."""
        await self._tasks.to_the_end(self._pause_family(live))
        _still_there(live)

    async def resume(self, live: Live) -> None:
        """Let a session and its children go on; a child not before its parent."""
        await self._tasks.to_the_end(self._resume_family(live))
        _still_there(live)

    async def follow(self, parent: Live, child: Live) -> None:
        """Pause a new child whose parent was paused while it was being made."""
        if parent.paused:
            await self._tasks.to_the_end(self._freeze(child))

    def freeze_again(self, live: Live) -> None:
        """Freeze an adopted session that was paused, in the background."""
        self._tasks.spawn(self._freeze(live, again=True))

    async def stop(self) -> None:
        """Wait for pauses and resumptions that are under way."""
        await self._tasks.wait()

    # Families.

    async def _pause_family(self, live: Live) -> None:
        # The parent first: it begins no more children then.
        await self._freeze(live)
        try:
            await _all(self._freeze(child) for child in live.children)
        except (errors.K8eError, OSError):
            await self._resume_family(live)
            raise

    async def _resume_family(self, live: Live) -> None:
        await self._thaw(live)
        await _all(self._thaw(child) for child in live.children)

    # One session.

    async def _freeze(self, live: Live, *, again: bool = False) -> None:
        async with live.turning:
            if live.ending is not None or live.paused is not again:
                return
            await self._turn(live, Phase.PAUSED)
            try:
                await live.guest.freeze()
            except BaseException:
                if not again:
                    await self._undo(live)
                raise

    async def _thaw(self, live: Live) -> None:
        async with live.turning:
            if live.parent is not None and live.parent.paused:
                raise refusals.paused(live.parent.session.session_id)
            if live.ending is None and live.paused:
                await live.guest.thaw()
                if live.ending is None:
                    await self._turn(live, Phase.ACTIVE)

    async def _undo(self, live: Live) -> None:
        """Make a session active again that could not be frozen, unless it is frozen in part."""
        try:
            await live.guest.thaw()
        except (errors.K8eError, OSError):
            log.exception("session %s stays paused", live.session.session_id)
            return
        if live.ending is None:
            await self._turn(live, Phase.ACTIVE)

    async def _turn(self, live: Live, phase: Phase) -> None:
        await self._store.set_phase(live.session.session_id, phase)
        live.turn(phase)


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all of them to the end; then raise the first failure."""
    for item in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(item, BaseException):
            raise item


def _still_there(live: Live) -> None:
    if live.ending is not None:
        raise errors.SandboxDied(f"session {live.session.session_id} was ended meanwhile")
