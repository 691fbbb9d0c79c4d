"""Work that goes on beside everything else, and is waited for when the gateway leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class Tasks:
    """What is under way; nothing of it is forgotten by the event loop."""

    def __init__(self, failure: str = "a task failed") -> None:
        """``failure`` is what the log says of one that nobody waits for."""
        self._failure = failure
        self._running: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run it for nobody; its failure is told and ends nothing but itself."""
        task = self._start(work)
        task.add_done_callback(self._tell)
        return task

    async def to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it to the end, also if the caller leaves: half a change is none that anybody wants."""
        task = self._start(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._tell)  # nobody else will hear of it
            raise

    async def wait(self) -> None:
        """Wait for all that is under way."""
        if self._running:
            await asyncio.wait(self._running)

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def _tell(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("%s", self._failure, exc_info=task.exception())
