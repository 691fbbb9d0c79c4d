"""Promises that only root keeps, or a control group: a gateway that is not root seldom has one.

Each is told as not applicable there, with its reason; ``k8e doctor`` says whether there is one.
"""

from __future__ import annotations

from k8e import rootless
from k8e.runtimes import cgroups

_WHOLE = "nothing holds a sandbox as a whole without a control group, and this user has none"
_FREEZER = "a container is paused by its control group, and this user has none"
_COUNTED = "the kernel counts these for all sandboxes of a user who is not root together"
_GUEST = "without a control group the guest counts as one of the programs while it starts another"
ALWAYS = {
    "limits.cpu": _WHOLE,
    "limits.cpu-weight": _WHOLE,
    "limits.memory": _WHOLE,
    "limits.memory-together": _WHOLE,
    "bounds.memory-told": _WHOLE,
    "noise.memory": _WHOLE,
    "settle.less": _WHOLE,
}
CONTAINER = {
    "pause": _FREEZER,
    "keep.pauses": _FREEZER,
    "limits.pids": _GUEST,
}
ONLY_ROOT = {"hoard.watchers": _COUNTED}


def why_not(behaviour: str, runtime: str) -> str:
    """Why a promise cannot be kept by this user's sandboxes; nothing if it can."""
    known: dict[str, str] = {}
    if runtime == "container" and rootless.inside() is not None:
        known |= ONLY_ROOT
    if not cgroups.usable():
        known |= {**ALWAYS, **(CONTAINER if runtime == "container" else {})}
    return known.get(behaviour) or known.get(behaviour.partition(".")[0], "")
