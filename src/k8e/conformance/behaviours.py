"""What a behaviour is, and the list of all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from k8e.conformance.stage import Stage

Check = Callable[[Stage], Awaitable[None]]


class Broken(Exception):
    """A promise that the runtime does not keep; the message says what was seen instead."""


class NotApplicable(Exception):
    """A promise that means nothing for this runtime; the message says why."""


@dataclass(frozen=True)
class Behaviour:
    """One promise that every runtime makes."""

    id: str
    promise: str
    """One sentence, for people."""
    check: Check


ALL: dict[str, Behaviour] = {}
"""Every behaviour by id, in the order in which they are checked."""


def behaviour(name: str) -> Callable[[Check], Check]:
    """Add a function to the suite; its docstring's first line is the promise."""

    def add(check: Check) -> Check:
        if name in ALL:
            raise ValueError(f"two behaviours are called {name!r}")
        promise = (check.__doc__ or "").strip().split("\n")[0]
        ALL[name] = Behaviour(name, promise, check)
        return check

    return add


def equal(seen: Any, wanted: Any, what: str) -> None:
    if seen != wanted:
        raise Broken(f"{what}: {_short(seen)} instead of {_short(wanted)}")


def expect(fits: object, message: str) -> None:
    if not fits:
        raise Broken(message)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:140]} … {text[-140:]} ({len(text)} characters)"
