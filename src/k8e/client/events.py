"""Events: a session's history."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from k8e.client import operations
from k8e.client.operations import Operation
from k8e.client.records import Record

LIMIT = 500


class Event(Record):
    """One event of a session."""

    at: float
    """Unix time."""
    seq: int
    """Its number in the session, from 1; older events may have been dropped."""
    kind: str
    """Like ``exec.started``."""
    session_id: str
    fields: Mapping[str, Any]
    """What else is known about it; that depends on its kind."""


def parse(line: str) -> Event:
    """An event from its line of JSON."""
    data: dict[str, Any] = json.loads(line)
    known = [data.pop(name) for name in ("at", "seq", "kind", "session_id")]
    return Event(*known, fields=data)


def lines(session_id: str, limit: int) -> Operation[list[str]]:
    """The events as the gateway wrote them, as lines of JSON; of all sessions without an id."""
    call: dict[str, Any] = {"op": "events", "session_id": session_id, "limit": limit}
    return list((yield from operations.call(call))["events"])


def newest(session_id: str, limit: int) -> Operation[list[Event]]:
    return [parse(line) for line in (yield from lines(session_id, limit))]
