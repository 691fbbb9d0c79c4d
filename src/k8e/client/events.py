"""Events in the SDK: what happened in a session. Both clients' methods, side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from k8e.client import operations
from k8e.client.operations import Operation
from k8e.client.records import Record

T = TypeVar("T")
LIMIT = 500


class Event(Record):
    """One thing that happened in a session."""

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
    """The events as the gateway wrote them, one line of JSON each; without an id of all."""
    call: dict[str, Any] = {"op": "events", "session_id": session_id, "limit": limit}
    return list((yield from operations.call(call))["events"])


def _events(session_id: str, limit: int) -> Operation[list[Event]]:
    return [parse(line) for line in (yield from lines(session_id, limit))]


class Telling:
    """Methods of the blocking client."""

    def _call(self, operation: Operation[T]) -> T:
        raise NotImplementedError

    def events(self, session_id: str = "", limit: int = LIMIT) -> list[Event]:
        """What happened in a session, oldest first: the newest ``limit`` events.

        Without an id, what happened in all sessions of the caller. Of one session, there were older
        ones if the first has a :attr:`Event.seq` above 1. The events of a session that has ended
        can be asked for as long as the session itself: a day.
        """
        return self._call(_events(session_id, limit))


class AsyncTelling:
    """The same, of the asynchronous client."""

    async def _call(self, operation: Operation[T]) -> T:
        raise NotImplementedError

    async def events(self, session_id: str = "", limit: int = LIMIT) -> list[Event]:
        return await self._call(_events(session_id, limit))
