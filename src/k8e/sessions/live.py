"""A session whose sandbox runs in this gateway: what it is doing, and until when it may."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from k8e.model import Session
from k8e.runtimes.base import Guest
from k8e.sessions.operations import Operation

FIRST_ANSWER = 30.0
"""Seconds that a guest has to answer a call at all, before somebody looks whether it lives."""
IDLE = "it was idle"
"""Why a session ends that nobody uses."""
EXIT_GRACE = 10.0
"""Seconds that a guest has to end an exec after its time-out."""


class Live:
    """One live session. Its owner is told, by ``on_due`` and ``on_overdue``, when to look at it."""

    def __init__(
        self,
        session: Session,
        guest: Guest,
        *,
        on_due: Callable[[Live], object],
        on_overdue: Callable[[Live, Operation], object],
    ) -> None:
        self.session = session
        self.guest = guest
        self.running: dict[Operation, asyncio.TimerHandle] = {}
        self.watcher: asyncio.Task[None] | None = None
        self.ending: asyncio.Task[None] | None = None
        self.policy = asyncio.Lock()
        """Held while what it may reach is changed: kernel, store and session say the same."""
        self.has_background = False
        """Whether programs may run in it that nobody waits for; only its guest knows until when."""
        # Also after a restart: an early end would lose work, a late one costs little.
        self._last_active = time.time()
        self._on_due = on_due
        self._on_overdue = on_overdue
        self._timer: asyncio.TimerHandle | None = None

    # Operations.

    def began(self, operation: Operation, timeout: float) -> None:
        """An operation runs; ``timeout`` is an exec's own, 0 for none."""
        self._look_after(operation, FIRST_ANSWER, timeout)

    def _look_after(self, operation: Operation, seconds: float, timeout: float) -> None:
        loop = asyncio.get_running_loop()
        self.running[operation] = loop.call_later(seconds, self._look, operation, timeout)

    def _look(self, operation: Operation, timeout: float) -> None:
        """Time has passed: an answered operation gets the time that it asked for."""
        if operation.answered and not timeout:
            return
        if operation.answered and timeout > 0:
            self._look_after(operation, max(0.0, timeout + EXIT_GRACE - FIRST_ANSWER), -1)
            return
        self._on_overdue(self, operation)
        if operation in self.running:
            self._look_after(operation, FIRST_ANSWER, -1 if operation.answered else timeout)

    def finished(self, operation: Operation) -> None:
        timer = self.running.pop(operation, None)
        if timer is not None:
            timer.cancel()
        self._last_active = time.time()

    def touch(self) -> None:
        """It was seen to be in use just now."""
        self._last_active = time.time()

    # Time.

    def schedule(self) -> None:
        """Wake up when the session may have expired."""
        self.unschedule()
        idle_from = time.time() if self.running else self._last_active
        due = min(self.session.expires_at, idle_from + self.session.spec.idle_timeout)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, due - time.time()), self._on_due, self)

    def unschedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def why_over(self) -> str:
        """Why the session has to end now; empty if it has not."""
        now = time.time()
        if now >= self.session.expires_at:
            return "its lifetime was over"
        if not self.running and now >= self._last_active + self.session.spec.idle_timeout:
            return IDLE
        return ""

    def stop(self) -> None:
        """Stop looking after it, without ending it."""
        self.unschedule()
        for timer in self.running.values():
            timer.cancel()
        if self.watcher is not None:
            self.watcher.cancel()
