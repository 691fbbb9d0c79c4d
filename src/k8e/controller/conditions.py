"""The status of a Sandbox: conditions, reasons and messages. Pure.

Reasons and messages are upstream's wherever clients read them.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from k8e.controller import desired, resources
from k8e.controller.resources import Object
from k8e.kubernetes.api import entries, section

READY, SUSPENDED, SCHEDULED, FINISHED = "Ready", "Suspended", "PodScheduled", "Finished"
DEPENDENCIES_READY, DEPENDENCIES_NOT_READY = "DependenciesReady", "DependenciesNotReady"
SANDBOX_EXPIRED, SANDBOX_SUSPENDED = "SandboxExpired", "SandboxSuspended"
RECONCILER_ERROR, INVALID_CONFIGURATION = "ReconcilerError", "InvalidConfiguration"
MULTIPLE_PODS = "MultiplePods"
TERMINAL = {"Succeeded": "PodSucceeded", "Failed": "PodFailed"}
_LONGEST_MESSAGE = 1024
_LONG_AGO = datetime.datetime(1, 1, 1, tzinfo=datetime.UTC).timestamp()
# Reasons of a waiting container that pass by themselves, in a moment.
_ORDINARY = ("ContainerCreating", "PodInitializing")
# The kubelet goes to and fro between these; people need to be told once.
_IMAGE = ("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName")


def timestamp(seconds: float) -> str:
    """A time as Kubernetes writes it."""
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC).strftime(
        "%Y-%m-%dT%H:%M:%SZ"
    )


def precise_timestamp(seconds: float) -> str:
    found = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return found.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def seconds_of(text: str) -> float:
    """A time of an object, as seconds since the epoch."""
    try:
        return datetime.datetime.fromisoformat(text.upper()).timestamp()
    except ValueError:
        if text.startswith("0000-"):  # valid for the API server; Python's years begin at 1
            return _LONG_AGO
        raise


@dataclass(frozen=True)
class Problem:
    """Why a sandbox cannot get what it should have."""

    reason: str
    message: str


@dataclass(frozen=True)
class Found:
    """What there is of a sandbox."""

    pods: Sequence[Object] = ()
    """Owned pods: one, as a rule."""
    service: Object | None = None
    foreign_pod: bool = False
    """A pod of somebody else has the sandbox's name."""
    problem: Problem | None = None
    replaced_in: float | None = None
    """Seconds until the failed pod is replaced; None if it is not."""

    @property
    def pod(self) -> Object | None:
        return self.pods[0] if self.pods else None


def condition(kind: str, status: str, reason: str, message: str) -> Object:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message[:_LONGEST_MESSAGE],
    }


def merged(item: Object, wanted: Sequence[Object], now: float) -> list[Object]:
    """Conditions with the times of their last transitions, which change with the status alone."""
    old = {one["type"]: one for one in entries(section(item, "status"), "conditions")}
    generation = item["metadata"].get("generation", 1)
    made: list[Object] = []
    for one in wanted:
        before = old.get(one["type"])
        same = before is not None and before["status"] == one["status"]
        at = before["lastTransitionTime"] if same and before is not None else timestamp(now)
        made.append({**one, "lastTransitionTime": at, "observedGeneration": generation})
    return made


def status(sandbox: Object, found: Found, *, domain: str, now: float) -> Object:
    """The whole status that a sandbox should have."""
    wanted = [ready(sandbox, found), suspended(sandbox, found)]
    pod = found.pod
    if pod is not None:
        wanted.append(_scheduled(pod))
    ended = pod is not None and pod["status"].get("phase") in TERMINAL
    if pod is not None and ended and found.replaced_in is None:
        wanted.append(_finished(pod))
    name = sandbox["metadata"]["name"]
    made: Object = {
        "conditions": merged(sandbox, wanted, now),
        "selector": f"{resources.NAME_HASH}={resources.name_hash(name)}",
        "service": name if found.service else None,
        "serviceFQDN": desired.full_name(sandbox, domain) if found.service else None,
        "podIPs": [one["ip"] for one in entries(pod["status"], "podIPs")] if pod else None,
        "nodeName": (pod["spec"].get("nodeName") if pod else None) or None,
    }
    if not made["podIPs"]:
        made["podIPs"] = None
    return made


def expired_status(sandbox: Object, now: float) -> Object:
    """The status of a sandbox whose time is over: its conditions alone are kept."""
    kept = [one for kind in (SUSPENDED, FINISHED) if (one := resources.condition_of(sandbox, kind))]
    wanted = [condition(READY, "False", SANDBOX_EXPIRED, "Sandbox has expired"), *kept]
    return {
        "conditions": merged(sandbox, wanted, now),
        **dict.fromkeys(("service", "serviceFQDN", "podIPs", "nodeName", "selector")),
    }


