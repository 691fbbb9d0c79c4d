"""Work queues: keys that wait for a worker, each once, with back-off after failures."""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from k8e.kubernetes.api import CONFLICT, ApiError, ApiUnreachable

log = logging.getLogger(__name__)
K = TypeVar("K")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 60.0
_LONG_WAIT = 86_400.0
"""The longest a timer runs: the loop's clock and the wall's drift apart."""
_SPARE = 1000
"""Times that were replaced or forgotten, and are still kept."""


class WorkQueue(Generic[K]):
    """Keys to look at; a key is with one worker at a time, and never waits twice.

    A key that is added while a worker has it is looked at once more after that.
    """

    def __init__(self, name: str, work: Callable[[K], Awaitable[float | None]]) -> None:
        """``work`` looks at a key; it may return after how many seconds to look again."""
        self.name = name
        self._work = work
        self._ready: deque[K] = deque()
        self._patient: deque[K] = deque()
        self._queued: set[K] = set()
        self._busy: set[K] = set()
        self._again: set[K] = set()
        self._failures: dict[K, int] = {}
        self._later: list[tuple[float, int, K]] = []
        self._due: dict[K, float] = {}
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._wake = asyncio.Semaphore(0)

    def add(self, key: K, *, patient: bool = False) -> None:
        """Add a key; a ``patient`` one is looked at when no other waits."""
        if key in self._busy:
            self._again.add(key)
        elif key not in self._queued:
            self._queued.add(key)
            (self._patient if patient else self._ready).append(key)
            self._wake.release()

    def add_after(self, key: K, seconds: float) -> None:
        """Add a key later; of several times, the earliest counts."""
        loop = asyncio.get_running_loop()
        due = loop.time() + min(max(seconds, 0.0), _LONG_WAIT)
        if self._due.get(key, float("inf")) <= due:
            return
        self._due[key] = due
        self._count += 1
        heapq.heappush(self._later, (due, self._count, key))
        if len(self._later) > 2 * len(self._due) + _SPARE:
            self._later = [one for one in self._later if self._due.get(one[2]) == one[0]]
            heapq.heapify(self._later)
        self._set_timer()

    def forget(self, key: K) -> None:
        """Do not come back to a key whose object is gone: its time may be a day away."""
        self._due.pop(key, None)
        self._failures.pop(key, None)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._later:
            self._timer = asyncio.get_running_loop().call_at(self._later[0][0], self._on_timer)

    def _on_timer(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._later and self._later[0][0] <= now:
            due, _, key = heapq.heappop(self._later)
            if self._due.get(key) == due:  # else an earlier time has replaced this one
                del self._due[key]
                self.add(key)
        self._set_timer()

    async def run(self, workers: int) -> None:
        """Work, for ever."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(self._run_worker())
        finally:
            if self._timer is not None:
                self._timer.cancel()

    async def _run_worker(self) -> None:
        while True:
            await self._wake.acquire()
            key = (self._ready or self._patient).popleft()
            self._queued.discard(key)
            self._busy.add(key)
            try:
                again = await self._try(key)
            finally:
                self._busy.discard(key)
            if key in self._again:
                self._again.discard(key)
                self.add(key)
            if again is not None:
                self.add_after(key, again)

    async def _try(self, key: K) -> float | None:
        try:
            again = await self._work(key)
        except ApiError as error:
            if error.status == CONFLICT:
                log.debug("%s %s: %s", self.name, key, error)
            else:
                log.warning("%s %s: %s", self.name, key, error)
            return self._pause(key)
        except (ApiUnreachable, TimeoutError) as error:
            log.warning("%s %s: %s", self.name, key, error)
            return self._pause(key)
        except Exception:
            log.exception("%s %s: this is a defect", self.name, key)
            return self._pause(key)
        self._failures.pop(key, None)
        return again

    def _pause(self, key: K) -> float:
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        pause = min(_FIRST_PAUSE * 2 ** min(count, 20), _LONGEST_PAUSE)
        return pause * (0.75 + random.random() / 2)  # noqa: S311 - spread, not a secret

    def __len__(self) -> int:
        return len(self._ready) + len(self._patient)
