"""Checked arguments of calls: a client may send anything."""

from __future__ import annotations

from typing import Any

from k8e import errors


def text(call: dict[str, Any], key: str, *, optional: bool = False) -> str:
    value = call.get(key)
    if optional and value is None:
        return ""
    if not isinstance(value, str) or not (value or optional):
        raise errors.InvalidRequest(f"{key} is missing")
    return value


def seconds(call: dict[str, Any], key: str) -> float:
    """A number of seconds; 0 if it was not given."""
    value = call.get(key) or 0
    if not isinstance(value, (int, float)) or not value >= 0:
        raise errors.InvalidRequest(f"{key} must be a number of seconds")
    return float(value)
