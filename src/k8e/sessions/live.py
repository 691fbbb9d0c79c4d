"""A session whose sandbox runs in this gateway: its operations and its deadlines.

It counts from the start of the machine, also while that sleeps. Sandboxes never outlive a machine's
run, so a deadline by this clock means the same to every gateway that they ever have.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from k8e import errors, link
from k8e.model import Phase, Session
from k8e.runtimes.base import Guest
from k8e.sessions.limits import LimitWatch

LONGEST_NAP = 60.0
"""Seconds: timers of the event loop stand still while a machine sleeps, so none is set for long."""
DRIFT = 2.0
"""Seconds that a stored date may be off before it is computed again."""


def boot_time() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_offset() -> float:
    """The difference between a deadline and a Unix time, by the machine's present date."""
    return boot_time() - time.time()


def date_of(deadline: float, told: float = 0) -> float:
    """The date of a deadline; the one ``told`` before, unless the machine's date was changed."""
    date = deadline - boot_offset()
    return told if abs(date - told) < DRIFT else date


FIRST_ANSWER = 30.0
"""Seconds that a guest has to answer a call, before the gateway checks whether it lives."""
IDLE = "it was idle"
"""Why a session ends that is not used."""
EXIT_GRACE = 10.0
"""Seconds that a guest has to end an exec after its time-out."""


class RunningOperation(Protocol):
    """An operation as its session sees it."""

    @property
    def done(self) -> bool: ...

    @property
    def answered(self) -> bool:
        """Whether the guest has answered at all."""
        ...

    def fail(self, error: errors.K8eError) -> None:
        """End the operation from the gateway's side."""
        ...


