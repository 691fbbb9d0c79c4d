"""What somebody leaves who may not come back: sessions end, snapshots and secrets go.

A principal's name is never given to another one. So nobody could use what is left, or end it; and
what runs on for nobody is a risk for all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from k8e import errors
from k8e.sessions.live import Live
from k8e.sessions.secrets import Secrets
from k8e.sessions.snapshots import Snapshots
from k8e.sessions.tasks import Tasks

log = logging.getLogger(__name__)

End = Callable[[Live, str], Coroutine[Any, Any, None]]


class Evictions:
    """Knows who is gone, and removes what is theirs."""

    def __init__(
        self, live: dict[str, Live], snapshots: Snapshots, secrets: Secrets, end: End
    ) -> None:
        self._live = live
        self._snapshots = snapshots
        self._secrets = secrets
        self._end = end
        self._gone: set[str] = set()
        self._tasks = Tasks()

    async def evict(self, owner: str, reason: str) -> int:
        """End all sessions of an owner, also those that are being made; how many there were.

        Once begun it is done to the end, though whoever asked for it goes away: a key may delete
        itself.
        """
        self._gone.add(owner)
        return await self._tasks.to_the_end(self._evict(owner, reason))

    async def _evict(self, owner: str, reason: str) -> int:
        self._secrets.evict(owner)  # first: no session gets one any more
        found = [live for live in self._live.values() if live.session.owner == owner]
        async with asyncio.TaskGroup() as group:
            for live in found:
                group.create_task(self._end(live, reason))
        await self._snapshots.evict(owner)
        return len(found)

    async def check(self, live: Live) -> None:
        """Refuse a session that was being made when its owner went."""
        if live.session.owner in self._gone:
            await self._end(live, "its owner is gone")
            raise errors.Denied("whoever asked for this session is not known any more")

    def check_owner(self, owner: str) -> None:
        """Refuse what somebody began to keep who is gone by now; nothing of it is left."""
        if owner in self._gone:
            self._secrets.evict(owner)
            raise errors.Denied("whoever asked for this is not known any more")

    async def sweep(self, gone: set[str]) -> None:
        """Remove what a gateway before us left of owners of whom we know that they are gone.

        Not of everybody whom nobody knows: the list of keys may have been lost, and put back later.
        """
        owners = {live.session.owner for live in self._live.values()}
        owners |= self._snapshots.owners() | self._secrets.owners()
        for owner in sorted(owners & gone):
            log.warning("%s is no more, so what it left is removed", owner)
            await self.evict(owner, "its owner is gone")
