"""Which sandboxes are kept ready: those of the default template, and of those that ask for it."""

from __future__ import annotations

import logging
from typing import Any

from k8e import errors
from k8e.runtimes.registry import Runtimes
from k8e.sessions.launching import Recipe
from k8e.sessions.pool import Pool
from k8e.sessions.sizing import Sizes
from k8e.settings import Settings

log = logging.getLogger(__name__)

HEAD_START = 1.0
"""Seconds after the start in which the pool leaves the CPUs to the sessions that come first."""


class Warming:
    """Tells the pool what to keep."""

    def __init__(self, settings: Settings, runtimes: Runtimes, pool: Pool) -> None:
        self._runtimes = runtimes
        self._pool = pool
        self._default_runtime = settings.default_runtime
        self._usual = Sizes(min(settings.pool_min, settings.pool_max), settings.pool_max)

    async def start(self) -> None:
        """Begin to fill the pool; where no runtime works, sessions will say so."""
        if not self._usual.max:
            return
        try:
            runtime = await self._runtimes.choose("", self._default_runtime)
        except errors.K8eError as error:
            log.warning("no sandbox is kept ready: %s", error)
            return
        recipe = Recipe("default", runtime.name)
        if not self._pool.keeps(recipe):  # else somebody was quicker, who knows what they want
            self._pool.keep(recipe, self._usual, after=HEAD_START)

    # What an operator sees and sets.

    def listing(self) -> list[dict[str, Any]]:
        return self._pool.listing()

    async def set(
        self, template: str, runtime: str, least: int | None, most: int | None, *, wait: bool
    ) -> dict[str, Any]:
        """Change how many are ready of a template on a runtime; None leaves a size as it is."""
        chosen = await self._runtimes.choose(runtime, self._default_runtime)
        recipe = Recipe(template or "default", chosen.name)
        before = self._pool.sizes(recipe)
        least = before.min if least is None else least
        sizes = Sizes(least, max(least, before.max) if most is None else most)
        shelf = self._pool.keep(recipe, sizes)
        if wait:
            await self._pool.filled(shelf)
        return shelf.describe()

    def drain(self, template: str) -> int:
        return self._pool.drain(template)
