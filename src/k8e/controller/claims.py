"""The reconciler of SandboxClaim: gives each claim one sandbox, and tells how it fares.

A claim is bound by one patch of a Sandbox, which names the claim as owner and the version that was
decided on. All else can be found again from that: whoever comes after a crash finds the sandbox by
its owner and finishes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from k8e.controller import (
    additions,
    blueprints,
    conditions,
    environment,
    policies,
    resources,
)
from k8e.controller.candidates import Candidates, is_member
from k8e.controller.events import Events
from k8e.controller.metrics import Metrics
from k8e.controller.policies import Rejected
from k8e.controller.queue import WorkQueue
from k8e.controller.resources import Key, Object, key_of, uid_of
from k8e.controller.store import RightOfWay, Store
from k8e.controller.traces import Tracer
from k8e.kubernetes.api import CONFLICT, FORBIDDEN, NOT_FOUND, ApiError, section

BY_CLAIM, BY_POOL = "claim", "pool"
WARM_POOL_NOT_FOUND, TEMPLATE_NOT_FOUND = "WarmPoolNotFound", "TemplateNotFound"
CLAIM_EXPIRED, SANDBOX_MISSING = "ClaimExpired", "SandboxMissing"
SANDBOX_NOT_READY = "SandboxNotReady"
_WARM_SECONDS = 2.0
"""For so long a claim waits for a member that is starting, before it gets a sandbox of its own."""
_MISSING_SECONDS = 60.0
_ATTEMPTS = 3
_LEAST_WAIT = 0.05


class ClaimController:
    """Brings each SandboxClaim to what its spec says."""

    def __init__(
        self,
        store: Store,
        background: Store,
        events: Events,
        metrics: Metrics,
        *,
        right_of_way: RightOfWay,
        label_domains: Sequence[str],
        now: resources.Now,
        tracer: Tracer | None = None,
    ) -> None:
        """``store`` has a connection of its own; ``background`` is for what comes after."""
        self._store, self._background = store, background
        self._events, self._metrics, self._way = events, metrics, right_of_way
        self._label_domains, self._now = label_domains, now
        self._tracer = tracer or Tracer()
        self.queue: WorkQueue[Key] = WorkQueue("claim", self.reconcile)
        self.notes: WorkQueue[Key] = WorkQueue("claim notes", self._annotate)
        self._claims = store.cache(resources.CLAIM)
        self._sandboxes = store.cache(resources.SANDBOX)
        self._pools, self._templates = store.cache(resources.POOL), store.cache(resources.TEMPLATE)
        self._candidates = Candidates(self._on_available)
        self._waiting: dict[str, dict[Key, None]] = {}
        self._seen: dict[str, tuple[float, float]] = {}
        self._ready: dict[str, float] = {}
        """When claims were told to be ready: that is written down later, behind other claims."""
        self._claims.add_index(BY_POOL, _pool_words)
        self._claims.tell(self._claim_changed)
        self._sandboxes.add_index(BY_CLAIM, _claim_words)
        self._sandboxes.tell(self._sandbox_changed)
        self._pools.tell(self._pool_changed)
        self._templates.tell(self._template_changed)

    # What wakes a claim.

    def _claim_changed(self, before: Object | None, after: Object | None) -> None:
        if after is None:
            if before is not None:
                self.queue.forget(key_of(before))
                self._seen.pop(uid_of(before), None)
                self._ready.pop(uid_of(before), None)
                self._stop_waiting(before)
            return
        if uid_of(after) not in self._seen:
            self._seen[uid_of(after)] = time.monotonic(), self._now()
        self.queue.add(key_of(after))

    def _sandbox_changed(self, before: Object | None, after: Object | None) -> None:
        self._candidates.change(before, after)
        for item in (before, after):
            owner = resources.controller_of(item) if item is not None else None
            if item is not None and owner is not None and owner["kind"] == resources.CLAIM:
                self.queue.add((item["metadata"]["namespace"], owner["name"]))
        if after is None and before is not None and self._claims.get(key_of(before)) is not None:
            self.queue.add(key_of(before))  # its name is free for the claim that wanted it

    def _on_available(self, pool: str) -> None:
        waiting = self._waiting.get(pool)
        if waiting:
            key = next(iter(waiting))
            del waiting[key]
            self.queue.add(key)

    def _stop_waiting(self, claim: Object) -> None:
        """A claim that is gone must not be woken in place of one that still waits."""
        for pool, waiting in list(self._waiting.items()):
            waiting.pop(key_of(claim), None)
            if not waiting:
                del self._waiting[pool]

    def _pool_changed(self, before: Object | None, after: Object | None) -> None:
        if after is None:
            return
        if before is None or _spec_changed(before, after):
            self._wake_unbound(key_of(after))
        if additions.claim_words(before) != additions.claim_words(after):
            for claim in self._claims.by(BY_POOL, "/".join(key_of(after))):
                self.queue.add(key_of(claim))

    def _template_changed(self, before: Object | None, after: Object | None) -> None:
        if after is None or (before is not None and not _spec_changed(before, after)):
            return
        namespace, name = key_of(after)
        for pool in self._pools:
            if pool["metadata"]["namespace"] == namespace and _template_of(pool) == name:
                self._wake_unbound(key_of(pool))

    def _wake_unbound(self, pool: Key) -> None:
        for claim in self._claims.by(BY_POOL, "/".join(pool)):
            if not _bound_name(claim):
                self.queue.add(key_of(claim))

    # One look at one claim.

    async def reconcile(self, key: Key) -> float | None:
        """Look at one claim; after how many seconds to look again."""
        claim = self._claims.get(key)
        if claim is None or resources.is_going(claim):
            return None
        with self._tracer.span("ReconcileSandboxClaim", claim):
            return await self._reconcile(claim)

    async def _reconcile(self, claim: Object) -> float | None:
        wait = None
        ends = end_of(claim, self._pools.get(_pool_key(claim)))
        if ends is not None:
            wait = ends[0] - self._now()
            if wait <= 0:
                return await self._expire(claim, ends[1])
            wait = max(wait, _LEAST_WAIT)
        try:
            policies.check_metadata(claim, self._label_domains)
            if _bound_name(claim):
                soon = await self._follow(claim)
            else:
                with self._way.taken():
                    soon = await self._bind(claim)
        except Rejected as error:
            await self._tell_problem(claim, error.reason, error.message)
            soon = None
            if error.reason in (WARM_POOL_NOT_FOUND, TEMPLATE_NOT_FOUND):
                soon = _MISSING_SECONDS
        except ApiError as error:
            if error.status == FORBIDDEN:  # by a quota, for instance: tried again, and told
                message = str(error.body.get("message") or error)
                await self._tell_problem(claim, conditions.RECONCILER_ERROR, message)
            raise
        return min((one for one in (wait, soon) if one is not None), default=None)

    async def _bind(self, claim: Object) -> float | None:
        sandbox = await self._recorded(claim)
        if sandbox is None:
            pool, template = await self._pool_and_template(claim)
            env = environment.text_of(claim, template)
            if not policies.is_cold_only(claim, late_env=env is not None):
                if env:
                    blueprints.check_late_env(claim, template)
                sandbox = await self._adopt_any(claim, pool, template, env=env or "")
                if sandbox is None and (wait := self._wait_for_member(claim, pool)):
                    return wait
            if sandbox is None:
                sandbox = await self._create(claim, template)
        await self._tell(claim, sandbox, first=True)
        return None

    def _wait_for_member(self, claim: Object, pool: Object) -> float:
        """How long to wait for a member that is starting; 0 if there is no point in it."""
        seen = self._seen.get(uid_of(claim))
        left = seen[0] + _WARM_SECONDS - time.monotonic() if seen is not None else 0.0
        if left <= 0 or not self._candidates.is_starting(uid_of(pool)):
            self._stop_waiting(claim)
            return 0.0
        self._waiting.setdefault(uid_of(pool), {})[key_of(claim)] = None
        return left

    async def _recorded(self, claim: Object) -> Object | None:
        """The sandbox that this claim was given before, though its status does not say so yet."""
        owned = self._sandboxes.by(BY_CLAIM, uid_of(claim))
        owned = [one for one in owned if not resources.is_going(one)]
        assigned = resources.annotations_of(claim).get(resources.ASSIGNED)
        if owned:
            # Of several, which two controllers took at once, the status names one in the end.
            return min(owned, key=lambda one: _rank(one, assigned))
        if assigned and not policies.is_cold_only(claim):
            # Upstream's controller got as far as this. Users write annotations too: it has to be
            # a member that this claim may be given anyway.
            key = claim["metadata"]["namespace"], assigned
            found = self._sandboxes.get(key) or await self._store.read(resources.SANDBOX, key)
            if found is not None and is_member(found, claim["spec"]["warmPoolRef"]["name"]):
                return await self._adopt(claim, found)
        return None

    async def _pool_and_template(self, claim: Object) -> tuple[Object, Object]:
        namespace, name = _pool_key(claim)
        pool = await self._known(resources.POOL, (namespace, name))
        if pool is None:
            raise Rejected(WARM_POOL_NOT_FOUND, f'SandboxWarmPool "{name}" not found')
        wanted = _template_of(pool)
        template = await self._known(resources.TEMPLATE, (namespace, wanted))
        if template is None:
            raise Rejected(TEMPLATE_NOT_FOUND, f'SandboxTemplate "{wanted}" not found')
        return pool, template

    async def _known(self, kind: str, key: Key) -> Object | None:
        """An object; clients give up when one is missing, so the cache's word is not enough."""
        return self._store.cache(kind).get(key) or await self._store.read(kind, key)

    # Warm and cold.

    async def _adopt_any(
        self, claim: Object, pool: Object, template: Object, *, env: str
    ) -> Object | None:
        strategy = section(pool["spec"], "updateStrategy").get("type")

        def fits(sandbox: Object) -> bool:
            # A member from before the template asked for late variables has no file for them.
            if env and not environment.has_file(sandbox):
                return False
            return strategy != "Recreate" or blueprints.is_fresh(sandbox, template)

        for _ in range(_ATTEMPTS):
            found = self._candidates.take(uid_of(pool), fits)
            if found is None:
                return None
            try:
                return await self._adopt(claim, found, env=env)
            except ApiError as error:
                if error.status not in (CONFLICT, NOT_FOUND):
                    raise
                seen = await self._store.read(resources.SANDBOX, key_of(found))
                if seen is not None and resources.is_controlled_by(seen, claim):
                    return seen  # it was done; only the answer was lost, and so it was done twice
            finally:
                self._candidates.release(found)
        return None

    async def _adopt(self, claim: Object, sandbox: Object, *, env: str = "") -> Object:
        patch = blueprints.adoption(claim, sandbox, self._now(), env=env)
        adopted = await self._store.patch(resources.SANDBOX, sandbox, patch)
        name = adopted["metadata"]["name"]
        self._events.normal(
            claim, resources.CLAIM, "SandboxAdopted", f'Adopted warm pool Sandbox "{name}"'
        )
        return adopted

    async def _create(self, claim: Object, template: Object) -> Object:
        wanted = blueprints.cold_sandbox(claim, template)
        try:
            made = await self._store.create(resources.SANDBOX, wanted)
        except ApiError as error:
            if error.status in (400, 422):
                message = str(error.body.get("message") or error)
                raise Rejected(conditions.INVALID_CONFIGURATION, message) from None
            if error.status != CONFLICT:
                raise
            found = await self._store.read(resources.SANDBOX, key_of(claim))
            if found is not None and resources.is_controlled_by(found, claim):
                if resources.is_going(found):
                    raise
                return found
            name = claim["metadata"]["name"]
            raise Rejected(
                conditions.RECONCILER_ERROR, f'Sandbox "{name}" exists and is not this claim\'s'
            ) from None
        name = made["metadata"]["name"]
        self._events.normal(
            claim, resources.CLAIM, "SandboxProvisioned", f'Created Sandbox "{name}"'
        )
        return made

    # A claim that has a sandbox.

    async def _follow(self, claim: Object) -> float | None:
        key = claim["metadata"]["namespace"], _bound_name(claim)
        sandbox = self._sandboxes.get(key)
        if sandbox is None or not resources.is_controlled_by(sandbox, claim):
            sandbox = await self._store.read(resources.SANDBOX, key)
        if sandbox is None or not resources.is_controlled_by(sandbox, claim):
            # Never another one in its place: what was in it is lost, and the user has to know.
            message = f'Sandbox "{key[1]}" does not exist any more'
            await self._tell_problem(claim, SANDBOX_MISSING, message)
            return None
        await self._propagate(claim, sandbox)
        await self._tell(claim, sandbox)
        for other in self._sandboxes.by(BY_CLAIM, uid_of(claim)):
            # Another controller took it for this claim. It does not go back to a pool.
            if key_of(other) != key and not resources.is_going(other):
                await self._store.delete(resources.SANDBOX, other)
        return None

    async def _propagate(self, claim: Object, sandbox: Object) -> None:
        """Labels and annotations that a claim asks for later go to its pod too."""
        has = section(sandbox["spec"]["podTemplate"], "metadata")
        change: Object = {}
        for part, wanted in section(claim["spec"], "additionalPodMetadata").items():
            known = section(has, part)
            if new := {k: v for k, v in section({part: wanted}, part).items() if known.get(k) != v}:
                change[part] = new
        if not change:
            return
        reference = resources.annotations_of(sandbox).get(resources.TEMPLATE_REF, "")
        template = self._templates.get((claim["metadata"]["namespace"], reference))
        if template is not None:
            policies.check_against(claim, section(template["spec"]["podTemplate"], "metadata"))
        patch = {"spec": {"podTemplate": {"metadata": change}}}
        await self._background.patch(resources.SANDBOX, sandbox, patch)

    async def _expire(self, claim: Object, policy: str) -> float | None:
        said = resources.condition_of(claim, conditions.READY)
        if said is None or said["reason"] != CLAIM_EXPIRED:
            self._events.normal(claim, resources.CLAIM, CLAIM_EXPIRED, "Claim has expired")
        if policy in ("Delete", "DeleteForeground"):
            propagation = "Foreground" if policy == "DeleteForeground" else "Background"
            await self._store.delete(resources.CLAIM, claim, propagation=propagation)
            return None
        wanted = [_ready("False", CLAIM_EXPIRED, "Claim has expired")]
        if finished := resources.condition_of(claim, conditions.FINISHED):
            wanted.append(finished)
        await self._write(claim, {"conditions": self._merged(claim, wanted), "sandbox": None})
        owned = self._sandboxes.by(BY_CLAIM, uid_of(claim))
        await asyncio.gather(
            *(
                self._store.delete(resources.SANDBOX, one)
                for one in owned
                if not resources.is_going(one)
            )
        )
        return None

    # Status.

    async def _tell(self, claim: Object, sandbox: Object, *, first: bool = False) -> None:
        found = resources.condition_of(sandbox, conditions.READY)
        if found is None:
            wanted = [_ready("False", SANDBOX_NOT_READY, "Sandbox is not ready")]
        else:
            wanted = [_ready(found["status"], found["reason"], found.get("message") or "")]
        if finished := resources.condition_of(sandbox, conditions.FINISHED):
            wanted.append(finished)
        told: Object = {"name": sandbox["metadata"]["name"]}
        if addresses := section(sandbox, "status").get("podIPs"):
            told["podIPs"] = addresses
        status = {"conditions": self._merged(claim, wanted), "sandbox": told}
        await self._write(claim, status, first=first)
        if wanted[0]["status"] == "True" and resources.FIRST_READY not in (
            resources.annotations_of(claim)
        ):
            self._ready.setdefault(uid_of(claim), self._now())

    async def _tell_problem(self, claim: Object, reason: str, message: str) -> None:
        self._events.warn(claim, resources.CLAIM, reason, message)
        wanted = [_ready("False", reason, message)]
        if finished := resources.condition_of(claim, conditions.FINISHED):
            wanted.append(finished)
        await self._write(claim, {"conditions": self._merged(claim, wanted)})

    def _merged(self, claim: Object, wanted: list[Object]) -> list[Object]:
        made = conditions.merged(claim, wanted, self._now())
        for one, given in zip(made, wanted, strict=True):
            if "lastTransitionTime" in given:  # mirrored from the sandbox, with its time
                one["lastTransitionTime"] = given["lastTransitionTime"]
        return made

    async def _write(self, claim: Object, status: Object, *, first: bool = False) -> None:
        patch = conditions.status_patch(claim, status)
        told = patch.get("status", {}).get("sandbox")
        has = section(section(claim, "status"), "sandbox")
        if told is not None and "podIPs" in has:
            patch["status"]["sandbox"] = {"podIPs": None, **told}  # a merge keeps what is not named
        if patch:
            if first:
                # Whoever has bound it meanwhile, to another sandbox, is found out by this.
                version = claim["metadata"]["resourceVersion"]
                patch["metadata"] = {"resourceVersion": version}
            try:
                await self._store.patch(resources.CLAIM, claim, patch, "status")
            except ApiError as error:
                if error.status == NOT_FOUND:
                    return
                if error.status == CONFLICT:
                    await self._store.read(resources.CLAIM, key_of(claim))
                raise
        self.notes.add(key_of(claim))

    # What comes behind.

    async def _annotate(self, key: Key) -> float | None:
        """Write when a claim was seen and ready first, and count it, once."""
        claim = self._claims.get(key)
        if claim is None or resources.is_going(claim):
            return None
        has, wanted = resources.annotations_of(claim), dict[str, str]()
        seen = self._seen.get(uid_of(claim))
        if resources.CONTROLLER_OBSERVED not in has and seen is not None:
            wanted[resources.CONTROLLER_OBSERVED] = conditions.precise_timestamp(seen[1])
        if (name := _bound_name(claim)) and has.get(resources.ASSIGNED) != name:
            wanted[resources.ASSIGNED] = name
        is_ready = resources.is_true(claim, conditions.READY)
        if is_ready and resources.FIRST_READY not in has:
            at = self._ready.get(uid_of(claim)) or self._now()
            wanted[resources.FIRST_READY] = conditions.precise_timestamp(at)
        if not wanted:
            return None
        await self._way.wait()
        try:
            patched = await self._background.patch(
                resources.CLAIM, claim, {"metadata": {"annotations": wanted}}
            )
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise
        if resources.FIRST_READY in wanted:
            self._ready.pop(uid_of(claim), None)
            sandbox = self._sandboxes.get((key[0], name))
            self._metrics.claim_is_ready(patched, sandbox)
        return None


