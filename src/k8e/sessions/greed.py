"""Ends sessions whose sandbox uses resources of the host that no limit of the kernel counts.

The session's runtime knows which resources these are and how to find them: with ``container`` it is
locks on files; gVisor keeps everything in memory that is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from k8e.runtimes.registry import Runtimes
from k8e.sessions.live import Live

log = logging.getLogger(__name__)

SECONDS = 2.0
"""Between two looks. In that time a program may take some hundred megabytes."""


class GreedWatch:
    """Searches the sandboxes of ``live`` for such use, for as long as it runs."""

    def __init__(
        self,
        runtimes: Runtimes,
        live: dict[str, Live],
        end: Callable[[Live, str], Awaitable[None]],
    ) -> None:
        self._runtimes = runtimes
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
                await self._end_greedy()
            except Exception:
                log.exception("sandboxes could not be searched for what no limit counts")

    async def _end_greedy(self) -> None:
        watched = {live.session.sandbox_id: live for live in self._live.values()}
        if watched:
            asked = [(name, live.session.runtime) for name, live in watched.items()]
            for sandbox_id, reason in (await self._runtimes.find_greedy(asked)).items():
                await self._end(watched[sandbox_id], reason)
