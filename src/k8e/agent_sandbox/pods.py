"""Where the sandboxes of a cluster run: what their Sandbox objects say, followed by a watch.

No request asks the API server, and no address comes from a client.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

from k8e.agent_sandbox.answers import Refusal
from k8e.agent_sandbox.reach import PodReach, PortConnection
from k8e.agent_sandbox.target import Target
from k8e.controller import conditions, desired, resources
from k8e.controller.additions import IDLE, IDLE_SECONDS, SUSPENDED_BY
from k8e.controller.cache import Cache
from k8e.controller.resources import Key, Object, key_of
from k8e.kubernetes.api import Api, entries, section

STALE_SECONDS = 300.0
"""How long what was heard counts. Addresses of pods are used again, so an old one may be another's:
rather no answer than a request that reaches a foreign pod."""
_METADATA = ("name", "namespace", "uid", "resourceVersion", "deletionTimestamp")
_OURS = (IDLE_SECONDS, SUSPENDED_BY)
_MODE = ("operatingMode", "replicas")


class State(NamedTuple):
    """What a request can expect of a sandbox."""

    address: str = ""
    """Of its pod; empty if there is none."""
    refusal: Refusal | None = None
    is_asleep: bool = False
    """It was suspended for being idle, and traffic may wake it."""
    wakes: bool = False
    """It is one of those that sleep and wake."""


def trim(item: Object) -> Object:
    """The parts of a Sandbox that decide here."""
    metadata, spec, status = item["metadata"], item["spec"], section(item, "status")
    annotations = resources.annotations_of(item)
    shown = (resources.condition_of(item, kind) for kind in (conditions.READY, conditions.FINISHED))
    return {
        "metadata": {name: metadata[name] for name in _METADATA if name in metadata}
        | {"annotations": {name: annotations[name] for name in _OURS if name in annotations}},
        "spec": {name: spec[name] for name in _MODE if name in spec},
        "status": {
            "podIPs": entries(status, "podIPs"),
            "conditions": [
                {name: one.get(name, "") for name in ("type", "status", "reason")}
                for one in shown
                if one is not None
            ],
        },
    }


def state_of(item: Object | None, target: Target) -> State:
    """What a request for a sandbox can expect. Pure."""
    name = f"the sandbox {target.sandbox}"
    if item is None or target.uid not in ("", resources.uid_of(item)):
        text = f"there is no sandbox {target.sandbox} in the namespace {target.namespace}"
        return State(refusal=Refusal(404, text))
    if resources.is_going(item):
        return State(refusal=Refusal(404, f"{name} is being deleted"))
    annotations = resources.annotations_of(item)
    wakes = IDLE_SECONDS in annotations
    finished = resources.condition_of(item, conditions.FINISHED)
    ready = resources.condition_of(item, conditions.READY)
    reason = ready["reason"] if ready is not None else ""
    if reason == conditions.SANDBOX_EXPIRED or (finished and finished["status"] == "True"):
        return State(refusal=Refusal(409, f"{name} has ended"))
    if desired.is_suspended(item):
        asleep = wakes and annotations.get(SUSPENDED_BY) == IDLE and "replicas" not in item["spec"]
        return State(refusal=Refusal(409, f"{name} is suspended"), is_asleep=asleep, wakes=wakes)
    addresses: list[str] = entries(item, "status", "podIPs")  # pyright: ignore[reportAssignmentType]
    if not addresses or reason == conditions.SANDBOX_SUSPENDED:  # its status is from before
        return State(refusal=Refusal(503, f"{name} is not running yet"), wakes=wakes)
    return State(_preferred(addresses), wakes=wakes)


def _preferred(addresses: list[str]) -> str:
    """An address of IPv4 if there is one, as upstream's clients have it."""
    return next((text for text in addresses if ":" not in text), addresses[0])


class Pods:
    """The sandboxes of a cluster, and connections to their pods."""

    def __init__(
        self,
        api: Api,
        *,
        reach: Callable[[Callable[[Target], str]], PodReach],
        stale_seconds: float = STALE_SECONDS,
    ) -> None:
        """``api`` is for this alone: when it was last heard tells how old what we know is."""
        self._api = api
        self._stale_seconds = stale_seconds
        self._reach = reach(self._address)
        self._waiting: dict[Key, set[asyncio.Event]] = {}
        self.cache = Cache(api, resources.SANDBOX, trim=trim)
        self.cache.tell(self._changed)

    async def run(self) -> None:
        """Follow the API server, for ever."""
        await self.cache.run()

    def clock(self) -> float:
        """Seconds since the epoch by the API server's clock: the controller's is the same."""
        return self._api.clock()

    @property
    def is_known(self) -> bool:
        """Whether what we know is recent."""
        now = asyncio.get_running_loop().time()
        return self.cache.synced.is_set() and now - self._api.heard_at < self._stale_seconds

    def item(self, target: Target) -> Object | None:
        """The Sandbox object of a target; Refusal if what we know is too old."""
        if not self.is_known:
            raise Refusal(503, "the router has not heard of the cluster's sandboxes for too long")
        return self.cache.get((target.namespace, target.sandbox))

    def state(self, target: Target) -> State:
        return state_of(self.item(target), target)

    def _address(self, target: Target) -> str:
        found = self.state(target)
        if found.refusal is not None:
            raise found.refusal
        return found.address

    def open(self, target: Target) -> contextlib.AbstractAsyncContextManager[PortConnection]:
        """A connection to a port of a sandbox's pod."""
        return self._reach.open(target)

    # Waiting for changes.

    def _changed(self, before: Object | None, after: Object | None) -> None:
        item = after if after is not None else before
        if item is not None:
            for event in self._waiting.get(key_of(item), ()):
                event.set()

    async def changes(self, target: Target) -> AsyncGenerator[State]:
        """The state of a sandbox, now and after each change."""
        key, event = (target.namespace, target.sandbox), asyncio.Event()
        waiting = self._waiting.setdefault(key, set())
        waiting.add(event)
        try:
            while True:
                event.clear()
                yield self.state(target)
                await event.wait()
        finally:
            waiting.discard(event)
            if not waiting and self._waiting.get(key) is waiting:
                del self._waiting[key]
