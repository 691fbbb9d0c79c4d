"""The stage of behaviours: sandboxes of the runtime under test, shared ones and fresh ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from k8e.conformance.lab.rooms import Room, Scene
from k8e.conformance.outcomes import NotApplicable
from k8e.conformance.sandbox import Sandbox
from k8e.model import Limits, SandboxSpec, new_id
from k8e.runtimes.base import Binding, Runtime

SHARED_ENV = {"GREETING": "hello from the session"}


class Stage:
    """Gives behaviours their sandboxes, and takes all of them down at the end."""

    def __init__(self, runtime: Runtime, *, folders: Sequence[Path] = ()) -> None:
        self.runtime = runtime
        self.folders = folders
        """Where this host's runtimes keep their files; searched for what was left behind."""
        self._shared: Sandbox | None = None
        self._kept: dict[str, Sandbox] = {}
        self._fresh: list[Sandbox] = []
        self._scene: Scene | None = None
        self._room: Room | None = None

    async def shared(self) -> Sandbox:
        """A sandbox that many behaviours use; a new one where the last has died."""
        if self._shared is None or await self._shared.is_gone():
            self._shared = await self.launch()
        return self._shared

    async def kept(self, name: str, make: Callable[[], Awaitable[Sandbox]]) -> Sandbox:
        """A named sandbox that several behaviours use in turn; made if it is not there."""
        found = self._kept.get(name)
        if found is None or await found.is_gone():
            found = self._kept[name] = await make()
        return found

    async def launch(
        self, *, sharing: Sandbox | None = None, cwd: str = "", **limits: Any
    ) -> Sandbox:
        """A fresh sandbox, with these limits instead of the default ones.

        It has the workspace of ``sharing``, where one is given, and its commands start in ``cwd``.
        """
        sandbox = await self._launch(limits, sharing.guest.sandbox_id if sharing else "")
        await sandbox.guest.bind(Binding(env=SHARED_ENV, cwd=cwd))
        return sandbox

    async def settle(self, *modules: str, **limits: Any) -> Sandbox:
        """A sandbox that is ready for a session, with these ``modules`` in its Python."""
        sandbox = await self._launch(limits)
        sandbox.left_out = await sandbox.guest.settle({"python": modules})
        return sandbox

    async def _launch(self, limits: dict[str, Any], workspace_of: str = "") -> Sandbox:
        spec = SandboxSpec(
            sandbox_id=new_id("sb"),
            limits=replace(Limits(), **limits),
            runtime=self.runtime.name,
            workspace_of=workspace_of,
        )
        sandbox = Sandbox(await self.runtime.launch(spec))
        self._fresh.append(sandbox)
        return sandbox

    async def scene(self) -> Scene:
        """A gateway whose sandboxes see an internet of their own; made when it is needed."""
        if not self.runtime.networked:
            raise NotApplicable(f"the sandboxes of {self.runtime.name} have no network here")
        if self._scene is None:
            probe = self.folders[0] / "probe.json" if self.folders else None
            making = asyncio.ensure_future(asyncio.to_thread(Scene, probe=probe))
            try:
                made: Scene = await asyncio.shield(making)
            except asyncio.CancelledError:
                self._scene = await making  # a thread cannot be stopped; close() ends its work
                raise
            self._scene = made
            return made
        return self._scene

    async def room(self) -> Room:
        """A session of that gateway which may reach nothing yet; many behaviours use it in turn."""
        scene = await self.scene()
        if self._room is not None and not await asyncio.to_thread(self._room.is_alive):
            self._room = None
        if self._room is None:
            self._room = await asyncio.to_thread(Room, scene, self.runtime.name)
            # So that there is an uplink, and a refused connection is refused by policy.
            await asyncio.to_thread(self._room.allow, "open")
        await asyncio.to_thread(self._room.reset)
        return self._room

    async def restart(self) -> None:
        """Adopt and wait for guests, as a new gateway does after the old one was killed."""
        adopted = {guest.sandbox_id: guest for guest in await self.runtime.adopt()}
        for sandbox in self._fresh:
            guest = adopted.get(sandbox.guest.sandbox_id)
            if guest is not None:
                old, sandbox.guest = sandbox.guest, guest
                if old.link is not None:
                    old.link.close()

    async def clear(self) -> None:
        """End the sandboxes that only one behaviour used."""
        # The newest first: it may share what an older one has.
        spared = [self._shared, *self._kept.values()]
        for sandbox in [item for item in self._fresh[::-1] if item not in spared]:
            await asyncio.shield(sandbox.guest.kill())
            self._fresh.remove(sandbox)

    async def close(self) -> None:
        self._shared = None
        self._kept.clear()
        await self.clear()
        if self._scene is not None:
            scene, self._scene, self._room = self._scene, None, None
            await asyncio.shield(asyncio.to_thread(scene.close))


@contextlib.asynccontextmanager
async def staged(runtime: Runtime, *, folders: Sequence[Path] = ()) -> AsyncGenerator[Stage]:
    """A stage for as long as the block runs."""
    stage = Stage(runtime, folders=folders)
    try:
        yield stage
    finally:
        await stage.close()
