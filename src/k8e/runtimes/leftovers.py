"""Sandboxes that could not be removed yet, and their removal in further tries.

A process that waits in the kernel does not end when it is killed, and as long as it is there its
control groups, its disk and its uids are in use. Such a sandbox keeps its folder, with a note of
what is left, and its removal is tried again: by this gateway, ever more seldom, or by the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

from k8e import errors
from k8e.runtimes.base import Leftover, NotRemoved

log = logging.getLogger(__name__)

NOTE = "left.json"
FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0  # seconds between two tries
_MOST_DOUBLINGS = 6
MOST_WORDS = 500  # characters of a note that are believed


def delay_of(item: Leftover) -> float:
    """Seconds from the last try to the next one."""
    return min(LONGEST_DELAY, FIRST_DELAY * 2 ** min(item.tries - 1, _MOST_DOUBLINGS))


class Leftovers:
    """The leftovers of one host. Used on the event loop only."""

    def __init__(self, sandboxes: Path) -> None:
        self._sandboxes = sandboxes
        self._known: dict[str, Leftover] = {}
        self.on_note: list[Callable[[Leftover], None]] = []
        """Called when something could not be removed."""

    def __contains__(self, sandbox_id: str) -> bool:
        return sandbox_id in self._known

    def listing(self) -> list[Leftover]:
        """All leftovers, the oldest first."""
        return sorted(self._known.values(), key=lambda item: (item.since, item.sandbox_id))

    def load(self) -> None:
        """Read what earlier gateways could not remove."""
        for file in self._sandboxes.glob(f"sb-*/{NOTE}"):
            with contextlib.suppress(*errors.UNREADABLE):
                data: dict[str, Any] = json.loads(file.read_text("utf-8"))
                what = str(data["what"])[:MOST_WORDS]
                found = Leftover(file.parent.name, what, float(data["since"]))
                self._known[found.sandbox_id] = found

    def note(self, sandbox_id: str, what: str) -> None:
        """Remember a sandbox that could not be removed, and ``what`` is left of it."""
        known = self._known.get(sandbox_id)
        since, tries = (known.since, known.tries + 1) if known else (time.time(), 1)
        found = self._known[sandbox_id] = Leftover(sandbox_id, what, since, tries)
        with contextlib.suppress(OSError):  # a full disk, or no folder: then by what else there is
            (self._sandboxes / sandbox_id / NOTE).write_text(json.dumps(asdict(found)), "utf-8")
        for tell in self.on_note:
            tell(found)

    def forget(self, sandbox_id: str) -> None:
        """Forget a sandbox that is removed completely."""
        self._known.pop(sandbox_id, None)


class RemovalRetries:
    """Retries the removal of leftovers, each after its own delay; one at a time."""

    def __init__(
        self, leftovers: Leftovers, purge: Callable[[str], Coroutine[Any, Any, None]]
    ) -> None:
        self._leftovers = leftovers
        self._purge = purge
        self._turn = asyncio.Lock()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin with the leftovers of earlier gateways."""
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
        self._timers[item.sandbox_id] = loop.call_later(
            delay_of(item), self._begin, item.sandbox_id
        )

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
                    await self._purge(sandbox_id)
                    log.info("nothing is left of sandbox %s", sandbox_id)
            except Exception as error:  # whatever it is, the next try may do better
                log.exception("removing sandbox %s failed", sandbox_id)
                self._leftovers.note(sandbox_id, f"what failed to be removed: {error}")
