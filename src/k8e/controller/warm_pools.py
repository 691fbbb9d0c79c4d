"""The reconciler of SandboxWarmPool: as many idle sandboxes as it says, made from its template."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

from k8e.controller import additions, blueprints, conditions, resources
from k8e.controller.events import Events
from k8e.controller.queue import WorkQueue
from k8e.controller.resources import Key, Object, key_of, uid_of
from k8e.controller.store import RightOfWay, Store
from k8e.kubernetes.api import CONFLICT, NOT_FOUND, ApiError, section

BY_HASH = "pool hash"
_MOST_AT_ONCE = 300
_FIRST_BATCH = 1
_NOT_PROGRESSING = "WarmPoolNotProgressing"
_STUCK_SECONDS = 300.0
_RECHECK_SECONDS = 60.0
_STATUS_SECONDS = 0.25
"""A pool's numbers change with each claim; they are written a few times a second at most."""
_GATHER_SECONDS = 0.03
_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
_NAME_LENGTH = 5
_LONGEST_NAME = 63


def member_name(pool: str) -> str:
    """A new name for a member: chosen here, so that a write that was lost is not done twice."""
    tail = "".join(secrets.choice(_LETTERS) for _ in range(_NAME_LENGTH))
    return f"{pool[: _LONGEST_NAME - _NAME_LENGTH - 1]}-{tail}"


def _hash_words(sandbox: Object) -> tuple[str, ...]:
    found = resources.labels_of(sandbox).get(resources.POOL_HASH)
    return (f"{sandbox['metadata']['namespace']}/{found}",) if found else ()


@dataclass
class Pace:
    """How fast a pool may be filled, by its annotations; without them, at once."""

    replicas: int | None = None
    full: bool = False
    short_since: float | None = None
    tokens: float = 1.0
    at: float | None = None

    def allow(self, pool: Object, missing: int, now: float) -> tuple[int, float | None]:
        """How many members to make now, and after how many seconds to ask again.

        The delay is for members that claims took: a pool that is new or grows is filled without it.
        """
        replicas = pool["spec"].get("replicas", 1)
        if replicas != self.replicas:
            self.replicas, self.full = replicas, False
        if missing <= 0:
            self.full, self.short_since = True, None
            return 0, None
        if self.short_since is None:
            self.short_since = now
        delay = additions.seconds(pool, additions.REPLENISH_DELAY)
        if self.full and delay is not None and now < self.short_since + delay:
            return 0, self.short_since + delay - now
        rate = additions.seconds(pool, additions.REPLENISH_RATE)
        if rate is None:
            return missing, None
        most = max(rate, 1.0)
        earned = (now - self.at) * rate if self.at is not None else most
        self.tokens, self.at = min(self.tokens + earned, most), now
        count = min(missing, int(self.tokens))
        self.tokens -= count
        return count, (1.0 - self.tokens % 1.0) / rate if missing > count else None


