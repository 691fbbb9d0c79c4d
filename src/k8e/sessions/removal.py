"""Goes on with the removal of sandboxes that resisted it, until nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from k8e.runtimes.base import NotRemoved
from k8e.runtimes.leftovers import Leftover, Leftovers
from k8e.runtimes.registry import Runtimes

log = logging.getLogger(__name__)


class Removal:
    """Tries again what is left, each after its own delay; one at a time."""

    def __init__(self, leftovers: Leftovers, runtimes: Runtimes) -> None:
        self._leftovers = leftovers
        self._runtimes = runtimes
        self._turn = asyncio.Lock()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin with what an earlier gateway left."""
        self._leftovers.on_note.append(self._schedule)
        for item in self._leftovers.listing():
            self._schedule(item)

    async def stop(self) -> None:
        """Leave the rest to the next gateway."""
        if self._schedule in self._leftovers.on_note:  # else it was never started
            self._leftovers.on_note.remove(self._schedule)
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _schedule(self, item: Leftover) -> None:
        known = self._timers.get(item.sandbox_id)
        if known is not None:
            known.cancel()
        loop = asyncio.get_running_loop()
        self._timers[item.sandbox_id] = loop.call_later(item.delay, self._begin, item.sandbox_id)

    def _begin(self, sandbox_id: str) -> None:
        self._timers.pop(sandbox_id, None)
        task = asyncio.create_task(self._try(sandbox_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _try(self, sandbox_id: str) -> None:
        async with self._turn:
            if sandbox_id not in self._leftovers:
                return
            try:
                with contextlib.suppress(NotRemoved):  # noted, and so scheduled again
                    await self._runtimes.purge(sandbox_id)
                    log.info("nothing is left of sandbox %s", sandbox_id)
            except Exception as error:  # whatever it is, the next try may do better
                log.exception("removing sandbox %s failed", sandbox_id)
                self._leftovers.note(sandbox_id, f"what failed to be removed: {error}")