class Live:
    """One live session. It calls ``on_due`` and ``on_overdue`` when its owner has to examine it."""

    def __init__(
        self,
        session: Session,
        guest: Guest,
        *,
        on_due: Callable[[Live], object],
        on_overdue: Callable[[Live, RunningOperation], object],
    ) -> None:
        self.session = session
        self.guest = guest
        self.limits = LimitWatch(guest.limit_hits, session.spec.limits)
        self.watched = 0
        """How many execs whose clients have left are watched, so that their end is noted."""
        self.refusals_noted = 0
        """How many of the refusals of its network are in its events."""
        self.running: dict[RunningOperation, tuple[float, float]] = {}
        """Each with the loop's time at which to look at it, and what its time-out is by then."""
        self.watcher: asyncio.Task[None] | None = None
        self.ending: asyncio.Task[None] | None = None
        self.left = ""
        """What of its sandbox could not be removed when it ended, in words."""
        self.policy = asyncio.Lock()
        """Held while what it may reach is changed: kernel, store and session say the same."""
        self.has_background = False
        """Whether background programs may run in it; only its guest knows until when."""
        self.parent: Live | None = None
        self.children: set[Live] = set()
        """Sub-agents: they share its workspace, end with it, and keep it from being idle."""
        self.turning = asyncio.Lock()
        """Held while the sandbox is being frozen, thawed or ended."""
        self.turns = 0
        """How often it was frozen or thawed: what was asked before says nothing about now."""
        # Also after a restart: an early end would lose work, a late one costs little.
        self._last_active = boot_time()
        self._on_due = on_due
        self._on_overdue = on_overdue
        self._timer: asyncio.TimerHandle | None = None
        # One timer for all operations: most end long before it fires.
        self._check_timer: asyncio.TimerHandle | None = None

    # Operations.

    def began(self, operation: RunningOperation, timeout: float) -> None:
        """Note that an operation runs; ``timeout`` is an exec's own, 0 for none."""
        self._watch_until(operation, FIRST_ANSWER, timeout)

    def _watch_until(self, operation: RunningOperation, seconds: float, timeout: float) -> None:
        due = asyncio.get_running_loop().time() + seconds
        self.running[operation] = (due, timeout)
        if self._check_timer is None or due < self._check_timer.when():
            self._check_at(due)

    def _check_at(self, due: float) -> None:
        if self._check_timer is not None:
            self._check_timer.cancel()
        self._check_timer = asyncio.get_running_loop().call_at(due, self._check_due)

    def _check_due(self) -> None:
        self._check_timer = None
        now = asyncio.get_running_loop().time()
        for operation, (due, timeout) in list(self.running.items()):
            if due <= now:
                self._check(operation, timeout)
        first = min((due for due, _ in self.running.values()), default=math.inf)
        if first < math.inf:
            self._check_at(first)

    def _check(self, operation: RunningOperation, timeout: float) -> None:
        """Examine the operations after a while; an answered one gets the time that it asked for."""
        if operation.answered and not timeout:
            self.running[operation] = (math.inf, 0)
            return
        if self.paused:
            self._watch_until(operation, FIRST_ANSWER, timeout)
            return
        if operation.answered and timeout > 0:
            self._watch_until(operation, max(0.0, timeout + EXIT_GRACE - FIRST_ANSWER), -1)
            return
        self._on_overdue(self, operation)
        if operation in self.running:
            self._watch_until(operation, FIRST_ANSWER, -1 if operation.answered else timeout)

    def finished(self, operation: RunningOperation) -> None:
        self.running.pop(operation, None)
        self.touch()

    def touch(self) -> None:
        """Note that it is in use now, and its parent with it."""
        self._last_active = boot_time()
        if self.parent is not None:
            self.parent.touch()

    # Phases.

    @property
    def paused(self) -> bool:
        return self.session.phase is Phase.PAUSED

    @property
    def in_use(self) -> bool:
        """Whether its idle time stands still: something runs, or is kept for later."""
        return bool(self.running) or self.paused or any(child.in_use for child in self.children)

    @property
    def may_work(self) -> bool:
        """Whether background programs may run in it or its children."""
        return self.has_background or any(child.has_background for child in self.children)

    def join(self, parent: Live | None) -> None:
        """Be a child of ``parent``, where there is one."""
        self.parent = parent
        if parent is not None:
            parent.children.add(self)

    def leave(self) -> None:
        """Leave the parent, whose idle time begins now at the earliest."""
        if self.parent is not None:
            self.parent.children.discard(self)
            self.parent.touch()

    def turn(self, phase: Phase) -> None:
        """Note that it is paused, or active again, from now on."""
        self.session = replace(self.session, phase=phase)
        self.turns += 1
        self.touch()
        self.schedule()

    # Time.

    def schedule(self) -> None:
        """Set a timer for the moment when the session may have expired."""
        self.unschedule()
        now = boot_time()
        idle_from = now if self.in_use else self._last_active
        due = min(self.session.deadline, idle_from + self.session.spec.idle_timeout)
        seconds = min(max(0.0, due - now), LONGEST_NAP)
        self._timer = asyncio.get_running_loop().call_later(seconds, self._on_due, self)

    def unschedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def why_over(self) -> str:
        """Why the session has to end now; empty if it need not."""
        now = boot_time()
        if now >= self.session.deadline:
            return "its lifetime was over"
        if not self.in_use and now >= self._last_active + self.session.spec.idle_timeout:
            return IDLE
        return ""

    def stop(self) -> None:
        """Stop watching it, without ending it."""
        self.unschedule()
        if self._check_timer is not None:
            self._check_timer.cancel()
        if self.watcher is not None:
            self.watcher.cancel()


ANSWER_SECONDS = 15.0


async def count_background_runs(guest: Guest, seconds: float = ANSWER_SECONDS) -> int:
    """Ask the guest; a guest that does not answer, or answers nonsense, has none that count."""
    try:
        async with asyncio.timeout(seconds):
            connected = await guest.connect()
            told: Any = await link.request(connected, {"op": "execs"}, seconds=seconds)
        return sum(bool(item["background"] and item["code"] is None) for item in told["execs"])
    except (errors.K8eError, OSError, KeyError, TypeError):  # a time-out is an OSError
        return 0
