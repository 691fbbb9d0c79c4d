"""The ready sandboxes of one recipe: started ahead, watched while they wait, each taken once."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Protocol

from k8e import errors
from k8e.runtimes.base import Guest
from k8e.sessions.launching import Launcher
from k8e.sessions.recipes import Recipe
from k8e.sessions.sizing import Demand, Sizes

log = logging.getLogger(__name__)

QUIET, SOON = 0.3, 0.05
"""Seconds without a claim after which refilling begins, and those if less than half is left:
whoever claims needs the CPUs first."""
PATIENCE = 2.0
"""Seconds after which it begins even if claims keep coming."""
ROOM_SECONDS = 2.0
"""Seconds until the next look, where others have what this shelf would like to keep too."""
LONGEST_PAUSE = 60.0
"""Seconds until the next try, once several have failed."""


class Room(Protocol):
    """What all shelves of a gateway share: how many sandboxes may wait in all."""

    def share_of(self, shelf: Shelf) -> int:
        """How many of them a shelf may have."""
        ...

    def make_room(self, shelf: Shelf) -> int:
        """Have others give up what is above their share; how many more the shelf may start now."""
        ...


class Shelf:
    """Keeps as many sandboxes ready as its sizes, the demand and its share of the room say."""

    def __init__(self, recipe: Recipe, sizes: Sizes, launcher: Launcher, room: Room) -> None:
        self.recipe = recipe
        self.sizes = sizes
        self.hits, self.misses = 0, 0
        self.failure = ""
        """Why the newest try to start one failed; empty after a success."""
        self.left_out: tuple[str, ...] = ()
        """What sandboxes lack of the interpreters and modules that they should have, and why."""
        self._launcher = launcher
        self._room = room
        self._demand = Demand()
        self._ready: dict[Guest, asyncio.Task[None]] = {}  # and who watches each of them
        self._making: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._failures = 0
        self._retry_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0  # when refilling begins at the latest; 0 while nothing is planned
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def wish(self) -> int:
        """How many it would keep if it had the room for itself."""
        return self.sizes.clamp(self._demand.greatest_rush(time.monotonic()))

    @property
    def target(self) -> int:
        return self._room.share_of(self)

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def held(self) -> int:
        """How many wait, or will."""
        return len(self._ready) + len(self._making)

    @property
    def last_used(self) -> float:
        return self._demand.newest()

    def describe(self) -> dict[str, Any]:
        return {
            "template": self.recipe.template,
            "runtime": self.recipe.runtime,
            "min": self.sizes.min,
            "max": self.sizes.max,
            "target": self.target,
            "ready": self.ready,
            "starting": len(self._making),
            "hits": self.hits,
            "misses": self.misses,
            "failure": self.failure,
            "left_out": list(self.left_out),
        }

    def succeed(self, before: Shelf) -> None:
        """Go on in the place of another one: whoever claimed from that will claim from this."""
        self._demand = before._demand
        self.hits, self.misses = before.hits, before.misses

    # Taking.

    def take(self, *, again: bool = False) -> Guest | None:
        """A sandbox that is the caller's from now on; None if none is ready.

        Who takes ``again``, because the one before was no good, is no new demand.
        """
        if not again:
            self._demand.claimed(time.monotonic())
        if not self._ready:
            self._plan(SOON)
            return None
        guest = next(iter(self._ready))  # the oldest
        self._ready.pop(guest).cancel()
        self._plan(QUIET if 2 * len(self._ready) >= self.target else SOON)
        return guest

    def count(self, outcome: str) -> None:
        """What came of a claim."""
        self.hits += outcome == "hit"
        self.misses += outcome == "miss"

    # Filling.

    def resize(self, sizes: Sizes, after: float = 0) -> None:
        self.sizes = sizes
        self.failure, self._failures = "", 0
        self._changed.set()
        if after:
            self._wake_at(time.monotonic() + after)
        else:
            self.fill()

    def fill(self) -> None:
        """Start what is missing, and discard what is too much."""
        self._unplan()
        if self._closed:
            return
        target = self.target
        self.shed(target)
        missing = target - self.held
        may = min(missing, self._room.make_room(self)) if missing > 0 else 0
        for _ in range(may if not self._failures else min(may, 1)):
            self._start(self._make_one(), self._making)
        # After a failure, what becomes of this try says when the next one is.
        if (may < missing or target < self.wish) and not (self._failures and may > 0):
            self._wake_at(time.monotonic() + ROOM_SECONDS)
        self._plan_to_forget()

    def shed(self, target: int) -> None:
        """Discard what is ready above a number."""
        while len(self._ready) > target:
            self._discard(next(reversed(self._ready)))

    async def filled(self) -> None:
        """Wait until as many are ready as it keeps at least, or until starting them fails."""
        while len(self._ready) < min(self.sizes.min, self.target) and not self._closed:
            if self.failure:
                raise errors.GuestFailed(
                    f"the pool cannot be filled: {self.failure}",
                    hint="k8e pool shows the newest try",
                )
            self._changed.clear()
            await self._changed.wait()

    def _plan(self, seconds: float) -> None:
        """Fill after a moment of quiet; after a failure, when it is time for the next try."""
        if self._closed or (self._failures and self._timer is not None):
            return
        now = time.monotonic()
        self._due = self._due or now + PATIENCE
        self._wake_at(min(now + seconds, self._due))

    def _plan_to_forget(self) -> None:
        """Look again when a rush is forgotten, if it is why there are so many."""
        if self._timer is None and self.target > self.sizes.min:
            self._wake_at(self._demand.forgets_at())

    def _wake_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        seconds = max(0.0, when - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(seconds, self.fill)

    def _unplan(self) -> None:
        self._due = 0.0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _make_one(self) -> None:
        try:
            guest, self.left_out = await self._launcher.prepare(self.recipe)
        except Exception as error:
            self._failed(str(error) or repr(error))
            return
        if self._closed or len(self._ready) >= self.target:
            self._start(self._launcher.discard(guest), self._leaving)
            return
        task = asyncio.current_task()
        if task is not None:
            self._making.discard(task)  # whoever waits for it may look at once
        had_failed, self.failure, self._failures = self._failures, "", 0
        self._ready[guest] = asyncio.create_task(self._watch(guest))
        self._changed.set()
        if had_failed:
            self._wake_at(time.monotonic())  # one was a try; the rest may follow

    def _failed(self, why: str) -> None:
        self.failure = why
        self._changed.set()
        now = time.monotonic()
        if self._failures and now < self._retry_at:
            return  # of those that were tried at once
        self._failures += 1
        if self._failures == 1:
            log.warning("a sandbox of template %s did not start: %s", self.recipe.template, why)
        if not self._closed:
            self._retry_at = now + min(LONGEST_PAUSE, 2.0 ** min(self._failures - 1, 10))
            self._wake_at(self._retry_at)

    async def _watch(self, guest: Guest) -> None:
        """Replace a sandbox that ends while it waits."""
        reason = await guest.wait()
        del self._ready[guest]
        self._start(self._launcher.discard(guest), self._leaving)
        self._failed(reason)

    # Ending.

    def _start(self, work: Any, among: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work)
        among.add(task)
        task.add_done_callback(lambda done: self._ended(done, among))

    def _ended(self, task: asyncio.Task[None], among: set[asyncio.Task[None]]) -> None:
        among.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a pool's task failed", exc_info=task.exception())

    def _discard(self, guest: Guest) -> None:
        self._ready.pop(guest).cancel()
        self._start(self._launcher.discard(guest), self._leaving)

    def close(self) -> None:
        """Keep nothing any more; :meth:`closed` waits for the end of what there was."""
        self._closed = True
        self._unplan()
        self._changed.set()
        for task in self._making:
            task.cancel()
        for guest in list(self._ready):
            self._discard(guest)

    async def closed(self) -> None:
        while tasks := [*self._making, *self._leaving]:
            await asyncio.wait(tasks)
