"""The warm pool: sandboxes that wait for sessions, for each template and runtime that is used.

A member has never been used, is given to one session and never comes back. It has a network that
leads nowhere and an empty workspace; its session's environment, limits and policy are bound when it
is claimed.

The pool keeps sandboxes of the default template, of templates that ask for it, and of recipes that
sessions were made from of late.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from k8e import errors, metrics
from k8e.model import DEFAULT_TEMPLATE
from k8e.runtimes.base import Guest
from k8e.runtimes.registry import Runtimes
from k8e.sessions import launch
from k8e.sessions.demand import Demand, Sizes, check_total, share
from k8e.sessions.launch import Launcher, Recipe
from k8e.sessions.tasks import Spawn
from k8e.sessions.templates import Templates
from k8e.settings import Settings
from k8e.templates import Template

log = logging.getLogger(__name__)

QUIET, SOON = 0.3, 0.05
"""Seconds without a claim after which refilling begins, and those if less than half is left:
the session that claimed needs the CPUs first."""
PATIENCE = 2.0
"""Seconds after which it begins even if claims keep coming."""
ROOM_SECONDS = 2.0
"""Seconds until the next look, if other pools hold the room that this one would use."""
LONGEST_PAUSE = 60.0
"""Seconds until the next try, after several failures."""


class PoolRoom(Protocol):
    """The room that all template pools of a gateway share: how many sandboxes may wait in all."""

    def share_of(self, shelf: TemplatePool) -> int:
        """The number of sandboxes that one template pool may have."""
        ...

    def make_room(self, shelf: TemplatePool) -> int:
        """Make others give up what is above their share; return how many may be started now."""
        ...


class TemplatePool:
    """Ready sandboxes of one recipe: as many as its sizes, demand and share of the room allow."""

    def __init__(self, recipe: Recipe, sizes: Sizes, launcher: Launcher, room: PoolRoom) -> None:
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
        """How many sandboxes it would keep if there were no other pools."""
        return self.sizes.clamp(self._demand.greatest_rush(time.monotonic()))

    @property
    def target(self) -> int:
        return self._room.share_of(self)

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def held(self) -> int:
        """How many sandboxes are ready or being started."""
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

    def succeed(self, before: TemplatePool) -> None:
        """Replace another pool: its claims count here from now on."""
        self._demand = before._demand
        self.hits, self.misses = before.hits, before.misses

    # Taking.

    def take(self, *, again: bool = False) -> Guest | None:
        """Give a ready sandbox to the caller; None if there is none.

        Taking ``again``, because the one before was unusable, is not new demand.
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
        """Count a claim as a hit or a miss."""
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
        """Start missing sandboxes, and discard surplus ones."""
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
        """Discard ready sandboxes above this number."""
        while len(self._ready) > target:
            self._discard(next(reversed(self._ready)))

    async def filled(self) -> None:
        """Wait until the minimum is ready, or until starting it fails."""
        while len(self._ready) < min(self.sizes.min, self.target) and not self._closed:
            if self.failure:
                raise errors.GuestFailed(
                    f"the pool cannot be filled: {self.failure}",
                    hint="k8e pool shows the newest try",
                )
            self._changed.clear()
            await self._changed.wait()

    def _plan(self, seconds: float) -> None:
        """Schedule the next filling: after a pause in claims, or after a failure's back-off."""
        if self._closed or (self._failures and self._timer is not None):
            return
        now = time.monotonic()
        self._due = self._due or now + PATIENCE
        self._wake_at(min(now + seconds, self._due))

    def _plan_to_forget(self) -> None:
        """Schedule a look for the time when past demand, which keeps the pool large, has faded."""
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
            self._making.discard(task)  # so that :meth:`filled` sees it at once
        had_failed, self.failure, self._failures = self._failures, "", 0
        self._ready[guest] = asyncio.create_task(self._watch(guest))
        self._changed.set()
        if had_failed:
            self._wake_at(time.monotonic())  # the first start was a trial; now the others may start

    def _failed(self, why: str) -> None:
        self.failure = why
        self._changed.set()
        now = time.monotonic()
        if self._failures and now < self._retry_at:
            return  # of a batch that was started together
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
        """Stop keeping sandboxes; :meth:`closed` waits until they are removed."""
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