def ready(sandbox: Object, found: Found) -> Object:
    """The condition Ready."""
    if found.problem is not None:
        return condition(READY, "False", found.problem.reason, found.problem.message)
    if desired.is_suspended(sandbox):
        return condition(READY, "False", SANDBOX_SUSPENDED, "Sandbox is suspended")
    pod = found.pod
    if pod is not None and found.replaced_in is not None:
        message = f"{_end_of(pod)}; it will be replaced"
        return condition(READY, "False", DEPENDENCIES_NOT_READY, message)
    if pod is not None and (reason := TERMINAL.get(pod["status"].get("phase", ""))):
        return condition(READY, "False", reason, _end_of(pod))
    usable, message = _usable(pod)
    if sandbox["spec"].get("service") and found.service is None:
        usable, message = False, f"{message}; Service does not exist"
    elif found.service is not None:
        message = f"{message}; Service Exists"
    reason = DEPENDENCIES_READY if usable else DEPENDENCIES_NOT_READY
    return condition(READY, "True" if usable else "False", reason, message)


def _usable(pod: Object | None) -> tuple[bool, str]:
    if pod is None:
        return False, "Pod does not exist"
    if resources.is_going(pod):
        return False, "Pod is terminating"
    phase = pod["status"].get("phase", "Unknown")
    if phase != "Running":
        why = waiting_for(pod)
        return False, f"Pod exists with phase: {phase}" + (f": {why}" if why else "")
    if not resources.is_true(pod, "Ready"):
        return False, "Pod is Running but not Ready"
    if not pod["status"].get("podIPs"):
        return False, "Pod is Ready but has no address"
    return True, "Pod is Ready"


def waiting_for(pod: Object) -> str:
    """Why a pod does not start, in words that stay the same while the reason does."""
    scheduled = resources.condition_of(pod, "PodScheduled")
    if scheduled is not None and scheduled["status"] == "False":
        return f"{scheduled.get('reason', 'unscheduled')}: {scheduled.get('message', '')}".rstrip(
            ": "
        )
    for part in ("initContainerStatuses", "containerStatuses"):
        for one in entries(pod["status"], part):
            waiting = section(section(one, "state"), "waiting")
            reason = waiting.get("reason") or ""
            if reason in _IMAGE:
                return f"container {one['name']}: the image {one.get('image')} cannot be pulled"
            if reason and reason not in _ORDINARY:
                return f"container {one['name']}: {reason}: {waiting.get('message', '')}".rstrip(
                    ": "
                )
    return ""


def _end_of(pod: Object) -> str:
    phase = pod["status"]["phase"]
    told = pod["status"].get("message") or pod["status"].get("reason") or ""
    return f"Pod has {phase.lower()}" + (f": {told}" if told else "")


def _finished(pod: Object) -> Object:
    return condition(FINISHED, "True", TERMINAL[pod["status"]["phase"]], _end_of(pod))


def _scheduled(pod: Object) -> Object:
    found = resources.condition_of(pod, "PodScheduled")
    if found is None:
        bound = bool(pod["spec"].get("nodeName"))
        status, reason = ("True", "PodScheduled") if bound else ("Unknown", "PodSchedulingUnknown")
        return condition(SCHEDULED, status, reason, "")
    fallback = "PodScheduled" if found["status"] == "True" else "PodSchedulingUnknown"
    reason = found.get("reason") or fallback
    return condition(SCHEDULED, found["status"], reason, found.get("message") or "")


def suspended(sandbox: Object, found: Found) -> Object:
    """The condition Suspended, which every sandbox has."""
    if not desired.is_suspended(sandbox):
        return condition(SUSPENDED, "False", "NotSuspended", "Sandbox is not suspended")
    if found.pods:
        return condition(SUSPENDED, "False", "PodTerminating", "Pod is terminating")
    if found.foreign_pod:
        message = "A pod of this name is not owned by the sandbox"
        return condition(SUSPENDED, "False", "PodNotOwned", message)
    if found.problem is not None:
        return condition(SUSPENDED, "Unknown", "PodStateUnknown", found.problem.message)
    return condition(SUSPENDED, "True", "PodTerminated", "Pod is terminated")


def status_patch(item: Object, wanted: Object) -> Object:
    """A merge patch that makes an object's status as wanted; empty if it is."""
    has = section(item, "status")
    change = {name: value for name, value in wanted.items() if has.get(name) != value}
    return {"status": change} if change else {}


def may_wait(item: Object, patch: Object) -> bool:
    """Whether a change of a status only says where a pod went that is not ready yet.

    The next write, a moment later, says it too.
    """
    change = patch["status"]
    if not set(change) <= {"nodeName", "conditions"} or resources.is_true(item, READY):
        return False
    old = {one["type"]: one for one in entries(section(item, "status"), "conditions")}
    if not old:
        return False
    for one in entries(change, "conditions"):
        before = old.pop(one["type"], None)
        if one["type"] == SCHEDULED and one["status"] == "True" and before is not None:
            continue
        if one != before:
            return False
    return not old
