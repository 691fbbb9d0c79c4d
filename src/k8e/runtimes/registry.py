"""The runtimes of this host: which exist, which work, and which one a session gets.

A runtime is one module and one ``register`` below. All else that is said of it here (its names, its
rank, what it does not protect from) it says itself, in the words of ``base.Runtime``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from k8e import disk, errors
from k8e._version import __version__
from k8e.model import Limits
from k8e.runtimes.base import (
    Feature,
    Guest,
    Leftover,
    LendNetwork,
    Machine,
    RegisteredRuntime,
    Runtime,
    SharedDisk,
    Support,
)
from k8e.runtimes.container import Container
from k8e.runtimes.gvisor import GVisor
from k8e.runtimes.host import GUEST_PYTHON, Host, SandboxRecord, file_facts, kill_mentioning
from k8e.runtimes.leftovers import RemovalRetries
from k8e.settings import Settings

log = logging.getLogger(__name__)

FAILURE_SECONDS = 15.0
"""How long a failure is believed though nothing has changed; longer where trying took long."""
FAILURE_TIMES = 10
"""As many times as long as it took to find out: a host where gVisor hangs is not always trying."""
LOOK_SECONDS = 1.0  # between two looks at whether a warning still holds
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LATER = ("kata", "firecracker", "microvm")
KUBERNETES = "kubernetes"
WEAKER = (
    "{title} does not work on this host ({reason}); sessions use the {name} runtime: {weakness}"
)
IN_PODS = "sandboxes in pods have no network in this release"
UNBOUNDED = (
    "the gateway does not run as root, and no control group was given to it: nothing holds a "
    "sandbox as a whole to its limits of CPU and memory (k8e doctor tells more)"
)


_kinds: dict[str, Callable[[Host], RegisteredRuntime]] = {}
"""What makes each runtime for a host, by its name."""


def register(name: str, make: Callable[[Host], RegisteredRuntime]) -> Callable[[], None]:
    """Make a runtime known to every ``Runtimes`` that is made from now on; how to undo that."""
    _kinds[name] = make

    def forget() -> None:
        del _kinds[name]

    return forget


register(GVisor.name, GVisor)
register(Container.name, Container)


def _make_all(host: Host) -> list[RegisteredRuntime]:
    """The runtimes of a gateway: those of its machine, or of the cluster that it was given."""
    if not host.settings.kubeconfig:
        return [make(host) for make in _kinds.values()]
    # Loaded only here: what signs and verifies takes memory that other gateways need not have.
    from k8e.runtimes.kubernetes.cluster import Cluster
    from k8e.runtimes.kubernetes.runtime import Kubernetes

    cluster = Cluster(host.settings, host.leftovers)
    classes = host.settings.runtime_classes.replace(",", " ").split()
    if not classes:
        raise errors.InvalidRequest(
            "K8E_RUNTIME_CLASSES names no RuntimeClass", hint="gvisor is the usual one"
        )
    return [
        Kubernetes(cluster, name, () if number else (KUBERNETES,))
        for number, name in enumerate(dict.fromkeys(classes))
    ]


def names() -> list[str]:
    """The names of all runtimes that are known."""
    return list(_kinds)


def this_machine(settings: Settings) -> Host:
    """The machine of a gateway with these settings; ``prepare`` it before it has runtimes."""
    host = Host(settings)
    host.reserve = disk.keep_reserve(
        settings.data_dir, settings.disk_reserve, settings.min_free_disk
    )
    return host


class Runtimes:
    """All runtimes of a host. A probe is believed as long as the facts are those it rests on."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._cache = host.settings.data_dir / "probe.json"
        made = sorted(_make_all(host), key=lambda item: -item.strength)
        self.all: dict[str, RegisteredRuntime] = {runtime.name: runtime for runtime in made}
        """By their names, the strongest first."""
        self._names = {alias: item.name for item in made for alias in (item.name, *item.aliases)}
        self._usual = ""
        if host.settings.kubeconfig:
            # In a cluster nobody gets another class than was meant, not even a stronger one.
            self._usual = self._names[KUBERNETES]
        self._retries = RemovalRetries(host.leftovers, self.purge)
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
        if asked == KUBERNETES and asked not in self._names:
            raise errors.RuntimeUnusable(
                "this gateway runs sandboxes on its machine, and knows no cluster",
                hint="set K8E_KUBECONFIG: docs/howto/kubernetes.md",
            )
        if asked in LATER and asked not in self._names:
            raise errors.RuntimeUnusable(
                f"runtime {asked!r} is not part of this release",
                hint=f"leave the runtime away, or use {_joined(self.all, 'or')}",
            )
        if asked and asked not in self._names:
            raise errors.InvalidRequest(
                f"unknown runtime {asked!r}", hint=f"known are {_joined(self.all, 'and')}"
            )
        return self._names[asked] if asked else ""

    async def choose(self, asked: str, default: str = "") -> Runtime:
        """The runtime for a session. One that was asked for by name never falls back."""
        name = self.resolve(asked or default or self._usual)
        if name:
            support = await self._supported(name)
            if not support.usable:
                raise errors.RuntimeUnusable(
                    f"runtime {name!r} does not work on this host: {support.detail}",
                    hint=support.fix or "k8e doctor shows the details",
                )
            return self.all[name]
        return await self._best()

    async def _best(self) -> RegisteredRuntime:
        """The strongest runtime that works; a weaker one is logged with its weakness."""
        failed: list[Support] = []
        for runtime in self.all.values():
            found = await self._supported(runtime.name)
            if not found.usable:
                failed.append(found)
                continue
            if failed:
                log.warning(self._weaker(failed[0], runtime))
            return runtime
        raise errors.RuntimeUnusable(
            "no runtime works on this host. "
            + ". ".join(f"{item.runtime}: {item.detail}" for item in failed),
            hint="run install.sh again, then k8e doctor",
        )

    def _weaker(self, failed: Support, used: RegisteredRuntime) -> str:
        title = self.all[failed.runtime].title
        return WEAKER.format(
            title=title, reason=failed.detail, name=used.name, weakness=used.weakness
        )

    def stronger(self, name: str) -> RegisteredRuntime | None:
        """A runtime that isolates better than the one of this name, and works by now."""
        for runtime in () if self._usual else self.all.values():
            if runtime.name == name:
                break
            if self.is_usable(runtime.name):
                return runtime
        return None

    # What is on this host.

    def start(self) -> None:
        """Go on with the removal of what an earlier gateway could not remove."""
        self._retries.start()

    async def stop(self) -> None:
        """Leave what resists its removal to the next gateway."""
        await self._retries.stop()

    async def adopt(self) -> list[Guest]:
        """All sandboxes that are still running after a restart of the gateway."""
        return [guest for runtime in self.all.values() for guest in await runtime.adopt()]

    def orphans(self, owned: Collection[str]) -> set[str]:
        """Sandboxes of which anything is here, that nobody owns.

        Without those that resisted their removal before: they are tried again anyway.
        """
        here = {name for runtime in self.all.values() for name in runtime.remains()}
        return here - set(owned) - {item.sandbox_id for item in self.leftovers()}

    async def purge(self, sandbox_id: str) -> None:
        """Remove a sandbox, whichever runtime made it."""
        record = SandboxRecord.load(self._host.folder(sandbox_id))
        made_by = self.all.get(record.runtime) if record is not None else None
        if sandbox_id in self._host.leftovers and made_by is not None:
            await made_by.purge(sandbox_id)
            return
        await asyncio.to_thread(kill_mentioning, sandbox_id)
        # First by the runtime that made it: its own program knows best how to end it.
        for runtime in sorted(self.all.values(), key=lambda item: item is not made_by):
            await runtime.purge(sandbox_id)

    def leftovers(self) -> list[Leftover]:
        """Sandboxes that could not be removed yet, the oldest first."""
        return self._host.leftovers.listing()

    async def held_disks(self) -> dict[str, str]:
        """Disks of sandboxes that are gone, and what on this machine still has each of them.

        Only time can help.
        """
        used = await asyncio.to_thread(self._host.workspaces.in_use)
        return {
            sandbox_id: f"its disk: another program of the host has {device}"
            for sandbox_id, device in used.items()
        }

    async def find_greedy(self, sandboxes: Iterable[tuple[str, str]]) -> dict[str, str]:
        """Which sandboxes must end, and why; each is given with the name of its runtime."""
        by_runtime: dict[str, list[str]] = {}
        for sandbox_id, name in sandboxes:
            by_runtime.setdefault(name, []).append(sandbox_id)
        found: dict[str, str] = {}
        for name, sandbox_ids in by_runtime.items():
            if name in self.all:
                found |= await self.all[name].find_greedy(sandbox_ids)
        return found

    @property
    def network_fault(self) -> str:
        """Why no sandbox of these runtimes has a network; empty where they may have one."""
        return IN_PODS if self._host.settings.kubeconfig else ""

    @property
    def disk(self) -> SharedDisk:
        """The disk that all workspaces share."""
        return self._host.growth

    @property
    def machine(self) -> Machine:
        return self._host

    def use_network(self, lend: LendNetwork) -> None:
        """Try runtimes with a network from now on; ``lend`` gives one for as long as it takes."""
        self._host.lend_network = lend

    # Warnings.

    def excess(self, name: str, limits: Limits) -> str:
        """The limits that a sandbox of a runtime cannot reach here, in words."""
        return self.all[name].excess(limits) if name in self.all else ""

    def warning(self, *, named: bool = False) -> str:
        """What users of sandboxes must know: that these are weaker than the usual ones.

        ``named`` leaves out what a client knows that asked for a runtime by its name.
        """
        if self._usual:
            return ""  # it never falls back, and limits are the cluster's to hold
        told = [] if named else self._fallen_back()
        return "; ".join(told if self._host.has_cgroups else [*told, UNBOUNDED])

    def _fallen_back(self) -> list[str]:
        strongest, *others = self.all.values()
        failed = None if self._changed_lately(strongest.name) else self._support.get(strongest.name)
        if failed is None or failed.usable or not others:
            return []
        tried = ((other, self._support.get(other.name)) for other in others)
        works = (other for other, found in tried if found is not None and found.usable)
        return [self._weaker(failed, next(works, others[0]))]

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
        return "; ".join((self._machine, file_facts(GUEST_PYTHON), *self.all[name].facts()))

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


def _joined(names: Iterable[str], word: str) -> str:
    *others, last = names
    return f"{', '.join(others)} {word} {last}" if others else last


def _support(data: dict[str, Any]) -> Support:
    data["features"] = [Feature(**feature) for feature in data["features"]]
    return Support(**data)
