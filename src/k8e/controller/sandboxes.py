"""The reconciler of Sandbox: one pod, its volumes, its service, its status, its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from k8e.controller import additions, conditions, desired, environment, resources
from k8e.controller.conditions import Found, Problem
from k8e.controller.events import Events
from k8e.controller.queue import WorkQueue
from k8e.controller.resources import Key, Object, key_of, uid_of
from k8e.controller.store import RightOfWay, Store
from k8e.controller.traces import Tracer
from k8e.kubernetes.api import CONFLICT, FORBIDDEN, ApiError, entries, section

log = logging.getLogger(__name__)

BY_OWNER = "owner"
_LEAST_WAIT = 2.0
"""Before a deadline: a clock that is a little behind the API server's would look in vain."""
_FOREIGN_SECONDS = 10.0
_INVALID_SECONDS = 300.0
_DEFERRED_SECONDS = 1.0
_PERMANENT = (400, 422)


def by_owner(item: Object) -> tuple[str, ...]:
    """The index of what belongs to a sandbox: the sandbox's uid."""
    uid = resources.owner_uid(item, resources.SANDBOX)
    return (uid,) if uid else ()


class _Foreign(Exception):
    """An object of the right name belongs to somebody else."""

    def __init__(self, kind: str, key: Key, why: str) -> None:
        super().__init__(f"{kind} {key[1]} {why}")
        self.kind = kind


