"""Sandboxes that sleep while nobody uses them: requests that wake them, and the marks of their use.

The controller suspends a sandbox with the annotation ``idle-seconds`` when it has had no traffic
for so long. Only the router sees traffic, so it says so, in an annotation, now and then. A request
for such a sandbox that sleeps is held, the sandbox is resumed, and then the request goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Generator

from k8e.agent_sandbox.answers import Refusal, unless
from k8e.agent_sandbox.pods import Pods
from k8e.agent_sandbox.target import Target
from k8e.controller import additions, resources
from k8e.controller.additions import IDLE_SECONDS
from k8e.controller.resources import Key, Object
from k8e.controller.store import MERGE
from k8e.kubernetes.api import CONFLICT, NOT_FOUND, Api, ApiError, ApiUnreachable

log = logging.getLogger(__name__)

HOLD_SECONDS = 60.0
"""How long a request may wait for its sandbox."""
MAX_HELD = 512
MAX_HELD_OF_SANDBOX = 32
LEAST_PAUSE, LONGEST_PAUSE = 5.0, 60.0
"""Between two marks of one sandbox's use."""
MARKS_AT_ONCE = 4


class Waker:
    """Holds requests, and resumes their sandboxes."""

    def __init__(
        self, pods: Pods, api: Api, *, enabled: bool = True, hold_seconds: float = HOLD_SECONDS
    ) -> None:
        self._pods, self._api = pods, api
        self._enabled = enabled
        self._hold_seconds = hold_seconds
        self._held: Counter[Key] = Counter()
        self._resuming: dict[Key, asyncio.Task[None]] = {}

    async def ready(self, target: Target, gone: asyncio.Event) -> None:
        """Wait until a sandbox that sleeps, or is about to run again, has a pod.

        Raises:
            Left: the client is ``gone`` before.
            Refusal: it has none and will get none by traffic, or not in time.
        """
        found = self._pods.state(target)
        key = (target.namespace, target.sandbox)
        if found.refusal is None:
            return
        if not (self._enabled and (found.is_asleep or (found.wakes and found.refusal.code == 503))):
            raise found.refusal
        with self._place(key):
            seconds = min(self._hold_seconds, target.seconds)
            try:
                async with asyncio.timeout(seconds):
                    await unless(gone.wait(), self._wait(key, target))
            except TimeoutError:
                text = f"the sandbox {target.sandbox} did not wake up within {seconds:g} seconds"
                raise Refusal(504, text) from None

    @contextlib.contextmanager
    def _place(self, key: Key) -> Generator[None]:
        if self._held.total() >= MAX_HELD or self._held[key] >= MAX_HELD_OF_SANDBOX:
            raise Refusal(503, "too many requests wait for sandboxes to wake up")
        self._held[key] += 1
        try:
            yield
        finally:
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]

    async def _wait(self, key: Key, target: Target) -> None:
        async with contextlib.aclosing(self._pods.changes(target)) as states:
            async for found in states:
                if found.refusal is None:
                    return
                if found.is_asleep:
                    await self._resume(key, target)
                elif not (found.wakes and found.refusal.code == 503):
                    raise found.refusal  # it was deleted, has ended, or somebody suspended it

    async def _resume(self, key: Key, target: Target) -> None:
        """Resume a sandbox once, however many requests wait for it."""
        if key not in self._resuming:
            item = self._pods.item(target)
            if item is None:
                return
            task = self._resuming[key] = asyncio.create_task(self._write(key, item))
            task.add_done_callback(lambda _: self._resuming.pop(key, None))
        # A client that leaves must not take the others' wake-up with it.
        await asyncio.shield(self._resuming[key])

    async def _write(self, key: Key, item: Object) -> None:
        patch = additions.awake(self._pods.clock())
        patch["metadata"]["resourceVersion"] = item["metadata"]["resourceVersion"]
        patch["spec"] = {"operatingMode": "Running"}
        path = resources.path_of(resources.SANDBOX, key)
        try:
            made = await self._api.call("PATCH", path, patch, kind=MERGE)
        except ApiError as error:
            if error.status in (CONFLICT, NOT_FOUND):
                return  # the watch tells what has changed
            log.warning("%s", error)
            raise Refusal(503, "the router may not wake this sandbox") from None
        except ApiUnreachable as error:
            log.warning("%s", error)
            raise Refusal(503, "the API server does not answer the router") from None
        self._pods.cache.absorb(made)
        log.info("woke %s/%s", *key)


class Activity:
    """Marks the use of sandboxes that would else be suspended."""

    def __init__(self, pods: Pods, api: Api, *, enabled: bool = True) -> None:
        self._pods, self._api, self._now = pods, api, pods.clock
        self._enabled = enabled
        self._open: Counter[Key] = Counter()
        self._used: set[Key] = set()
        self._marking: dict[Key, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(MARKS_AT_ONCE)

    @contextlib.asynccontextmanager
    async def of(self, target: Target) -> AsyncGenerator[None]:
        """A request to a sandbox."""
        item = self._pods.item(target) if self._enabled else None
        if item is None or (pause := _pause(item)) is None:
            yield
            return
        key = (target.namespace, target.sandbox)
        self._used.add(key)
        self._open[key] += 1
        if key not in self._marking:
            task = self._marking[key] = asyncio.create_task(self._mark(key, pause))
            task.add_done_callback(lambda _: self._marking.pop(key, None))
        try:
            yield
        finally:
            self._used.add(key)
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]

    async def _mark(self, key: Key, pause: float) -> None:
        """Mark the use of a sandbox now, and again as long as there was any since the last mark."""
        while key in self._open or key in self._used:
            self._used.discard(key)
            await self._write(key)
            await asyncio.sleep(pause)

    async def _write(self, key: Key) -> None:
        mark = additions.activity(self._now())
        try:
            async with self._turns:
                path = resources.path_of(resources.SANDBOX, key)
                await self._api.call("PATCH", path, mark, kind=MERGE)
        except (ApiError, ApiUnreachable) as error:
            log.warning("the use of %s/%s is not marked: %s", *key, error)

    async def close(self) -> None:
        tasks = list(self._marking.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _pause(item: Object) -> float | None:
    """How often the use of a sandbox is marked; None if nobody wants to know."""
    try:
        idle = float(resources.annotations_of(item).get(IDLE_SECONDS, ""))
    except ValueError:
        return None
    return min(max(idle / 4, LEAST_PAUSE), LONGEST_PAUSE) if idle > 0 else None
