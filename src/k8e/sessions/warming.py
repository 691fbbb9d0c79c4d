"""Which sandboxes are kept ready.

Those of the default template, of templates that ask for it, and of what sessions were made from of
late.
"""

from __future__ import annotations

import logging
from typing import Any

from k8e import errors, metrics
from k8e.model import DEFAULT_TEMPLATE
from k8e.runtimes.base import Guest
from k8e.runtimes.registry import Runtimes
from k8e.sessions import recipes
from k8e.sessions.pool import Pool
from k8e.sessions.recipes import Recipe
from k8e.sessions.sizing import Sizes, check_total
from k8e.sessions.templating import Templates
from k8e.sessions.tending import Spawn
from k8e.settings import Settings
from k8e.templates import Template

log = logging.getLogger(__name__)

HEAD_START = 1.0
"""Seconds after the start in which the pool leaves the CPUs to the sessions that come first."""


class Warming:
    """Tells the pool what to keep, and takes from it."""

    def __init__(
        self,
        settings: Settings,
        runtimes: Runtimes,
        pool: Pool,
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
        """Keep sandboxes of a template that wants some before it is used."""
        try:
            runtime = await self._runtimes.choose(template.runtime, self._default_runtime)
        except errors.K8eError as error:  # its sessions will say so too
            log.warning("no sandbox of template %s is kept ready: %s", template.name, error)
            return
        if not self._is_current(template):  # whoever changed it has asked anew
            return
        if template.name == DEFAULT_TEMPLATE:
            self._usual_runtime = runtime.name
        recipe = recipes.of_template(template, runtime.name)
        sizes = self._sizes(template, runtime.name)
        if sizes.min > self._pool.total > 0:
            told = "template %s wants %d ready sandboxes, all together may have %d (K8E_POOL_TOTAL)"
            log.warning(told, template.name, sizes.min, self._pool.total)
        # If there is a pool already, somebody was quicker who knows what they want.
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
        """A template came, went or became another: what waits of the old one is of no use."""
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
            self._pool.keep(recipes.of_template(template, runtime), self._sizes(template, runtime))
        self._spawn(self._keep_ahead(template))

    def _choose_again(self) -> None:
        """A runtime works now, or no more: templates that name none may get another one."""
        for entry in self._templates.listing():
            if entry.template is None or entry.template.runtime or self._default_runtime:
                continue
            for runtime in self._pool.runtimes(entry.template.name):
                if (entry.template.name, runtime) not in self._set:
                    self._pool.forget(entry.template.name, runtime)
            self._spawn(self._keep_ahead(entry.template))

    # Taking.

    def claim(self, recipe: Recipe, *, again: bool = False) -> Guest | None:
        """A sandbox that waited for a session like this, whatever its limits.

        Where there is none, the next claim may find one. ``again`` if the one before was no good.
        """
        if not self._pool.keeps(recipe):
            try:
                template = self._templates.get(recipe.template)
            except errors.K8eError:
                return None  # it went while this session was being made
            sizes = self._sizes(template, recipe.runtime)
            if not sizes.max or self._pool.stopped:
                return None
            self._pool.keep(recipes.of_template(template, recipe.runtime), sizes)
        return self._pool.take(recipe, again=again)

    def count(self, recipe: Recipe, outcome: str) -> None:
        """What came of a claim, for those who look at the pool and at the metrics."""
        if self._pool.count(recipe, outcome):
            metrics.count_claim(outcome)

    # What an operator sees and sets.

    def listing(self) -> list[dict[str, Any]]:
        return self._pool.listing()

    async def set(
        self, name: str, runtime: str, least: int | None, most: int | None, *, wait: bool
    ) -> dict[str, Any]:
        """Change how many are ready of a template on a runtime; None leaves a size as it is."""
        template = await self._templates.find(name)
        chosen = await self._runtimes.choose(runtime or template.runtime, self._default_runtime)
        template = self._templates.get(name)  # as it is after that wait
        before = self._sizes(template, chosen.name)
        least = before.min if least is None else least
        check_total(least, self._pool.total)
        sizes = Sizes(least, max(least, before.max) if most is None else most)
        self._set[template.name, chosen.name] = sizes
        shelf = self._pool.keep(recipes.of_template(template, chosen.name), sizes)
        if wait:
            await self._pool.filled(shelf)
        return shelf.describe()

    def drain(self, template: str) -> int:
        return self._pool.drain(template)