FILL_SECONDS = 300.0


class WarmPool:
    """The template pools of a gateway."""

    def __init__(self, launcher: Launcher, total: int) -> None:
        """At most ``total`` sandboxes are ready at once, over all templates."""
        self.total = total
        self._launcher = launcher
        self._shelves: dict[tuple[str, str], TemplatePool] = {}
        self._old: set[TemplatePool] = set()  # whose sandboxes are still being removed
        self.stopped = False

    def keep(self, recipe: Recipe, sizes: Sizes, *, after: float = 0) -> TemplatePool:
        """Keep sandboxes of this recipe ready from now on; begin after ``after`` seconds."""
        key = recipe.template, recipe.runtime
        shelf = self._shelves.get(key)
        if self.stopped:
            raise errors.GatewayUnreachable("the gateway is being stopped", hint="try again")
        if shelf is None or shelf.recipe != recipe:
            shelf = self._renew(key, recipe, sizes)
        shelf.resize(sizes, after)
        return shelf

    def take(self, recipe: Recipe, *, again: bool = False) -> Guest | None:
        """Take a ready sandbox of this recipe, whatever its limits; None if there is none."""
        shelf = self._in_use(recipe)
        if shelf is None:
            return None
        # The template may have changed since the session's recipe was made.
        is_same = replace(recipe, limits=shelf.recipe.limits) == shelf.recipe
        can_be = is_same and self._launcher.suits(recipe, shelf.recipe)
        return shelf.take(again=again) if can_be else None

    def count(self, recipe: Recipe, outcome: str) -> bool:
        """Count a claim as a hit or a miss; False if there is no pool for it."""
        shelf = self._in_use(recipe)
        if shelf is not None:
            shelf.count(outcome)
        return shelf is not None

    def _in_use(self, recipe: Recipe) -> TemplatePool | None:
        shelf = self._shelves.get((recipe.template, recipe.runtime))
        return shelf if shelf is not None and shelf.sizes.max else None

    def keeps(self, recipe: Recipe) -> bool:
        """Whether this recipe's template and runtime have a pool, whatever its size."""
        return (recipe.template, recipe.runtime) in self._shelves

    def runtimes(self, template: str) -> list[str]:
        """The runtimes for which there is a pool of a template."""
        return [runtime for name, runtime in self._shelves if name == template]

    def _renew(self, key: tuple[str, str], recipe: Recipe, sizes: Sizes) -> TemplatePool:
        """Put an empty pool in the place of an old one; it inherits the demand."""
        before = self._drop(key)
        shelf = self._shelves[key] = TemplatePool(recipe, sizes, self._launcher, self)
        if before is not None:
            shelf.succeed(before)
        return shelf

    def _drop(self, key: tuple[str, str]) -> TemplatePool | None:
        shelf = self._shelves.pop(key, None)
        if shelf is not None:
            shelf.close()
            self._old.add(shelf)
            task = asyncio.ensure_future(shelf.closed())
            task.add_done_callback(lambda _: self._old.discard(shelf))
        return shelf

    @property
    def ready(self) -> int:
        """How many sandboxes are ready."""
        return sum(shelf.ready for shelf in self._shelves.values())

    # The room that template pools share.

    def share_of(self, shelf: TemplatePool) -> int:
        """How many sandboxes one pool may keep so that all pools stay within the total."""
        shelves = [*self._shelves.values()]
        wishes = [(each.sizes.min, each.wish) for each in shelves]
        if sum(wish for _, wish in wishes) <= self.total:
            return shelf.wish
        # What is left of the division goes to the pools that were claimed from last.
        order = sorted(range(len(shelves)), key=lambda at: -shelves[at].last_used)
        shares = share(self.total, [wishes[at] for at in order])
        return next((n for at, n in zip(order, shares, strict=True) if shelves[at] is shelf), 0)

    def make_room(self, shelf: TemplatePool) -> int:
        """Make others give up what is above their share; return how many ``shelf`` may start."""
        for other in self._shelves.values():
            if other is not shelf and other.held > other.target:
                other.shed(other.target)
        return self.total - sum(each.held for each in self._shelves.values())

    # Changing.

    def drain(self, template: str = "") -> int:
        """Replace the ready sandboxes of a template, or of all; return how many there were."""
        return self.replace(lambda recipe: not template or recipe.template == template)

    def replace(self, chosen: Callable[[Recipe], bool]) -> int:
        """Replace the ready sandboxes of some recipes; return how many there were."""
        drained = 0
        for key, shelf in list(self._shelves.items()):
            if chosen(shelf.recipe):
                drained += shelf.ready
                self._renew(key, shelf.recipe, shelf.sizes).fill()
        return drained

    def forget(self, template: str, runtime: str = "") -> None:
        """Drop the pools of a template, or only the one on a runtime."""
        for key in [key for key in self._shelves if key[0] == template]:
            if not runtime or key[1] == runtime:
                self._drop(key)

    async def filled(self, shelf: TemplatePool) -> None:
        try:
            async with asyncio.timeout(FILL_SECONDS):
                await shelf.filled()
        except TimeoutError:
            raise errors.LimitExceeded(
                f"the pool was not full after {FILL_SECONDS:g} s: {shelf.ready} are ready",
                hint="k8e pool shows how it goes on",
            ) from None

    def listing(self) -> list[dict[str, Any]]:
        return [shelf.describe() for _, shelf in sorted(self._shelves.items())]

    async def stop(self) -> None:
        """Remove every ready sandbox, and keep none from now on."""
        self.stopped = True
        for key in list(self._shelves):
            self._drop(key)
        for shelf in list(self._old):
            await shelf.closed()


