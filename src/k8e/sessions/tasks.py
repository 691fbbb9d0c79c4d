"""Background work of a gateway, waited for when it leaves; and progress of long work.

The listener travels in a context variable: the work may be done several calls below the function
that set it, and in a task of its own, which inherits the variable.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


log = logging.getLogger(__name__)

T = TypeVar("T")


class Tasks:
    """Background tasks under way, with references that keep them from being collected."""

    def __init__(self, failure: str = "a task failed") -> None:
        """``failure`` is the message that the log gets when a background task fails."""
        self._failure = failure
        self._running: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run it in the background; a failure is logged and ends nothing else."""
        task = self._start(work)
        task.add_done_callback(self._tell)
        return task

    async def to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it to the end, even if the caller leaves: half a change helps no one."""
        task = self._start(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._tell)  # no other code will hear of it
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


STEP = 0.1  # seconds between two reports

Tell = Callable[[int, int], None]


class _Listener:
    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._told = 0.0

    def progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._told + STEP:
            self._told = now
            self._tell(done, total)


_listener: ContextVar[_Listener | None] = ContextVar("listener", default=None)


def listen(tell: Tell) -> None:
    """Report progress to ``tell(done, total)`` in this task and those that it starts."""
    _listener.set(_Listener(tell))


def progress(done: int, total: int = 0) -> None:
    """So many bytes are done, of ``total`` if that is known."""
    listener = _listener.get()
    if listener is not None:
        listener.progress(done, total)
