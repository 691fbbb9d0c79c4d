"""Behaviours: promises that every runtime makes, and the list of all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from k8e.conformance.lab.rooms import Room
from k8e.conformance.outcomes import BrokenPromise, NotApplicable, equal, expect
from k8e.conformance.stage import Stage

__all__ = [
    "ALL",
    "Behaviour",
    "BrokenPromise",
    "Check",
    "NotApplicable",
    "behaviour",
    "equal",
    "expect",
    "in_a_room",
]

Check = Callable[[Stage], Awaitable[None]]
InARoom = Callable[[Room], None]


def _none() -> Mapping[str, str]:
    return {}


@dataclass(frozen=True)
class Behaviour:
    """One promise that every runtime makes."""

    id: str
    promise: str
    """One sentence, for people."""
    check: Check
    gaps: Mapping[str, str] = field(default_factory=_none)
    """Runtimes that are known not to keep it, each with the reason. There the check must fail."""


ALL: dict[str, Behaviour] = {}
"""Every behaviour by id, in the order in which they are checked."""


def behaviour(name: str, **gaps: str) -> Callable[[Check], Check]:
    """Add a function to the suite; its docstring's first line is the promise.

    ``gaps`` are the runtimes for which it does not hold, with the reason.
    """

    def add(check: Check) -> Check:
        if name in ALL:
            raise ValueError(f"two behaviours are called {name!r}")
        promise = (check.__doc__ or "").strip().split("\n")[0]
        ALL[name] = Behaviour(name, promise, check, gaps)
        return check

    return add


def in_a_room(name: str, **gaps: str) -> Callable[[InARoom], InARoom]:
    """Add a check that needs a whole gateway: a session of it on an internet of its own."""

    def add(check: InARoom) -> InARoom:
        async def enter(stage: Stage) -> None:
            room = await stage.room()
            await asyncio.to_thread(check, room)

        enter.__doc__ = check.__doc__
        behaviour(name, **gaps)(enter)
        return check

    return add
