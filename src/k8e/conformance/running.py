"""Checks behaviours and says what came of each."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from k8e import errors
from k8e.conformance.behaviours import ALL, Behaviour, Broken, NotApplicable
from k8e.conformance.stage import Stage, staged
from k8e.runtimes.base import Runtime

BEHAVIOUR_SECONDS = 90.0


class Verdict(enum.StrEnum):
    """Whether a runtime keeps a promise."""

    PASS = "pass"  # noqa: S105 - not a password
    FAIL = "fail"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class Result:
    """What came of one behaviour."""

    behaviour: Behaviour
    verdict: Verdict
    reason: str
    seconds: float


async def run(
    runtime: Runtime, ids: Iterable[str] | None = None, *, folders: Sequence[Path] = ()
) -> list[Result]:
    """Check behaviours (all, or those named) against a runtime, one after the other.

    ``folders`` are those where the runtime keeps files on this host, if it does.
    """
    chosen = list(ALL) if ids is None else list(ids)
    for name in chosen:
        if name not in ALL:
            raise errors.InvalidRequest(f"there is no behaviour {name!r}")
    async with staged(runtime, folders=folders) as stage:
        return [await check(ALL[name], stage) for name in chosen]


async def check(behaviour: Behaviour, stage: Stage) -> Result:
    """Check one behaviour on a stage that others may use too."""
    began = time.monotonic()
    verdict, reason = Verdict.PASS, ""
    try:
        async with asyncio.timeout(BEHAVIOUR_SECONDS):
            await behaviour.check(stage)
    except NotApplicable as error:
        verdict, reason = Verdict.NOT_APPLICABLE, str(error)
    except (Broken, errors.K8eError, OSError, ValueError, LookupError) as error:
        verdict, reason = Verdict.FAIL, f"{type(error).__name__}: {error}"
    finally:
        await stage.clear()
    return Result(behaviour, verdict, reason, time.monotonic() - began)