def _ready(status: str, reason: str, message: str) -> Object:
    return conditions.condition(conditions.READY, status, reason, message)


def _pool_words(claim: Object) -> tuple[str, ...]:
    return ("/".join(_pool_key(claim)),)


def _pool_key(claim: Object) -> Key:
    return claim["metadata"]["namespace"], claim["spec"]["warmPoolRef"]["name"]


def _claim_words(sandbox: Object) -> tuple[str, ...]:
    uid = resources.owner_uid(sandbox, resources.CLAIM)
    return (uid,) if uid else ()


def _bound_name(claim: Object) -> str:
    found = section(section(claim, "status"), "sandbox")
    return found.get("name") or found.get("Name") or ""


def _template_of(pool: Object) -> str:
    return pool["spec"]["sandboxTemplateRef"]["name"]


def _spec_changed(before: Object, after: Object) -> bool:
    return before["spec"] != after["spec"] or uid_of(before) != uid_of(after)


def _rank(sandbox: Object, assigned: str | None) -> tuple[bool, str, str]:
    metadata = sandbox["metadata"]
    return metadata["name"] != assigned, metadata["creationTimestamp"], metadata["name"]


def end_of(claim: Object, pool: Object | None) -> tuple[float, str] | None:
    """When a claim ends, in seconds since the epoch, and what goes then; None if it does not."""
    ends = expiry(claim)
    if ends is not None:
        return ends, claim["spec"]["lifecycle"].get("shutdownPolicy", "Retain")
    return additions.claim_end(claim, pool)


def expiry(claim: Object) -> float | None:
    """When a claim ends by its own lifecycle; None if never."""
    lifecycle = section(claim["spec"], "lifecycle")
    ends: list[float] = []
    if until := lifecycle.get("shutdownTime"):
        ends.append(conditions.seconds_of(until))
    finished = resources.condition_of(claim, conditions.FINISHED)
    seconds = lifecycle.get("ttlSecondsAfterFinished")
    if seconds is not None and finished is not None and finished["status"] == "True":
        ends.append(conditions.seconds_of(finished["lastTransitionTime"]) + seconds)
    return min(ends, default=None)