HEAD_START = 1.0
"""Seconds after the start in which the pool leaves the CPUs to the first sessions."""


class PoolPolicy:
    """Decides what the pool keeps, and claims from it."""

    def __init__(
        self,
        settings: Settings,
        runtimes: Runtimes,
        pool: WarmPool,
        templates: Templates,
        spawn: Spawn,
    ) -> None:
        self._runtimes = runtimes
        self._pool = pool
        self._templates = templates
        self._spawn = spawn
        self._default_runtime = settings.default_runtime
        self._usual = Sizes(min(settings.pool_min, settings.pool_max), settings.pool_max)
        self._usual_runtime = ""  # of the default template, once that is known
        self._set: dict[tuple[str, str], Sizes] = {}  # by an operator

    # Keeping.

    async def start(self) -> None:
        """Begin to fill the pool."""
        self._templates.on_change.append(self._changed)
        self._runtimes.on_change.append(self._choose_again)
        for entry in self._templates.listing():
            if entry.template is not None:
                await self._keep_ahead(entry.template, after=HEAD_START)

    async def _keep_ahead(self, template: Template, after: float = 0) -> None:
        """Keep sandboxes of a template that asks for them before its first use."""
        try:
            runtime = await self._runtimes.choose(template.runtime, self._default_runtime)
        except errors.K8eError as error:  # its sessions will say so too
            log.warning("no sandbox of template %s is kept ready: %s", template.name, error)
            return
        if not self._is_current(template):  # the code that changed it has called this again
            return
        if template.name == DEFAULT_TEMPLATE:
            self._usual_runtime = runtime.name
        recipe = launch.of_template(template, runtime.name)
        sizes = self._sizes(template, runtime.name)
        if sizes.min > self._pool.total > 0:
            told = "template %s wants %d ready sandboxes, all together may have %d (K8E_POOL_TOTAL)"
            log.warning(told, template.name, sizes.min, self._pool.total)
        # If there is a pool already, an operator or a claim made it, and has precedence.
        if sizes.min and not self._pool.keeps(recipe):
            self._pool.keep(recipe, sizes, after=after)

    def _is_current(self, template: Template) -> bool:
        try:
            return self._templates.get(template.name) is template
        except errors.K8eError:
            return False

    def _sizes(self, template: Template, runtime: str) -> Sizes:
        chosen = self._set.get((template.name, runtime))
        if chosen is not None:
            return chosen
        least, most = template.pool_min, template.pool_max
        if least is None:
            usual = template.name == DEFAULT_TEMPLATE and runtime == self._usual_runtime
            least = self._usual.min if usual else 0
            return Sizes(least if most is None else min(least, most), self._most(most))
        return Sizes(least, max(least, self._most(most)))

    def _most(self, asked: int | None) -> int:
        return self._usual.max if asked is None else asked

    def _changed(self, name: str) -> None:
        """A template was added, removed or changed: ready sandboxes of the old one are useless."""
        try:
            template = self._templates.get(name)
        except errors.K8eError:
            self._pool.forget(name)
            return
        wanted = self._runtimes.resolve(template.runtime)
        for runtime in self._pool.runtimes(name):
            if wanted and runtime != wanted and (name, runtime) not in self._set:
                self._pool.forget(name, runtime)
                continue
            self._pool.keep(launch.of_template(template, runtime), self._sizes(template, runtime))
        self._spawn(self._keep_ahead(template))

    def _choose_again(self) -> None:
        """A runtime began or ceased to work: templates that name none may get another one."""
        for entry in self._templates.listing():
            if entry.template is None or entry.template.runtime or self._default_runtime:
                continue
            for runtime in self._pool.runtimes(entry.template.name):
                if (entry.template.name, runtime) not in self._set:
                    self._pool.forget(entry.template.name, runtime)
            self._spawn(self._keep_ahead(entry.template))

    # Taking.

    def claim(self, recipe: Recipe, *, again: bool = False) -> Guest | None:
        """Claim a ready sandbox for a session like this, whatever its limits.

        If there is none, the next claim may find one. ``again`` if the one before was unusable.
        """
        if not self._pool.keeps(recipe):
            try:
                template = self._templates.get(recipe.template)
            except errors.K8eError:
                return None  # it was removed while this session was being made
            sizes = self._sizes(template, recipe.runtime)
            if not sizes.max or self._pool.stopped:
                return None
            self._pool.keep(launch.of_template(template, recipe.runtime), sizes)
        return self._pool.take(recipe, again=again)

    def count(self, recipe: Recipe, outcome: str) -> None:
        """Count a claim, for the pool's listing and the metrics."""
        if self._pool.count(recipe, outcome):
            metrics.count_claim(outcome)

    # What an operator sees and sets.

    def listing(self) -> list[dict[str, Any]]:
        return self._pool.listing()

    async def set(
        self, name: str, runtime: str, least: int | None, most: int | None, *, wait: bool
    ) -> dict[str, Any]:
        """Change the sizes of a template's pool on a runtime; None leaves a size as it is."""
        template = await self._templates.find(name)
        chosen = await self._runtimes.choose(runtime or template.runtime, self._default_runtime)
        template = self._templates.get(name)  # again: it may have changed during the wait
        before = self._sizes(template, chosen.name)
        least = before.min if least is None else least
        check_total(least, self._pool.total)
        sizes = Sizes(least, max(least, before.max) if most is None else most)
        self._set[template.name, chosen.name] = sizes
        shelf = self._pool.keep(launch.of_template(template, chosen.name), sizes)
        if wait:
            await self._pool.filled(shelf)
        return shelf.describe()

    def drain(self, template: str) -> int:
        return self._pool.drain(template)
