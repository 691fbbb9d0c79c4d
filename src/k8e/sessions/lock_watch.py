"""Ends sessions that hold more locks on files than anybody needs.

Only where programs use the host's own kernel: gVisor keeps locks in memory that is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from k8e.runtimes import cgroups, locks
from k8e.sessions.live import Live

log = logging.getLogger(__name__)

SECONDS = 2.0
"""Between two looks. In that time a program may take some hundred megabytes."""
TOO_MANY = "it held more than {} locks on files, which take memory of the host that no limit counts"


class LockWatch:
    """Looks at the sessions of ``live``, as long as it runs."""

    def __init__(self, live: dict[str, Live], end: Callable[[Live, str], Awaitable[None]]) -> None:
        self._live = live
        self._end = end
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(SECONDS)
            try:
                await self.look()
            except Exception:
                log.exception("the locks of sandboxes could not be counted")

    async def look(self) -> None:
        """Count once, and end whoever holds too many."""
        watched = [item for item in self._live.values() if item.session.runtime == "container"]
        if not watched or await asyncio.to_thread(locks.count_on_host) <= locks.MOST:
            return
        for live in watched:
            held = await asyncio.to_thread(_held, live.session.sandbox_id)
            if held > locks.MOST:
                await self._end(live, TOO_MANY.format(locks.MOST))


def _held(sandbox_id: str) -> int:
    processes, _ = cgroups.what_is_left(sandbox_id)
    return locks.count_held(processes)
