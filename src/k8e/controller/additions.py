"""What goes beyond upstream: annotations of our own group, each off unless it is set. Pure.

On a SandboxTemplate the sandbox's annotations are inherited by the sandboxes that are made of it;
on a claim they count where the template says nothing. A pool's annotations are about its claims and
how fast it is filled.
"""

from __future__ import annotations

from dataclasses import dataclass

from k8e.controller import conditions, resources
from k8e.controller.resources import Object
from k8e.kubernetes.api import entries, section

GROUP = "sandbox.k8e.io"

# Of a sandbox; a template's and a claim's are inherited.
IDLE_SECONDS = f"{GROUP}/idle-seconds"
"""Suspend a sandbox after so many seconds without traffic."""
RECREATE_FAILED = f"{GROUP}/recreate-failed"
"""``"true"``: a pod that has failed is replaced, after a pause that doubles."""
INHERITED = (IDLE_SECONDS, RECREATE_FAILED)

# Marks on a sandbox. The controller sets who suspended it; the router says when it was used, and
# wakes it by operatingMode, which takes that mark away.
LAST_ACTIVE = f"{GROUP}/last-active"
SUSPENDED_BY = f"{GROUP}/suspended-by"
IDLE = "idle"
RECREATED = f"{GROUP}/recreated"

# Of a warm pool.
CLAIM_SECONDS = f"{GROUP}/claim-seconds"
"""Claims of the pool that name no end of their own end so long after their creation."""
CLAIM_POLICY = f"{GROUP}/claim-shutdown-policy"
"""What goes then: ``Delete`` (the default), ``DeleteForeground`` or ``Retain``."""
REPLENISH_DELAY = f"{GROUP}/replenish-delay-seconds"
"""A member that a claim took is replaced no sooner than this."""
REPLENISH_RATE = f"{GROUP}/replenish-per-second"
"""The most members that are made in a second."""

_POLICIES = ("Delete", "DeleteForeground", "Retain")
_FIRST_PAUSE, _LONGEST_PAUSE = 10.0, 300.0
_LASTING_SECONDS = 600.0
"""A pod that lived so long did not fail because of what it is: the pause starts from none again."""


def seconds(item: Object, name: str) -> float | None:
    """A positive number of an annotation; None where there is none, or what is there is none."""
    try:
        found = float(resources.annotations_of(item).get(name, ""))
    except ValueError:
        return None
    return found if 0 < found < float("inf") else None


def invalid(item: Object) -> str:
    """What is wrong with the annotations of an object, in a sentence; empty if nothing."""
    has = resources.annotations_of(item)
    for name in (IDLE_SECONDS, CLAIM_SECONDS, REPLENISH_DELAY, REPLENISH_RATE):
        if name in has and seconds(item, name) is None:
            return f"the annotation {name} is no positive number: {has[name][:64]!r}"
    if RECREATE_FAILED in has and has[RECREATE_FAILED] not in ("true", "false"):
        return f"the annotation {RECREATE_FAILED} is neither true nor false"
    if CLAIM_POLICY in has and has[CLAIM_POLICY] not in _POLICIES:
        return f"the annotation {CLAIM_POLICY} is none of {', '.join(_POLICIES)}"
    return ""


def inherited(*sources: Object) -> dict[str, str]:
    """Annotations of a new sandbox; what an earlier source says stands."""
    made: dict[str, str] = {}
    for source in reversed(sources):
        has = resources.annotations_of(source)
        made |= {name: has[name] for name in INHERITED if name in has}
    return made


# Idle sandboxes.


def idle_left(sandbox: Object, now: float) -> float | None:
    """How long a sandbox may still be without traffic; None if it is not suspended for that.

    Idle members of a pool wait to be claimed: that is what they are for.
    """
    limit = seconds(sandbox, IDLE_SECONDS)
    ready = resources.condition_of(sandbox, conditions.READY)
    if limit is None or ready is None or ready["status"] != "True":
        return None
    if resources.owner_uid(sandbox, resources.POOL):
        return None
    since = conditions.seconds_of(ready["lastTransitionTime"])
    if (told := _time(resources.annotations_of(sandbox).get(LAST_ACTIVE))) is not None:
        since = max(since, min(told, now))
    return since + limit - now


def _time(text: str | None) -> float | None:
    try:
        return conditions.seconds_of(text) if text else None
    except ValueError:
        return None


def suspension(sandbox: Object) -> Object:
    """The patch that suspends an idle sandbox, unless it was used meanwhile."""
    return {
        "metadata": {
            "resourceVersion": sandbox["metadata"]["resourceVersion"],
            "annotations": {SUSPENDED_BY: IDLE},
        },
        "spec": {"operatingMode": "Suspended"},
    }


def activity(now: float) -> Object:
    """The patch that says that a sandbox is in use."""
    return {"metadata": {"annotations": {LAST_ACTIVE: conditions.timestamp(now)}}}


def awake(now: float) -> Object:
    """The patch of a sandbox that runs again: a later stop is a person's, who wants it to stay."""
    patch = activity(now)
    patch["metadata"]["annotations"][SUSPENDED_BY] = None
    return patch


# Failed pods.


@dataclass(frozen=True)
class Replacement:
    """When a failed pod is replaced, and how many were before it."""

    left: float
    count: int


def is_replaced(sandbox: Object, pod: Object) -> bool:
    """Whether a pod has failed and is to be replaced."""
    wanted = resources.annotations_of(sandbox).get(RECREATE_FAILED) == "true"
    return wanted and pod["status"].get("phase") == "Failed"


def replacement(sandbox: Object, pod: Object, now: float) -> Replacement:
    """When to replace a failed pod: at once, then after pauses that double."""
    began = conditions.seconds_of(pod["metadata"]["creationTimestamp"])
    times = [
        conditions.seconds_of(one["lastTransitionTime"])
        for one in entries(section(pod, "status"), "conditions")
        if one.get("lastTransitionTime")
    ]
    ended = max(times, default=began)
    count = int(seconds(sandbox, RECREATED) or 0)
    if ended - began > _LASTING_SECONDS:
        count = 0
    pause = min(_FIRST_PAUSE * 2 ** min(count - 1, 16), _LONGEST_PAUSE) if count else 0.0
    return Replacement(ended + pause - now, count)


def recreated(count: int) -> Object:
    """The patch that counts a replacement."""
    return {"metadata": {"annotations": {RECREATED: str(count)}}}


# Claims without an end of their own.


def claim_words(pool: Object | None) -> tuple[str | None, ...]:
    """What a pool says of its claims' end."""
    has = resources.annotations_of(pool) if pool is not None else {}
    return has.get(CLAIM_SECONDS), has.get(CLAIM_POLICY)


def claim_end(claim: Object, pool: Object | None) -> tuple[float, str] | None:
    """When a claim ends that says nothing of it, and what goes then, by its pool."""
    lifecycle = section(claim["spec"], "lifecycle")
    named = "shutdownTime" in lifecycle or "ttlSecondsAfterFinished" in lifecycle
    if pool is None or named or (lasts := seconds(pool, CLAIM_SECONDS)) is None:
        return None
    policy = resources.annotations_of(pool).get(CLAIM_POLICY, _POLICIES[0])
    ends = conditions.seconds_of(claim["metadata"]["creationTimestamp"]) + lasts
    return ends, policy if policy in _POLICIES else _POLICIES[0]
