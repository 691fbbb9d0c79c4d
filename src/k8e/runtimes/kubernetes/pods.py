"""The pods of our sandboxes, followed by one watch, and those who wait for what becomes of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from urllib.parse import quote

from k8e.kubernetes.api import Api, Object, section
from k8e.runtimes.kubernetes import objects

log = logging.getLogger(__name__)

AGAIN_SECONDS = 1.0
Tell = Callable[[Object | None], None]
"""Called with each state of a pod, and with None when it is gone."""


class Pods:
    """All pods of an authority, by the uid of the claim that each belongs to."""

    def __init__(self, api: Api, namespace: str, fingerprint: str) -> None:
        self._api = api
        self._path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods"
        self._selector = objects.selector(fingerprint)
        self._by_claim: dict[str, Object] = {}
        self._claims: dict[str, str] = {}  # their uids, by the names of pods
        self._tell: dict[str, list[Tell]] = {}
        self._synced = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._following is None:
            self._following = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])

    async def synced(self, seconds: float) -> None:
        """Wait until all that is there is known; TimeoutError where nobody tells us in time."""
        self.start()
        async with asyncio.timeout(seconds):
            await self._synced.wait()

    def get(self, claim_uid: str) -> Object | None:
        return self._by_claim.get(claim_uid)

    def watch(self, claim_uid: str, tell: Tell) -> Callable[[], None]:
        """Hear of a claim's pod, first of what it is now if it is there; how to stop that."""
        self.start()
        self._tell.setdefault(claim_uid, []).append(tell)
        if claim_uid in self._by_claim:
            tell(self._by_claim[claim_uid])

        def stop() -> None:
            with contextlib.suppress(KeyError, ValueError):
                self._tell[claim_uid].remove(tell)
                if not self._tell[claim_uid]:
                    del self._tell[claim_uid]

        return stop

    async def _follow(self) -> None:
        while True:
            listed: set[str] | None = set()  # since we began anew, until all were told
            following = self._api.follow(self._path, labelSelector=self._selector)
            try:
                async with contextlib.aclosing(following) as changes:
                    async for change, pod in changes:
                        if change == "SYNCED" and listed is not None:
                            self._lose_others(listed)
                            listed = None
                        elif change != "SYNCED" and listed is not None:
                            listed.add(pod["metadata"]["name"])
                        self._note(change, pod)
            except Exception:  # without this, the end of no pod would be noticed any more
                log.exception("following the pods failed, and begins anew")
                await asyncio.sleep(AGAIN_SECONDS)

    def _lose_others(self, listed: set[str]) -> None:
        """Pods that went while nobody followed."""
        for name in self._claims.keys() - listed:
            self._lose(self._claims.pop(name))

    def _note(self, change: str, pod: Object) -> None:
        if change == "SYNCED":
            self._synced.set()
            return
        if change == "DELETED":  # by its name alone, where that was noticed later
            name = pod["metadata"]["name"]
            if uid := self._claims.pop(name, ""):
                self._lose(uid)
            return
        uid = str(section(pod["metadata"], "labels").get(objects.CLAIM_UID) or "")
        if not uid:
            return
        self._claims[pod["metadata"]["name"]] = uid
        self._by_claim[uid] = pod
        self._tell_all(uid, pod)

    def _lose(self, uid: str) -> None:
        self._by_claim.pop(uid, None)
        self._tell_all(uid, None)

    def _tell_all(self, uid: str, pod: Object | None) -> None:
        for tell in list(self._tell.get(uid, ())):
            try:
                tell(pod)
            except Exception:  # of one sandbox; the others have nothing to do with it
                log.exception("the pod of claim %s could not be understood", uid)
