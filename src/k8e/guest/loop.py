"""The guest's event loop: epoll, timers, and jobs that take turns.

Not ``selectors`` or ``asyncio``: importing those costs more than everything else the guest does
before it can answer.
"""

from __future__ import annotations

import os
import select
import sys
import time
from heapq import heappop, heappush
from typing import Any, Callable

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
MAX_COMPLAINTS = 20  # tracebacks that are printed; a failure may repeat for ever


class Timer:
    """A callback that is due at a time; ``cancel`` makes it a no-op."""

    __slots__ = ("callback", "order", "when")

    def __init__(self, when: float, order: int, callback: Callable[[], object]) -> None:
        self.when = when
        self.order = order
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None

    def __lt__(self, other: Timer) -> bool:
        return (self.when, self.order) < (other.when, other.order)


class Loop:
    """Runs callbacks for ready descriptors and due timers, forever."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], object]] = {}
        self._unregistered: dict[int, Callable[[int], object]] = {}
        self._timers: list[Timer] = []
        self._jobs: list[Any] = []
        self._closing: list[int] = []
        self._order = 0
        self._complaints = 0

    def watch(self, fd: int, events: int, handler: Callable[[int], object]) -> None:
        """Call ``handler(events)`` whenever ``fd`` is ready; replaces an earlier watch."""
        self._unregistered.pop(fd, None)
        if fd in self._handlers:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def watch_soon(self, fd: int, handler: Callable[[int], object]) -> None:
        """Watch ``fd`` for reading, from the end of this turn on.

        A descriptor that is unwatched before then costs no system call: that holds for the output
        of most programs if many are started at once.
        """
        self._unregistered[fd] = handler

    def unwatch(self, fd: int) -> None:
        if self._unregistered and self._unregistered.pop(fd, None) is not None:
            return
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def forget(self, fd: int) -> None:
        """``unwatch`` for what is closed in this turn and open nowhere else: the kernel knows."""
        self._unregistered.pop(fd, None)
        self._handlers.pop(fd, None)

    def close_soon(self, fd: int) -> None:
        """``forget`` it, and close it at the end of this turn, when the handlers have run."""
        self.forget(fd)
        self._closing.append(fd)

    def later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        self._order += 1
        timer = Timer(time.monotonic() + seconds, self._order, callback)
        heappush(self._timers, timer)
        return timer

    def add_job(self, job: Any) -> None:
        """Resume the generator ``job`` once per turn until it ends; it must not block."""
        self._jobs.append(job)

    def run(self) -> None:
        while True:
            self.turn()

    def turn(self) -> None:
        """Wait for the next events and handle them."""
        if self._unregistered:
            self._register()
        for fd, events in self._epoll.poll(self._patience()):
            handler = self._handlers.get(fd)
            if handler is not None:
                self._attempt(handler, events)
        now = time.monotonic()
        while self._timers and self._timers[0].when <= now:
            callback = heappop(self._timers).callback
            if callback is not None:
                self._attempt(callback)
        if self._jobs:
            jobs, self._jobs = self._jobs, []
            self._jobs += [job for job in jobs if self._attempt(_resume_job, job)]
        while self._closing:
            self._attempt(os.close, self._closing.pop())

    def _register(self) -> None:
        waiting, self._unregistered = self._unregistered, {}
        for fd, handler in waiting.items():
            self._attempt(self.watch, fd, READ, handler)

    def _attempt(self, work: Callable[..., object], *arguments: object) -> object:
        """Call ``function``; no exception of it may end PID 1, and the whole sandbox with it."""
        try:
            return work(*arguments)
        except Exception as error:
            self._complaints += 1
            if self._complaints <= MAX_COMPLAINTS:
                # Unlike the module traceback, this needs no import.
                sys.excepthook(type(error), error, error.__traceback__)
            return None

    def _patience(self) -> float:
        if self._jobs:
            return 0
        while self._timers and self._timers[0].callback is None:
            heappop(self._timers)
        if not self._timers:
            return -1
        return max(0.0, self._timers[0].when - time.monotonic())


def _resume_job(job: Any) -> bool:
    """Resume a job; return whether it wants another turn."""
    return next(job, True) is None
