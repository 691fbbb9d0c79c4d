"""The audit trail."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypedDict

from k8e.client import operations
from k8e.client.operations import Operation
from k8e.client.records import Record

LIMIT = 500


class AuditRow(Record):
    """One action of a caller, or its refusal."""

    seq: int
    """Its number, from 1, without gaps."""
    at: float
    """Unix time."""
    action: str
    """Like ``exec.started``."""
    outcome: str
    """``allowed`` or ``denied``."""
    principal: str
    """The principal; empty if it is not known."""
    via: str
    """How that is known: ``socket``, ``loopback``, ``key``, ``certificate``, or ``gateway``;
    ``grpc`` for a caller who was refused before that.
    """
    peer: str
    session: str
    owner: str
    """Whose session it is."""
    detail: Mapping[str, Any]
    hash: str


class AuditFilter(TypedDict, total=False):
    """A selection of rows of the audit trail."""

    session_id: str
    principal: str
    since: float
    """Unix time."""
    until: float
    action: str
    """One action, or with a ``*`` at its end all that begin so."""
    denied: bool
    limit: int


FILTERS = frozenset(AuditFilter.__annotations__)


def parse(line: str) -> AuditRow:
    """A row from its line of JSON."""
    data: dict[str, Any] = json.loads(line)
    data["owner"] = data.get("owner") or data["principal"]
    names = ("seq", "at", "action", "outcome", "principal", "via", "peer", "session", "owner")
    return AuditRow(*(data[name] for name in names), detail=data["detail"], hash=data["hash"])


def page(wanted: Mapping[str, Any]) -> Operation[dict[str, Any]]:
    """Rows as the gateway wrote them, and the cursor to go on from."""
    return (yield from operations.call({"op": "audit", **wanted}))


def verify(expect: str) -> Operation[dict[str, Any]]:
    return (yield from operations.call({"op": "verify_audit", "expect": expect}))


def rows(wanted: AuditFilter) -> Operation[list[AuditRow]]:
    return [parse(line) for line in (yield from page({"limit": LIMIT, **wanted}))["rows"]]
