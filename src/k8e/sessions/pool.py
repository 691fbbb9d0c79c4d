"""The warm pool: sandboxes that wait for sessions, for each template and runtime that is used.

A member was never anybody's, is given to one session and never comes back. It has a network that
leads nowhere and a workspace that is empty; what makes it somebody's (environment, limits, policy)
is bound when it is claimed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from k8e import errors
from k8e.runtimes.base import Guest
from k8e.sessions.launching import Launcher
from k8e.sessions.recipes import Recipe
from k8e.sessions.shelf import Shelf
from k8e.sessions.sizing import Sizes, share

FILL_SECONDS = 300.0


class Pool:
    """All shelves of a gateway."""

    def __init__(self, launcher: Launcher, total: int) -> None:
        """No more than ``total`` sandboxes wait at once."""
        self.total = total
        self._launcher = launcher
        self._shelves: dict[tuple[str, str], Shelf] = {}
        self._old: set[Shelf] = set()  # whose sandboxes are still being removed
        self.stopped = False

    def keep(self, recipe: Recipe, sizes: Sizes, *, after: float = 0) -> Shelf:
        """Have sandboxes of this recipe ready from now on; begin ``after`` so many seconds."""
        key = recipe.template, recipe.runtime
        shelf = self._shelves.get(key)
        if self.stopped:
            raise errors.GatewayUnreachable("the gateway is being stopped", hint="try again")
        if shelf is None or shelf.recipe != recipe:
            shelf = self._renew(key, recipe, sizes)
        shelf.resize(sizes, after)
        return shelf

    def take(self, recipe: Recipe, *, again: bool = False) -> Guest | None:
        """A sandbox of this recipe, whatever its limits, if one is ready."""
        shelf = self._in_use(recipe)
        if shelf is None:
            return None
        # A template may have changed since a session was told what it is made of.
        is_same = replace(recipe, limits=shelf.recipe.limits) == shelf.recipe
        can_be = is_same and self._launcher.suits(recipe, shelf.recipe)
        return shelf.take(again=again) if can_be else None

    def count(self, recipe: Recipe, outcome: str) -> bool:
        """What came of a claim; False where there is no pool of which it could be told."""
        shelf = self._in_use(recipe)
        if shelf is not None:
            shelf.count(outcome)
        return shelf is not None

    def _in_use(self, recipe: Recipe) -> Shelf | None:
        shelf = self._shelves.get((recipe.template, recipe.runtime))
        return shelf if shelf is not None and shelf.sizes.max else None

    def keeps(self, recipe: Recipe) -> bool:
        """Whether there is a pool of this recipe's template and runtime, whatever its size."""
        return (recipe.template, recipe.runtime) in self._shelves

    def runtimes(self, template: str) -> list[str]:
        """The runtimes for which there is a pool of a template."""
        return [runtime for name, runtime in self._shelves if name == template]

    def _renew(self, key: tuple[str, str], recipe: Recipe, sizes: Sizes) -> Shelf:
        """An empty shelf in the place of what there is, for the demand that there was."""
        before = self._drop(key)
        shelf = self._shelves[key] = Shelf(recipe, sizes, self._launcher, self)
        if before is not None:
            shelf.succeed(before)
        return shelf

    def _drop(self, key: tuple[str, str]) -> Shelf | None:
        shelf = self._shelves.pop(key, None)
        if shelf is not None:
            shelf.close()
            self._old.add(shelf)
            task = asyncio.ensure_future(shelf.closed())
            task.add_done_callback(lambda _: self._old.discard(shelf))
        return shelf

    @property
    def ready(self) -> int:
        """How many sandboxes wait."""
        return sum(shelf.ready for shelf in self._shelves.values())

    # The room that shelves share.

    def share_of(self, shelf: Shelf) -> int:
        """How many sandboxes of a shelf may wait, so that all together are no more than allowed."""
        shelves = [*self._shelves.values()]
        wishes = [(each.sizes.min, each.wish) for each in shelves]
        if sum(wish for _, wish in wishes) <= self.total:
            return shelf.wish
        # What cannot be divided goes to whom sessions were made from last.
        order = sorted(range(len(shelves)), key=lambda at: -shelves[at].last_used)
        shares = share(self.total, [wishes[at] for at in order])
        return next((n for at, n in zip(order, shares, strict=True) if shelves[at] is shelf), 0)

    def make_room(self, shelf: Shelf) -> int:
        """Have others give up what is above their share; how many more ``shelf`` may start now."""
        for other in self._shelves.values():
            if other is not shelf and other.held > other.target:
                other.shed(other.target)
        return self.total - sum(each.held for each in self._shelves.values())

    # Changing.

    def drain(self, template: str = "") -> int:
        """Replace what is ready of a template, or of all, by new ones; how many they were."""
        return self.replace(lambda recipe: not template or recipe.template == template)

    def replace(self, chosen: Callable[[Recipe], bool]) -> int:
        """Replace what is ready of some recipes by new ones; how many they were."""
        drained = 0
        for key, shelf in list(self._shelves.items()):
            if chosen(shelf.recipe):
                drained += shelf.ready
                self._renew(key, shelf.recipe, shelf.sizes).fill()
        return drained

    def forget(self, template: str, runtime: str = "") -> None:
        """Keep nothing of a template, or of it on one runtime."""
        for key in [key for key in self._shelves if key[0] == template]:
            if not runtime or key[1] == runtime:
                self._drop(key)

    async def filled(self, shelf: Shelf) -> None:
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
        """Remove every sandbox that waits, and keep none from now on."""
        self.stopped = True
        for key in list(self._shelves):
            self._drop(key)
        for shelf in list(self._old):
            await shelf.closed()
