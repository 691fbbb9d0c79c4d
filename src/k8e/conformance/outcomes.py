"""Outcomes of a behaviour that is broken, or that does not apply."""

from __future__ import annotations

from typing import Any


class BrokenPromise(Exception):
    """A promise that the runtime does not keep; the message says what was seen instead."""


class NotApplicable(Exception):
    """A promise that has no meaning for this runtime; the message says why."""


def equal(seen: Any, wanted: Any, what: str) -> None:
    if seen != wanted:
        raise BrokenPromise(f"{what}: {_short(seen)} instead of {_short(wanted)}")


def expect(fits: object, message: str) -> None:
    if not fits:
        raise BrokenPromise(message)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:140]} … {text[-140:]} ({len(text)} characters)"
