"""What the API server has, followed by a watch and kept as plain dicts.

A cache is told of our own writes too (:meth:`Cache.absorb`), so nobody who has written sees what
was there before the write: no expectations have to be waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from urllib.parse import urlencode

from k8e.controller.resources import Key, Object, collection, key_of, uid_of
from k8e.kubernetes.api import GONE, Api, ApiError, ApiUnreachable, entries, section

log = logging.getLogger(__name__)

PAGE = 500
WATCH_SECONDS = 240
QUIET_SECONDS = 150.0
"""The API server sends a bookmark about once a minute: after this much silence nobody is there."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_SHORT_WATCH_SECONDS = 1.0
_MOST_GONE = 10_000
_UNKNOWN = float("inf")

Change = Callable[[Object | None, Object | None], None]
"""Told of each change: the object before and after it; None where there is none."""
Index = Callable[[Object], Iterable[str]]


def version_of(item: Object) -> int:
    """The resource version, which counts the writes of the store: a later one is larger."""
    return int(item["metadata"]["resourceVersion"])


class Cache:
    """All objects of a kind."""

    def __init__(
        self,
        api: Api,
        kind: str,
        *,
        trim: Callable[[Object], Object] | None = None,
        namespace: str = "",
        quiet_seconds: float = QUIET_SECONDS,
        labels: str = "",
    ) -> None:
        self._api, self.kind = api, kind
        self._path, self._query = collection(kind, namespace), _selector(labels)
        self._trim = trim or _without_fields
        self._quiet_seconds = quiet_seconds
        self._objects: dict[Key, Object] = {}
        # When objects went, by uid: an answer that was on its way may not bring one back.
        self._gone: dict[str, float] = {}
        self._newest = 0
        self._indices: dict[str, tuple[Index, dict[str, dict[Key, Object]]]] = {}
        self._told: list[Change] = []
        self.synced = asyncio.Event()
        self.lists = 0
        """How often all was listed: once, unless the server forgot where we were."""

    # Reading.

    def get(self, key: Key) -> Object | None:
        return self._objects.get(key)

    def __iter__(self) -> Iterator[Object]:
        return iter(list(self._objects.values()))

    def __len__(self) -> int:
        return len(self._objects)

    def add_index(self, name: str, words: Index) -> None:
        """Find objects by words that a function takes from them; before the first object."""
        self._indices[name] = words, {}

    def by(self, name: str, word: str) -> list[Object]:
        return list(self._indices[name][1].get(word, {}).values())

    def tell(self, change: Change) -> None:
        self._told.append(change)

    # Writing.

    def absorb(self, item: Object) -> Object:
        """An object as the API server has just answered it; what the cache has now."""
        item = self._trim(item)
        key = key_of(item)
        before = self._objects.get(key)
        if version_of(item) <= self._gone.get(uid_of(item), -1):
            return item
        if before is not None and version_of(before) >= version_of(item):
            return before
        self._put(key, before, item)
        return item

    def forget(self, key: Key, uid: str) -> None:
        """An object that is deleted, as the API server has just answered."""
        before = self._objects.get(key)
        if before is not None and uid_of(before) == uid:
            self._remove(key, before, _UNKNOWN)

    def _remove(self, key: Key, before: Object, version: float) -> None:
        self._note_gone(uid_of(before), version)
        self._put(key, before, None)

    def _note_gone(self, uid: str, version: float) -> None:
        self._gone.pop(uid, None)
        self._gone[uid] = version
        while len(self._gone) > _MOST_GONE:
            del self._gone[next(iter(self._gone))]

    def _put(self, key: Key, before: Object | None, after: Object | None) -> None:
        for words, found in self._indices.values():
            for word in words(before) if before is not None else ():
                under = found.get(word)
                if under is not None:
                    under.pop(key, None)
                    if not under:
                        del found[word]
            for word in words(after) if after is not None else ():
                found.setdefault(word, {})[key] = after  # pyright: ignore[reportArgumentType]
        if after is None:
            self._objects.pop(key, None)
        else:
            self._objects[key] = after
        for told in self._told:
            told(before, after)

    # Following.

    async def run(self) -> None:
        """Follow the API server, for ever."""
        version, pause = "", _FIRST_PAUSE
        while True:
            try:
                if not version:
                    version = await self._list()
                    self.synced.set()
                began = asyncio.get_running_loop().time()
                async with contextlib.aclosing(self._watch(version)) as versions:
                    async for seen in versions:
                        version, pause = seen, _FIRST_PAUSE
                if asyncio.get_running_loop().time() - began > _SHORT_WATCH_SECONDS:
                    continue  # the server ended the watch in time
            except ApiError as error:
                if error.status == GONE or _is_ahead(error):
                    log.info("%s: listed again: %s", self.kind, error)
                    version = ""
                else:
                    log.warning("%s: %s", self.kind, error)
            except ApiUnreachable as error:
                log.warning("%s: %s", self.kind, error)
            await asyncio.sleep(pause * (0.5 + random.random()))  # noqa: S311 - spread, no secret
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _list(self) -> str:
        """Read everything, page by page, and tell what has changed; the version of the list."""
        found: set[Key] = set()
        more, version = "", ""
        while True:
            query = {**self._query, "limit": str(PAGE)} | ({"continue": more} if more else {})
            page = await self._api.call("GET", f"{self._path}?{urlencode(query)}")
            if int(page["metadata"]["resourceVersion"]) < self._newest:
                self._forget_history()
            for item in page["items"]:
                key = key_of(item)
                found.add(key)
                self._see(item)
            version, more = page["metadata"]["resourceVersion"], page["metadata"].get("continue")
            if not more:
                break
            await asyncio.sleep(0)
        for key, item in list(self._objects.items()):
            # Not those that we have made since the list began.
            if key not in found and version_of(item) <= int(version):
                self._remove(key, item, int(version))
        self._newest = int(version)
        self.lists += 1
        return version

    def _forget_history(self) -> None:
        """Start afresh: the server's store was set back, and versions count again from before."""
        log.warning("%s: the API server has an older state than before", self.kind)
        for key, item in list(self._objects.items()):
            self._put(key, item, None)
        self._gone.clear()
        self._newest = 0

    def _see(self, item: Object) -> None:
        """An object of a list or a watch; another of the same name is one that was replaced."""
        key = key_of(item)
        before = self._objects.get(key)
        if (
            before is not None
            and uid_of(before) != uid_of(item)
            and version_of(item) > version_of(before)
        ):
            self._remove(key, before, version_of(item))
        self.absorb(item)

    async def _watch(self, version: str) -> AsyncGenerator[str]:
        """Tell what changes after a version; the versions that were seen."""
        query = {
            **self._query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        lines = self._api.lines(
            f"{self._path}?{urlencode(query)}", quiet_seconds=self._quiet_seconds
        )
        async with contextlib.aclosing(lines):
            async for line in lines:
                event: Object = json.loads(line)
                item: Object = event["object"]
                if event["type"] == "ERROR":
                    raise ApiError(int(item.get("code", GONE)), item, f"watching {self._path}")
                if version_of(item) < self._newest:
                    raise ApiError(GONE, {"message": "it is set back"}, f"watching {self._path}")
                self._newest = version_of(item)
                if event["type"] == "DELETED":
                    self._see_deleted(item)
                elif event["type"] != "BOOKMARK":
                    self._see(item)
                yield item["metadata"]["resourceVersion"]

    def _see_deleted(self, item: Object) -> None:
        """An object that went, or that the selector of labels does not select any more."""
        key = key_of(item)
        before = self._objects.get(key)
        if before is not None and uid_of(before) == uid_of(item):
            self._remove(key, before, version_of(item))
        else:
            self._note_gone(uid_of(item), version_of(item))


def _is_ahead(error: ApiError) -> bool:
    """Whether a server has not seen the version yet that it was asked for, or not any more."""
    causes = entries(error.body, "details", "causes")
    return any(one.get("reason") == "ResourceVersionTooLarge" for one in causes)


def _selector(labels: str) -> dict[str, str]:
    return {"labelSelector": labels} if labels else {}


def _without_fields(item: Object) -> Object:
    """An object without what only other writers need."""
    item["metadata"].pop("managedFields", None)
    if annotations := section(item["metadata"], "annotations"):
        annotations.pop(_LAST_APPLIED, None)  # the whole object once more, as text
    return item


_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_POD_METADATA = (
    *("name", "namespace", "uid", "resourceVersion", "labels", "annotations"),
    *("ownerReferences", "deletionTimestamp", "creationTimestamp"),
)
_CONTAINER_STATUS = ("name", "state", "image", "restartCount")


def trim_pod(item: Object) -> Object:
    """The parts of a pod that decide something here: a tenth of it."""
    metadata, status = item["metadata"], section(item, "status")
    trimmed = {
        name: status[name]
        for name in ("phase", "conditions", "podIPs", "reason", "message")
        if name in status
    }
    if status.get("phase") == "Pending":
        for part in ("containerStatuses", "initContainerStatuses"):
            if part in status:
                trimmed[part] = [
                    {name: one[name] for name in _CONTAINER_STATUS if name in one}
                    for one in status[part]
                ]
    return {
        "metadata": {name: metadata[name] for name in _POD_METADATA if name in metadata},
        "spec": {"nodeName": section(item, "spec").get("nodeName", "")},
        "status": trimmed,
    }
