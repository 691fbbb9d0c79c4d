"""The runtimes of this host: which exist, which work, and which one a session gets."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from k8e import errors
from k8e._version import __version__
from k8e.runtimes.base import Feature, Runtime, Support
from k8e.runtimes.container import Container
from k8e.runtimes.gvisor import GVisor
from k8e.runtimes.host import GUEST_PYTHON, Host, Record, file_facts, kill_mentioning
from k8e.runtimes.oci import OciRuntime

log = logging.getLogger(__name__)

ALIASES = {"gvisor": "gvisor", "runsc": "gvisor", "container": "container", "runc": "container"}
FAILURE_SECONDS = 15.0
"""How long a failure is believed though nothing has changed; longer where trying took long."""
FAILURE_TIMES = 10
"""As many times as long as it took to find out: a host where gVisor hangs is not always trying."""
LOOK_SECONDS = 1.0  # how often it is looked whether a warning still holds
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LATER = ("kata", "firecracker", "microvm", "kubernetes")
WEAKER = (
    "gVisor does not work on this host ({reason}); sessions use the container runtime: programs "
    "talk to this host's kernel, so a kernel exploit would reach the host"
)

UNBOUNDED = (
    "the gateway does not run as root, and no control group was given to it: nothing holds a "
    "sandbox as a whole to its limits of CPU and memory (k8e doctor tells more)"
)


class Runtimes:
    """All local runtimes. A probe is believed as long as the facts are those that it rests on."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._cache = host.settings.data_dir / "probe.json"
        self.all: dict[str, OciRuntime] = {"gvisor": GVisor(host), "container": Container(host)}
        self._machine = _machine(host)
        self._keys: dict[str, str] = {}  # the facts on which each probe rests
        self._looked: dict[str, tuple[float, bool]] = {}
        self._until: dict[str, float] = {}  # until when each failure is believed
        self._support: dict[str, Support] = self._load()
        self._probing = asyncio.Lock()  # two probes at once would disturb each other's timing
        self.on_change: list[Callable[[], None]] = []
        """Called when a runtime has become usable, or unusable, since it was tried last."""

    async def support(self, *, fresh: bool = False) -> list[Support]:
        """What each runtime can do here; from the cache unless ``fresh``."""
        return [await self._supported(name, fresh=fresh) for name in self.all]

    def resolve(self, asked: str) -> str:
        """The name of the runtime that is meant by ``asked``; empty stays empty."""
        if asked in LATER:
            raise errors.RuntimeUnusable(
                f"runtime {asked!r} is not part of this release",
                hint="leave the runtime away, or use gvisor or container",
            )
        if asked and asked not in ALIASES:
            raise errors.InvalidRequest(
                f"unknown runtime {asked!r}", hint="known are gvisor and container"
            )
        return ALIASES[asked] if asked else ""

    async def choose(self, asked: str, default: str = "") -> Runtime:
        """The runtime for a session. One that was asked for by name never falls back."""
        name = self.resolve(asked or default)
        if name:
            support = await self._supported(name)
            if not support.usable:
                raise errors.RuntimeUnusable(
                    f"runtime {name!r} does not work on this host: {support.detail}",
                    hint=support.fix or "k8e doctor shows the details",
                )
            return self.all[name]
        return await self._best()

    async def _best(self) -> Runtime:
        gvisor = await self._supported("gvisor")
        if gvisor.usable:
            return self.all["gvisor"]
        container = await self._supported("container")
        if not container.usable:
            raise errors.RuntimeUnusable(
                f"no runtime works on this host. gvisor: {gvisor.detail}. "
                f"container: {container.detail}",
                hint="run install.sh again, then k8e doctor",
            )
        log.warning(WEAKER.format(reason=gvisor.detail))
        return self.all["container"]

    async def purge(self, sandbox_id: str) -> None:
        """Remove a sandbox of which nobody knows what made it."""
        record = Record.load(self._host.folder(sandbox_id))
        if sandbox_id in self._host.leftovers and record and record.runtime in self.all:
            await self.all[record.runtime].purge(sandbox_id)
            return
        await asyncio.to_thread(kill_mentioning, sandbox_id)
        for runtime in self.all.values():
            await runtime.delete(sandbox_id)
        for runtime in self.all.values():
            await runtime.purge(sandbox_id)

    def warning(self, *, named: bool = False) -> str:
        """What whoever relies on sandboxes must know: that they are weaker than the usual ones.

        ``named`` leaves out what is known to somebody who asked for a runtime by its name.
        """
        found = None if self._changed_lately("gvisor") else self._support.get("gvisor")
        weaker = found is not None and not found.usable and not named
        told = [WEAKER.format(reason=found.detail)] if found and weaker else []
        return "; ".join(told if self._host.has_cgroups else [*told, UNBOUNDED])

    def is_usable(self, name: str) -> bool:
        """Whether a runtime worked when it was tried last, and nothing has changed since."""
        known = self._support.get(name)
        return known is not None and known.usable and not self._changed_lately(name)

    def forget(self) -> None:
        """Try everything out again when it is needed next."""
        self._keys.clear()

    async def _supported(self, name: str, *, fresh: bool = False) -> Support:
        if not fresh and not self._is_stale(name):
            return self._support[name]
        async with self._probing:
            if fresh or self._is_stale(name):
                await self._probe(name)
            return self._support[name]

    async def _probe(self, name: str) -> None:
        before = self._support.get(name)
        key, began = self._key(name), time.monotonic()  # what changes meanwhile is tried again
        found = self._support[name] = await self.all[name].probe()
        took = time.monotonic() - began
        self._keys[name] = key
        self._looked.pop(name, None)
        self._until[name] = began + took + max(FAILURE_SECONDS, FAILURE_TIMES * took)
        await asyncio.to_thread(self._save)
        if before is not None and before.usable != found.usable:
            for tell in self.on_change:
                tell()

    def _is_stale(self, name: str) -> bool:
        if self._has_changed(name):
            return True
        return not self._support[name].usable and time.monotonic() > self._until.get(name, 0)

    def _has_changed(self, name: str) -> bool:
        """Whether a runtime was never tried with the facts of today."""
        return self._keys.get(name) != self._key(name)

    def _changed_lately(self, name: str) -> bool:
        """The same, looked at now and then: each run of a program asks."""
        due, changed = self._looked.get(name, (0.0, False))
        now = time.monotonic()
        if now >= due:
            changed = self._has_changed(name)
            self._looked[name] = now + LOOK_SECONDS, changed
        return changed

    def _key(self, name: str) -> str:
        """The facts on which a probe rests. Asked for each new session, so it must be quick."""
        runtime = self.all[name]
        tools = self._host.facts(runtime.tool_names)
        return "; ".join((self._machine, file_facts(GUEST_PYTHON), *runtime.facts(), tools))

    def _load(self) -> dict[str, Support]:
        try:
            data: dict[str, Any] = json.loads(self._cache.read_text("utf-8"))
            keys = {name: self._key(name) for name in self.all}
            same = {name for name, key in keys.items() if data["keys"].get(name) == key}
            found = [_support(item) for item in data["support"] if item["runtime"] in same]
        except errors.UNREADABLE:
            return {}
        for support in found:
            self._keys[support.runtime] = keys[support.runtime]
            self.all[support.runtime].recall(support)
        return {support.runtime: support for support in found}

    def _save(self) -> None:
        # A failure may pass, such as a full disk; it is tried again by the next gateway.
        lasting = [asdict(item) for item in self._support.values() if item.usable]
        data = {"keys": self._keys, "support": lasting}
        scratch = self._cache.with_suffix(".tmp")
        Path(scratch).write_text(json.dumps(data, indent=1), "utf-8")
        scratch.rename(self._cache)


def _machine(host: Host) -> str:
    """What of the machine does not change while a gateway runs."""
    boot = BOOT_ID.read_text("ascii").strip()
    return " ".join([__version__, *os.uname(), boot, f"groups={host.has_cgroups}"])


def _support(data: dict[str, Any]) -> Support:
    data["features"] = [Feature(**feature) for feature in data["features"]]
    return Support(**data)
