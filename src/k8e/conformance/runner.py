"""Checks behaviours and reports results; knows which promises need root.

Each is reported as not applicable there, with its reason; ``k8e doctor`` says whether there is one.
"""

from __future__ import annotations

import asyncio
import enum
import subprocess
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from k8e import errors, rootless
from k8e.conformance.behaviour import ALL, Behaviour, BrokenPromise, NotApplicable
from k8e.conformance.stage import Stage, staged
from k8e.runtimes import cgroups
from k8e.runtimes.base import Runtime

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


def why_unheld(behaviour: str, runtime: str) -> str:
    """Why this user's sandboxes cannot keep a promise; empty if they can."""
    known: dict[str, str] = {}
    if runtime == "container" and rootless.inside() is not None:
        known |= ONLY_ROOT
    if not cgroups.usable():
        known |= {**ALWAYS, **(CONTAINER if runtime == "container" else {})}
    return known.get(behaviour) or known.get(behaviour.partition(".")[0], "")


BEHAVIOUR_SECONDS = 200.0  # most take less than one; machines are busy
_SURPRISES = (
    BrokenPromise,
    errors.K8eError,
    OSError,
    ValueError,
    LookupError,
    subprocess.SubprocessError,
)
"""How a check fails; anything else is a mistake of the check itself."""


class Verdict(enum.StrEnum):
    """Whether a runtime keeps a promise."""

    PASS = "pass"  # noqa: S105 - not a password
    FAIL = "fail"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class BehaviourResult:
    """The result of one behaviour."""

    behaviour: Behaviour
    verdict: Verdict
    reason: str
    seconds: float


def choose(words: Iterable[str]) -> list[str]:
    """The behaviours that ``words`` name: each an id, or the part before its first dot."""
    chosen: dict[str, None] = {}
    for word in words:
        found = [name for name in ALL if name == word or name.partition(".")[0] == word]
        if not found:
            raise errors.InvalidRequest(
                f"there is no behaviour {word!r}", hint="k8e conformance run --list shows them all"
            )
        chosen.update(dict.fromkeys(found))
    return [name for name in ALL if name in chosen]


async def results(
    runtime: Runtime, ids: Iterable[str] | None = None, *, folders: Sequence[Path] = ()
) -> AsyncGenerator[BehaviourResult]:
    """Check behaviours (all, or those named) against a runtime, one after the other.

    ``folders`` are those where the runtime keeps files on this host, if it does.
    """
    chosen = list(ALL) if ids is None else choose(ids)
    async with staged(runtime, folders=folders) as stage:
        for name in chosen:
            yield known_gap(ALL[name], runtime) or await check(ALL[name], stage)


async def run(
    runtime: Runtime, ids: Iterable[str] | None = None, *, folders: Sequence[Path] = ()
) -> list[BehaviourResult]:
    """The same, all at the end."""
    return [result async for result in results(runtime, ids, folders=folders)]


def known_gap(behaviour: Behaviour, runtime: Runtime) -> BehaviourResult | None:
    """The reason why a runtime is known not to keep a promise; None if it does."""
    reason = behaviour.gaps.get(runtime.name) or why_unheld(behaviour.id, runtime.name)
    return BehaviourResult(behaviour, Verdict.NOT_APPLICABLE, reason, 0.0) if reason else None


async def check(behaviour: Behaviour, stage: Stage) -> BehaviourResult:
    """Check one behaviour on a stage that others may use too."""
    began = time.monotonic()
    verdict, reason = Verdict.PASS, ""
    try:
        async with asyncio.timeout(BEHAVIOUR_SECONDS):
            await behaviour.check(stage)
    except NotApplicable as error:
        verdict, reason = Verdict.NOT_APPLICABLE, str(error)
    except _SURPRISES as error:
        verdict, reason = Verdict.FAIL, f"{type(error).__name__}: {error}"
    finally:
        await stage.clear()
    return BehaviourResult(behaviour, verdict, reason, time.monotonic() - began)
