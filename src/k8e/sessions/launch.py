"""Starts sandboxes, for sessions and ahead of them.

Each has a network, which leads nowhere until a session's policy is bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from k8e import disk
from k8e.model import DEFAULT_TEMPLATE, Limits, Rootfs, SandboxSpec, SessionSpec, Warm, new_id
from k8e.runtimes.base import Guest, NotRemoved
from k8e.runtimes.registry import Runtimes
from k8e.sessions.events import Events
from k8e.sessions.network import Network
from k8e.templates import Template


@dataclass(frozen=True)
class Recipe:
    """Everything that a sandbox is made of; sandboxes of one recipe are interchangeable."""

    template: str
    runtime: str
    limits: Limits = field(default_factory=Limits)
    rootfs: Rootfs = field(default_factory=Rootfs)
    warm: Warm = (("python", ()),)


def of_template(template: Template, runtime: str) -> Recipe:
    """The recipe of the sandboxes that wait for sessions of a template."""
    return Recipe(template.name, runtime, template.full_limits, template.rootfs, template.warm)


def of_session(spec: SessionSpec, runtime: str) -> Recipe:
    """The recipe of the sandbox that is started for one session."""
    name = spec.template or DEFAULT_TEMPLATE
    return Recipe(name, runtime, spec.limits, spec.rootfs, spec.warm)


class Launcher:
    """Starts and discards sandboxes, network included."""

    def __init__(
        self,
        runtimes: Runtimes,
        network: Network,
        events: Events,
        data_dir: Path = Path("/"),
        min_free: int = 0,
    ) -> None:
        """Ahead of sessions, none is started that would leave less than ``min_free`` bytes."""
        self._data_dir, self._min_free = data_dir, min_free
        self._runtimes = runtimes
        self._network = network
        self._events = events
        cpus = os.cpu_count() or 1
        # One more would only make each of them slower.
        self._gate = asyncio.Semaphore(max(2, cpus))
        # Sessions that are made meanwhile need a CPU too.
        self._ahead = asyncio.Semaphore(max(1, cpus - 1))
        self._removing = asyncio.Semaphore(max(4, 2 * cpus))

    async def launch(self, recipe: Recipe, sandbox_id: str, workspace_of: str = "") -> Guest:
        """A sandbox that has no session yet."""
        await self._runtimes.all[recipe.runtime].fetch(recipe.rootfs)
        async with self._gate:
            return await self._launch(recipe, sandbox_id, workspace_of)

    async def prepare(self, recipe: Recipe) -> tuple[Guest, tuple[str, ...]]:
        """A sandbox that only needs to be bound; all work that needs no session is done.

        Returned with the interpreters and modules of the recipe that it lacks, and why.
        """
        disk.refuse_if_full(self._data_dir, self._min_free, "sandboxes that wait need")
        await self._runtimes.all[recipe.runtime].fetch(recipe.rootfs)
        async with self._ahead, self._gate:
            guest = await self._launch(recipe, new_id("sb"))
            try:
                left_out = await guest.settle(dict(recipe.warm))
            except BaseException:
                await asyncio.shield(self.discard(guest))
                raise
            self._events.expect(guest.sandbox_id)
            return guest, left_out

    async def discard(self, guest: Guest) -> None:
        self._events.expect_no_more(guest.sandbox_id)
        async with self._removing:
            try:
                with contextlib.suppress(NotRemoved):  # the runtimes try again
                    await guest.kill()
            finally:
                await self._network.detach(guest.sandbox_id)

    def suits(self, wanted: Recipe, waiting: Recipe) -> bool:
        """Whether a waiting sandbox can be given the limits of another recipe."""
        runtime = self._runtimes.all[wanted.runtime]
        return runtime.can_change(waiting.limits, wanted.limits)

    async def _launch(self, recipe: Recipe, sandbox_id: str, workspace_of: str = "") -> Guest:
        runtime = self._runtimes.all[recipe.runtime]
        network = await self._network.attach(sandbox_id) if runtime.networked else ""
        sandbox = SandboxSpec(
            sandbox_id=sandbox_id,
            limits=recipe.limits,
            runtime=runtime.name,
            network=network,
            workspace_of=workspace_of,
            rootfs=recipe.rootfs,
        )
        try:
            return await runtime.launch(sandbox)
        except BaseException:
            await asyncio.shield(self._network.detach(sandbox_id))
            raise
