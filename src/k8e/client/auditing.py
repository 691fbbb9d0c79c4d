"""The audit trail in the SDK: who did what. Both clients' methods, side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypedDict, TypeVar, Unpack

from k8e.client import operations, requests
from k8e.client.operations import Operation
from k8e.client.records import Record

T = TypeVar("T")
LIMIT = 500


class AuditRow(Record):
    """One thing that somebody did, or was refused."""

    seq: int
    """Its number, from 1, without gaps."""
    at: float
    """Unix time."""
    action: str
    """Like ``exec.started``."""
    outcome: str
    """``allowed`` or ``denied``."""
    principal: str
    """Who; empty if that is not known."""
    via: str
    """How that is known: ``socket``, ``loopback``, ``key``, ``certificate``, or ``gateway``;
    ``grpc`` for somebody who was refused before that."""
    peer: str
    session: str
    owner: str
    """Whose session it is."""
    detail: Mapping[str, Any]
    hash: str


class AuditFilter(TypedDict, total=False):
    """Which rows of the audit trail."""

    session_id: str
    principal: str
    since: float
    """Unix time."""
    until: float
    action: str
    """One action, or with a ``*`` at its end all that begin so."""
    denied: bool
    limit: int


_FILTERS = frozenset(AuditFilter.__annotations__)


def parse(line: str) -> AuditRow:
    """A row from its line of JSON."""
    data: dict[str, Any] = json.loads(line)
    data["owner"] = data.get("owner") or data["principal"]
    names = ("seq", "at", "action", "outcome", "principal", "via", "peer", "session", "owner")
    return AuditRow(*(data[name] for name in names), detail=data["detail"], hash=data["hash"])


def page(wanted: Mapping[str, Any]) -> Operation[dict[str, Any]]:
    """Rows as the gateway wrote them, and where to go on."""
    return (yield from operations.call({"op": "audit", **wanted}))


def verify(expect: str) -> Operation[dict[str, Any]]:
    return (yield from operations.call({"op": "verify_audit", "expect": expect}))


def _rows(wanted: AuditFilter) -> Operation[list[AuditRow]]:
    return [parse(line) for line in (yield from page({"limit": LIMIT, **wanted}))["rows"]]


class Auditing:
    """Methods of the blocking client."""

    def _call(self, operation: Operation[T]) -> T:
        raise NotImplementedError

    def audit(self, **wanted: Unpack[AuditFilter]) -> list[AuditRow]:
        """The newest rows of the audit trail, oldest first; your own, if you are no admin."""
        requests.check_options(self.audit, wanted, _FILTERS)
        return self._call(_rows(wanted))

    def verify_audit(self, expect: str = "") -> dict[str, Any]:
        """Check that no row was changed or removed; ``expect`` is the head of an earlier check."""
        return self._call(verify(expect))


class AsyncAuditing:
    """The same, of the asynchronous client."""

    async def _call(self, operation: Operation[T]) -> T:
        raise NotImplementedError

    async def audit(self, **wanted: Unpack[AuditFilter]) -> list[AuditRow]:
        requests.check_options(self.audit, wanted, _FILTERS)
        return await self._call(_rows(wanted))

    async def verify_audit(self, expect: str = "") -> dict[str, Any]:
        return await self._call(verify(expect))