class SandboxController:
    """Brings each Sandbox to what its spec says."""

    def __init__(
        self,
        store: Store,
        events: Events,
        *,
        right_of_way: RightOfWay,
        domain: str,
        now: resources.Now,
        on_ready: Callable[[Object, Object], None] = lambda _before, _after: None,
        tracer: Tracer | None = None,
    ) -> None:
        self._store, self._events, self._way = store, events, right_of_way
        self._domain, self._now, self._on_ready = domain, now, on_ready
        self._tracer = tracer or Tracer()
        self._deferred: set[str] = set()
        self.queue: WorkQueue[Key] = WorkQueue("sandbox", self.reconcile)
        self._sandboxes = store.cache(resources.SANDBOX)
        self._sandboxes.tell(self._sandbox_changed)
        for kind in ("Pod", "PersistentVolumeClaim", "Service"):
            cache = store.cache(kind)
            cache.add_index(BY_OWNER, by_owner)
            cache.tell(self._part_changed)

    def _sandbox_changed(self, before: Object | None, after: Object | None) -> None:
        if after is not None and (before is None or _matters(before, after)):
            self._add(after)
        elif after is None and before is not None:
            self.queue.forget(key_of(before))

    def _add(self, sandbox: Object) -> None:
        """Sandboxes that a client waits for come before those that fill a pool."""
        is_member = bool(resources.owner_uid(sandbox, resources.POOL))
        self.queue.add(key_of(sandbox), patient=is_member)

    def _part_changed(self, before: Object | None, after: Object | None) -> None:
        for item in (before, after):
            owner = resources.controller_of(item) if item is not None else None
            if item is not None and owner is not None and owner["kind"] == resources.SANDBOX:
                sandbox = self._sandboxes.get((item["metadata"]["namespace"], owner["name"]))
                if sandbox is not None:  # else it goes too, or is told of by itself
                    self._add(sandbox)
            elif item is not None and before is not None:
                self.queue.add(key_of(item))  # a foreign object of a sandbox's name

    async def reconcile(self, key: Key) -> float | None:
        """Look at one sandbox; after how many seconds to look again."""
        sandbox = self._sandboxes.get(key)
        if sandbox is None or resources.is_going(sandbox):
            return None
        if resources.owner_uid(sandbox, resources.POOL):
            await self._way.wait()
        with self._tracer.span("ReconcileSandbox", sandbox):
            return await self._reconcile(key, sandbox)

    async def _reconcile(self, key: Key, sandbox: Object) -> float | None:
        wait = None
        if until := sandbox["spec"].get("shutdownTime"):
            wait = conditions.seconds_of(until) - self._now()
            if wait <= 0:
                return await self._expire(sandbox)
            wait = max(wait, _LEAST_WAIT)
        if (left := await self._suspend_if_idle(sandbox)) is not None:
            wait = min(left, wait or left)
        if (known := self._sandboxes.get(key)) is None:
            return None
        sandbox = known
        found, failure = await self._look(sandbox)
        soon = await self._tell(sandbox, found)
        if failure is not None:
            raise failure
        if found.replaced_in is not None:
            wait = min(found.replaced_in, wait or found.replaced_in)
        if found.foreign_pod:
            soon = _FOREIGN_SECONDS
        elif found.problem is not None and found.problem.reason == conditions.INVALID_CONFIGURATION:
            soon = _INVALID_SECONDS
        return min((one for one in (wait, soon) if one is not None), default=None)

    async def _suspend_if_idle(self, sandbox: Object) -> float | None:
        """Suspend a sandbox that is without traffic for too long; how long it may be so yet."""
        if wrong := additions.invalid(sandbox):
            self._events.warn(sandbox, resources.SANDBOX, "InvalidAnnotation", wrong)
        if additions.SUSPENDED_BY in resources.annotations_of(sandbox):
            if not desired.is_suspended(sandbox):  # it was woken
                patch = additions.awake(self._now())
                await self._store.patch(resources.SANDBOX, sandbox, patch)
            return None
        if desired.is_suspended(sandbox):
            return None
        left = additions.idle_left(sandbox, self._now())
        if left is None or left > 0:
            return left
        await self._store.patch(resources.SANDBOX, sandbox, additions.suspension(sandbox))
        limit = resources.annotations_of(sandbox)[additions.IDLE_SECONDS]
        message = f"Suspended after {limit} s without traffic"
        self._events.normal(sandbox, resources.SANDBOX, "SandboxIdle", message)
        return None

    def _owned(self, kind: str, sandbox: Object) -> list[Object]:
        return self._store.cache(kind).by(BY_OWNER, uid_of(sandbox))

    # What there is, and what is missing.

    async def _look(self, sandbox: Object) -> tuple[Found, ApiError | None]:
        """Make what is missing; what there is then, and the error that is to be tried again."""
        pods = self._owned("Pod", sandbox)
        found = Found(pods=pods, service=next(iter(self._owned("Service", sandbox)), None))
        if len(pods) > 1:
            names = ", ".join(sorted(pod["metadata"]["name"] for pod in pods))
            message = f"More than one Pod is owned by the sandbox: {names}"
            self._events.warn(sandbox, resources.SANDBOX, conditions.MULTIPLE_PODS, message)
            return replace(found, problem=Problem(conditions.MULTIPLE_PODS, message)), None
        try:
            with self._tracer.span("reconcilePVCs", sandbox):
                await self._volume_claims(sandbox)
            with self._tracer.span("reconcilePod", sandbox):
                found = await self._pod(sandbox, found)
            found = replace(found, service=await self._service(sandbox, found.service))
        except _Foreign as error:
            problem = Problem(conditions.RECONCILER_ERROR, str(error))
            self._events.warn(sandbox, resources.SANDBOX, problem.reason, problem.message)
            foreign = error.kind == "Pod" or found.foreign_pod
            return replace(found, problem=problem, foreign_pod=foreign), None
        except ApiError as error:
            if error.status == CONFLICT:
                raise
            lasting = error.status in _PERMANENT
            reason = conditions.INVALID_CONFIGURATION if lasting else conditions.RECONCILER_ERROR
            problem = Problem(reason, str(error.body.get("message") or error))
            if error.status in (*_PERMANENT, FORBIDDEN):
                self._events.warn(sandbox, resources.SANDBOX, reason, problem.message)
            return replace(found, problem=problem), None if lasting else error
        return found, None

    async def _volume_claims(self, sandbox: Object) -> None:
        if not sandbox["spec"].get("volumeClaimTemplates"):
            return
        have = {item["metadata"]["name"] for item in self._owned("PersistentVolumeClaim", sandbox)}
        for wanted in desired.volume_claims(sandbox):
            if wanted["metadata"]["name"] not in have:
                await self._make("PersistentVolumeClaim", sandbox, wanted)

    async def _pod(self, sandbox: Object, found: Found) -> Found:
        pod = found.pod
        if desired.is_suspended(sandbox):
            return await self._without_pod(sandbox, found)
        if pod is None:
            made = await self._make("Pod", sandbox, desired.pod(sandbox))
            return replace(found, pods=[made])
        if resources.is_going(pod):
            return found
        if additions.is_replaced(sandbox, pod):
            return await self._replace(sandbox, found, pod)
        if patch := desired.metadata_patch(sandbox, pod):
            changed = section(patch, "metadata", "annotations")
            if resources.owner_uid(sandbox, resources.CLAIM) and environment.ENV not in changed:
                await self._way.wait()  # whoever claimed it does not wait for a label
            try:
                pod = await self._store.patch("Pod", pod, patch)
            except ApiError as error:
                if error.status == 404:
                    self._store.cache("Pod").forget(key_of(pod), uid_of(pod))
                    self.queue.add(key_of(sandbox))
                    return replace(found, pods=[])
                raise
        return replace(found, pods=[pod])

    async def _replace(self, sandbox: Object, found: Found, pod: Object) -> Found:
        """Delete a failed pod when it is time to: that it is missing is what makes a new one."""
        when = additions.replacement(sandbox, pod, self._now())
        if when.left > 0:
            return replace(found, replaced_in=when.left)
        await self._store.patch(resources.SANDBOX, sandbox, additions.recreated(when.count + 1))
        why = pod["status"].get("message") or pod["status"].get("reason") or "its program failed"
        self._events.warn(sandbox, resources.SANDBOX, "PodRecreated", f"Pod is replaced: {why}")
        await self._store.delete("Pod", pod)
        return replace(found, pods=self._owned("Pod", sandbox))

    async def _without_pod(self, sandbox: Object, found: Found) -> Found:
        pod = found.pod
        if pod is not None:
            if not resources.is_going(pod):
                await self._store.delete("Pod", pod)
            return replace(found, pods=self._owned("Pod", sandbox))
        foreign = None
        condition = resources.condition_of(sandbox, conditions.SUSPENDED)
        if condition is None or condition["status"] != "True":
            # Only on the way to Suspended: somebody else's pod of this name is not in the cache.
            foreign = await self._store.read("Pod", key_of(sandbox))
            if foreign is not None and resources.is_controlled_by(foreign, sandbox):
                return replace(found, pods=[foreign])
        return replace(found, foreign_pod=foreign is not None)

    async def _service(self, sandbox: Object, service: Object | None) -> Object | None:
        wanted = sandbox["spec"].get("service")
        if wanted is None:
            return service
        if not wanted:
            if service is not None and not resources.is_going(service):
                await self._store.delete("Service", service)
            return None
        if service is None:
            return await self._make("Service", sandbox, desired.service(sandbox))
        if patch := desired.service_patch(sandbox, service):
            return await self._store.patch("Service", service, patch)
        return service

    async def _make(self, kind: str, sandbox: Object, wanted: Object) -> Object:
        """Create an object; take over one of its name that nobody owns and that may be taken."""
        try:
            return await self._store.create(kind, wanted)
        except ApiError as error:
            if error.status != CONFLICT:
                raise
        key = key_of(wanted)
        found = await self._store.read(kind, key)
        if found is None:  # it went in this moment
            raise ApiError(CONFLICT, {"message": "it is being deleted"}, f"{kind} {key[1]}")
        labels = {resources.NAME_HASH: resources.name_hash(sandbox["metadata"]["name"])}
        if resources.is_controlled_by(found, sandbox):
            if labels.items() <= resources.labels_of(found).items():
                return found
            # Its label was removed, without which it is not followed.
            return await self._store.patch(kind, found, {"metadata": {"labels": labels}})
        why = _why_not(kind, sandbox, found)
        if why:
            raise _Foreign(kind, key, why)
        owner = resources.owner_reference(sandbox, resources.SANDBOX)
        metadata: Object = {
            "resourceVersion": found["metadata"]["resourceVersion"],
            "ownerReferences": [*(entries(found["metadata"], "ownerReferences")), owner],
            "labels": labels,
        }
        return await self._store.patch(kind, found, {"metadata": metadata})

    # Status and end.

    async def _tell(self, sandbox: Object, found: Found) -> float | None:
        wanted = conditions.status(sandbox, found, domain=self._domain, now=self._now())
        return await self._write(sandbox, wanted, may_wait=True)

    async def _write(self, sandbox: Object, wanted: Object, *, may_wait: bool) -> float | None:
        sandbox = self._sandboxes.get(key_of(sandbox)) or sandbox
        patch = conditions.status_patch(sandbox, wanted)
        if not patch:
            self._deferred.discard(uid_of(sandbox))
            return None
        known = uid_of(sandbox) in self._deferred
        if may_wait and not known and conditions.may_wait(sandbox, patch):
            self._deferred.add(uid_of(sandbox))
            return _DEFERRED_SECONDS
        self._deferred.discard(uid_of(sandbox))
        try:
            after = await self._store.patch(resources.SANDBOX, sandbox, patch, "status")
        except ApiError as error:
            if error.status == 404:
                return None  # it went in this moment
            raise
        self._on_ready(sandbox, after)
        return None

    async def _expire(self, sandbox: Object) -> float | None:
        """The end of a sandbox: said first, then done."""
        wanted = conditions.expired_status(sandbox, self._now())
        await self._write(sandbox, wanted, may_wait=False)
        parts = [
            (kind, item)
            for kind in ("Pod", "Service")
            for item in self._owned(kind, sandbox)
            if not resources.is_going(item)
        ]
        await asyncio.gather(*(self._store.delete(kind, item) for kind, item in parts))
        if sandbox["spec"].get("shutdownPolicy") == "Delete":
            await self._store.delete(resources.SANDBOX, sandbox)
        return None


def _matters(before: Object, after: Object) -> bool:
    """Whether more than the status of a sandbox has changed, or somebody else wrote that."""
    if before["metadata"].get("generation") != after["metadata"].get("generation"):
        return True
    parts = ("labels", "annotations", "ownerReferences", "deletionTimestamp")
    if any(before["metadata"].get(part) != after["metadata"].get(part) for part in parts):
        return True
    return before.get("status") != after.get("status")


def _why_not(kind: str, sandbox: Object, found: Object) -> str:
    """Why an object of the right name may not be taken over; empty if it may."""
    if resources.controller_of(found) is not None:
        return "is owned by somebody else"
    if resources.is_going(found):
        return "is being deleted"
    labels = resources.labels_of(found)
    own = labels.get(resources.NAME_HASH) == resources.name_hash(sandbox["metadata"]["name"])
    if not own and labels.get(resources.ADOPTABLE) != "true":
        return f"is not the sandbox's, and has no label {resources.ADOPTABLE}=true"
    if kind == "Service" and section(found, "spec").get("clusterIP") not in ("None", None):
        return "has a cluster IP, and a sandbox's service is headless"
    return ""
