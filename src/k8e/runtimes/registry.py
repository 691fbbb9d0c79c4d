"""The runtimes of this host: which exist, which work, and which one a session gets."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from k8e import errors
from k8e._version import __version__
from k8e.runtimes.base import Feature, Runtime, Support
from k8e.runtimes.container import Container
from k8e.runtimes.gvisor import GVisor
from k8e.runtimes.host import GUEST_PYTHON, Host, Record, kill_mentioning
from k8e.runtimes.oci import OciRuntime

log = logging.getLogger(__name__)

ALIASES = {"gvisor": "gvisor", "runsc": "gvisor", "container": "container", "runc": "container"}
RETRY_SECONDS = 60.0  # after which a runtime that failed is tried again
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
    """All local runtimes, probed once per boot, program version and release of k8e."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._cache = host.settings.data_dir / "probe.json"
        self.all: dict[str, OciRuntime] = {"gvisor": GVisor(host), "container": Container(host)}
        self._support: dict[str, Support] = self._load()
        self._probed: dict[str, float] = {}
        self._probing = asyncio.Lock()  # two probes at once would disturb each other's timing

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
        found = self._support.get("gvisor")
        weaker = found is not None and not found.usable and not named
        told = [WEAKER.format(reason=found.detail)] if found and weaker else []
        return "; ".join(told if self._host.has_cgroups else [*told, UNBOUNDED])

    async def _supported(self, name: str, *, fresh: bool = False) -> Support:
        async with self._probing:
            if fresh or self._is_stale(name):
                self._support[name] = await self.all[name].probe()
                self._probed[name] = time.monotonic()
                await asyncio.to_thread(self._save)
            return self._support[name]

    def _is_stale(self, name: str) -> bool:
        known = self._support.get(name)
        if known is None:
            return True
        return not known.usable and time.monotonic() > self._probed.get(name, 0) + RETRY_SECONDS

    def _key(self) -> str:
        """Changes when an old probe says nothing about today."""
        parts = [__version__, *os.uname(), BOOT_ID.read_text("ascii").strip()]
        parts.append(f"groups={self._host.has_cgroups}")
        parts.append(str(Path(GUEST_PYTHON).resolve().stat().st_mtime_ns))
        for tool in ("runsc", "runc", "crun"):
            path = self._host.tool(tool)
            parts.append(f"{path}:{Path(path).stat().st_mtime_ns if path else 0}")
        return " ".join(parts)

    def _load(self) -> dict[str, Support]:
        try:
            data: dict[str, Any] = json.loads(self._cache.read_text("utf-8"))
            if data["key"] != self._key():
                return {}
            known = [item for item in data["support"] if item["runtime"] in self.all]
            found = [_support(item) for item in known]
        except errors.UNREADABLE:
            return {}
        for support in found:
            self.all[support.runtime].recall(support)
        return {support.runtime: support for support in found}

    def _save(self) -> None:
        # A failure may pass, such as a full disk; it is tried again by the next gateway.
        lasting = [asdict(item) for item in self._support.values() if item.usable]
        data = {"key": self._key(), "support": lasting}
        scratch = self._cache.with_suffix(".tmp")
        Path(scratch).write_text(json.dumps(data, indent=1), "utf-8")
        scratch.rename(self._cache)


def _support(data: dict[str, Any]) -> Support:
    data["features"] = [Feature(**feature) for feature in data["features"]]
    return Support(**data)