class WarmPoolController:
    """Brings each SandboxWarmPool to what its spec says."""

    def __init__(
        self, store: Store, events: Events, *, right_of_way: RightOfWay, now: resources.Now
    ) -> None:
        self._store, self._events = store, events
        self._way, self._now = right_of_way, now
        self.queue: WorkQueue[Key] = WorkQueue("warm pool", self.reconcile)
        self._pools, self._templates = store.cache(resources.POOL), store.cache(resources.TEMPLATE)
        self._sandboxes = store.cache(resources.SANDBOX)
        self._told: dict[str, float] = {}
        self._paces: dict[str, Pace] = {}
        self._sandboxes.add_index(BY_HASH, _hash_words)
        self._sandboxes.tell(self._sandbox_changed)
        self._pools.tell(self._pool_changed)
        self._templates.tell(self._template_changed)

    def _sandbox_changed(self, before: Object | None, after: Object | None) -> None:
        for item in (before, after):
            owner = resources.controller_of(item) if item is not None else None
            if item is not None and owner is not None and owner["kind"] == resources.POOL:
                # A look goes over all members: one for many changes, not one for each.
                key = item["metadata"]["namespace"], owner["name"]
                self.queue.add_after(key, _GATHER_SECONDS)
        if after is not None and resources.controller_of(after) is None and _hash_words(after):
            self._add_all_of(after["metadata"]["namespace"])  # an orphan is somebody's

    def _add_all_of(self, namespace: str, template: str = "") -> None:
        for pool in self._pools:
            reference = pool["spec"]["sandboxTemplateRef"]["name"]
            if pool["metadata"]["namespace"] == namespace and template in ("", reference):
                self.queue.add(key_of(pool))

    def _pool_changed(self, before: Object | None, after: Object | None) -> None:
        if after is not None:
            self.queue.add(key_of(after))
        elif before is not None:
            self._paces.pop(uid_of(before), None)
            self._told.pop(uid_of(before), None)

    def _template_changed(self, before: Object | None, after: Object | None) -> None:
        if after is not None and (before is None or before["spec"] != after["spec"]):
            self._add_all_of(*key_of(after))

    async def reconcile(self, key: Key) -> float | None:
        """Look at one pool; after how many seconds to look again."""
        pool = self._pools.get(key)
        if pool is None or resources.is_going(pool):
            return None
        if wrong := additions.invalid(pool):
            self._events.warn(pool, resources.POOL, "InvalidAnnotation", wrong)
        await self._way.wait()
        template = self._templates.get((key[0], pool["spec"]["sandboxTemplateRef"]["name"]))
        members = await self._members(pool, template)
        if template is not None:
            members = await self._without_stale(pool, template, members)
        stuck, later = await self._replace_stuck(pool, members), None
        failure: ApiError | None = None
        wanted = pool["spec"].get("replicas", 1)
        staying = [one for one in members if not resources.is_going(one)]
        missing = wanted - len(members)
        if len(staying) > wanted:
            await self._shrink(staying, len(staying) - wanted)
        elif template is not None:
            now = asyncio.get_running_loop().time()
            pace = self._paces.setdefault(uid_of(pool), Pace())
            allowed, later = pace.allow(pool, missing, now)
            failure = await self._fill(pool, template, min(allowed, _MOST_AT_ONCE))
        soon = await self._tell(pool)
        if failure is not None:
            raise failure
        if template is not None and missing > _MOST_AT_ONCE and later is None:
            self.queue.add(key)
        return min((one for one in (stuck, later, soon) if one is not None), default=None)

    def _of(self, pool: Object) -> list[Object]:
        namespace, name = key_of(pool)
        return self._sandboxes.by(BY_HASH, f"{namespace}/{resources.name_hash(name)}")

    def _owned(self, pool: Object) -> list[Object]:
        return [one for one in self._of(pool) if resources.is_controlled_by(one, pool)]

    async def _members(self, pool: Object, template: Object | None) -> list[Object]:
        """The pool's sandboxes; fresh ones without an owner are taken in.

        Anybody may have made one and given it labels, so it is compared with the template. One
        that was a claim's is never taken in again.
        """
        for one in self._of(pool):
            if resources.controller_of(one) is not None or resources.is_going(one):
                continue
            if template is None:
                continue
            if resources.CLAIM_UID in resources.labels_of(one):
                continue
            if not (blueprints.is_fresh(one, template) and blueprints.is_made_of(one, template)):
                await self._delete(one)
                continue
            owner = resources.owner_reference(pool, resources.POOL)
            version = one["metadata"]["resourceVersion"]
            metadata: Object = {"ownerReferences": [owner], "resourceVersion": version}
            await self._store.patch(resources.SANDBOX, one, {"metadata": metadata})
        return self._owned(pool)

    async def _without_stale(
        self, pool: Object, template: Object, members: list[Object]
    ) -> list[Object]:
        if section(pool["spec"], "updateStrategy").get("type") != "Recreate":
            return members
        stale = [
            one
            for one in members
            if not resources.is_going(one) and not blueprints.is_fresh(one, template)
        ]
        await self._delete_all(stale)
        return self._owned(pool)

    async def _replace_stuck(self, pool: Object, members: list[Object]) -> float | None:
        """Delete what has not become ready for long, unless no node has room for it."""
        wait: float | None = None
        for one in members:
            if resources.is_going(one) or resources.is_true(one, conditions.READY):
                continue
            ready = resources.condition_of(one, conditions.READY)
            since = (ready or {}).get("lastTransitionTime") or one["metadata"]["creationTimestamp"]
            left = conditions.seconds_of(since) + _STUCK_SECONDS - self._now()
            if left > 0:
                wait = min(left, wait or left)
                continue
            scheduled = resources.condition_of(one, conditions.SCHEDULED) or {}
            if scheduled.get("reason") == "Unschedulable":
                message = f"Sandbox {one['metadata']['name']} cannot be scheduled"
                self._events.warn(pool, resources.POOL, _NOT_PROGRESSING, message)
                wait = min(_RECHECK_SECONDS, wait or _RECHECK_SECONDS)
            else:
                await self._delete(one)
        return wait

    async def _shrink(self, members: list[Object], count: int) -> None:
        """Delete some: those that are not ready first, then the newest."""
        order = sorted(members, key=lambda one: one["metadata"]["creationTimestamp"], reverse=True)
        order.sort(key=lambda one: resources.is_true(one, conditions.READY))
        await self._delete_all(order[:count])

    async def _delete_all(self, items: list[Object]) -> None:
        await asyncio.gather(*map(self._delete, items))

    async def _delete(self, item: Object) -> None:
        """Delete a member as it was looked at: one that a claim has just taken stays."""
        try:
            await self._store.delete(resources.SANDBOX, item, unchanged=True)
        except ApiError as error:
            if error.status != CONFLICT:
                raise
            await self._store.read(resources.SANDBOX, key_of(item))
            self.queue.add_after(_pool_key(item), _STATUS_SECONDS)

    async def _fill(self, pool: Object, template: Object, count: int) -> ApiError | None:
        """Make members in batches that double: one that is refused costs one request, not all.

        The refusal, if there was one, which is told too: a quota is not the pool's to see.
        """
        batch = _FIRST_BATCH
        while count > 0:
            await self._way.wait()
            size = min(batch, count)
            made = await asyncio.gather(
                *(self._make(pool, template) for _ in range(size)), return_exceptions=True
            )
            for one in made:
                if isinstance(one, ApiError):
                    if one.status != CONFLICT:
                        # Without the member's name, which is another one at each attempt.
                        said = str(one.body.get("message") or one)
                        why = said.partition(": ")[2] or said
                        message = f"No sandbox can be made: {why}"
                        self._events.warn(pool, resources.POOL, _NOT_PROGRESSING, message)
                    return one
                if isinstance(one, BaseException):
                    raise one
            count, batch = count - size, batch * 2
        return None

    async def _make(self, pool: Object, template: Object) -> None:
        name = member_name(pool["metadata"]["name"])
        await self._store.create(resources.SANDBOX, blueprints.member(pool, template, name))

    async def _tell(self, pool: Object) -> float | None:
        members = self._owned(pool)
        name = pool["metadata"]["name"]
        wanted = {
            "replicas": len(members),
            "readyReplicas": sum(resources.is_true(one, conditions.READY) for one in members),
            "selector": f"{resources.POOL_HASH}={resources.name_hash(name)}",
            "observedGeneration": pool["metadata"].get("generation", 1),
        }
        pool = self._pools.get(key_of(pool)) or pool
        patch = conditions.status_patch(pool, wanted)
        if not patch:
            return None
        now = asyncio.get_running_loop().time()
        left = self._told.get(uid_of(pool), float("-inf")) + _STATUS_SECONDS - now
        if left > 0:
            return left
        self._told[uid_of(pool)] = now
        try:
            await self._store.patch(resources.POOL, pool, patch, "status")
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
        return None


def _pool_key(member: Object) -> Key:
    owner = resources.controller_of(member)
    return member["metadata"]["namespace"], owner["name"] if owner else ""
