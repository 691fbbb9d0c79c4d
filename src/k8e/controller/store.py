"""Writes to the API server that the caches know of at once, and the order in which they go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator

from k8e.controller.cache import Cache
from k8e.controller.resources import Key, Object, collection, key_of, path_of, uid_of
from k8e.kubernetes.api import NOT_FOUND, Api, ApiError

MERGE = "application/merge-patch+json"


class Store:
    """One connection to the API server, and the caches of what is in it."""

    def __init__(self, api: Api, caches: dict[str, Cache], *, at_once: int) -> None:
        self._api, self._caches = api, caches
        self._limit = asyncio.Semaphore(at_once)

    def cache(self, kind: str) -> Cache:
        return self._caches[kind]

    async def create(self, kind: str, item: Object) -> Object:
        path = collection(kind, item["metadata"]["namespace"])
        return self._absorb(kind, await self._call("POST", path, item))

    async def patch(self, kind: str, item: Object, patch: Object, part: str = "") -> Object:
        """Merge a change into an object, or into a part of it such as its ``status``."""
        path = path_of(kind, key_of(item)) + (f"/{part}" if part else "")
        return self._absorb(kind, await self._call("PATCH", path, patch, MERGE))

    async def read(self, kind: str, key: Key) -> Object | None:
        """An object as it is now; None where there is none."""
        try:
            return self._absorb(kind, await self._call("GET", path_of(kind, key)))
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            if (cached := self._of(kind, key)) is not None:
                self._caches[kind].forget(key, uid_of(cached))
            return None

    async def delete(
        self, kind: str, item: Object, *, propagation: str = "Background", unchanged: bool = False
    ) -> None:
        """Delete this very object; ``unchanged``: only if nobody has changed it since."""
        key, uid = key_of(item), uid_of(item)
        conditions: Object = {"uid": uid}
        if unchanged:
            conditions["resourceVersion"] = item["metadata"]["resourceVersion"]
        body = {"propagationPolicy": propagation, "preconditions": conditions}
        try:
            answer = await self._call("DELETE", path_of(kind, key), body)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            answer = {}
        if answer.get("kind") == kind and "deletionTimestamp" in answer["metadata"]:
            going = answer["metadata"].get("finalizers") or answer["metadata"].get(
                "deletionGracePeriodSeconds"
            )
            if going:
                self._absorb(kind, answer)
                return
        if kind in self._caches:
            self._caches[kind].forget(key, uid)

    async def _call(
        self, method: str, path: str, body: Object | None = None, form: str = "application/json"
    ) -> Object:
        async with self._limit:
            return await self._api.call(method, path, body, kind=form)

    def _of(self, kind: str, key: Key) -> Object | None:
        return self._caches[kind].get(key) if kind in self._caches else None

    def _absorb(self, kind: str, item: Object) -> Object:
        return self._caches[kind].absorb(item) if kind in self._caches else item


class RightOfWay:
    """Lets claims go before what can wait: filling pools, metadata, metrics.

    Whoever can wait asks before each write, and waits for as long as claims are under way, but
    not without bound: a pool that is never filled would end up with no claim being warm.
    """

    def __init__(self, *, longest: float = 2.0) -> None:
        self._longest = longest
        self._under_way = 0
        self._free = asyncio.Event()
        self._free.set()

    @contextlib.contextmanager
    def taken(self) -> Generator[None]:
        self._under_way += 1
        self._free.clear()
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._free.set()

    async def wait(self) -> None:
        if not self._free.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._free.wait(), self._longest)
