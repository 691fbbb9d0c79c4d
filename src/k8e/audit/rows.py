"""Rows as lines of JSON, each with the hash of the one before: pure functions.

A row's hash covers its bytes up to the hash itself, so that checking it needs no idea of what a
canonical form of JSON is.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from k8e.json_lines import MAX_LINE, to_json

ALLOWED, DENIED = "allowed", "denied"
SHORT = 1 << 10  # bytes of a value that stays in a row that is too long
NO_HASH = "0" * 64
"""The previous hash in the very first row."""
_HASH = re.compile(rb',"prev":"([0-9a-f]{64})","hash":"([0-9a-f]{64})"\}')
_SEQ = re.compile(rb'\{"seq":([0-9]{1,18}),')
_TAIL = len(',"hash":""}') + 64
_PREV = len(',"prev":""') + 64


class AuditRow(NamedTuple):
    """A row before it gets its number."""

    action: str
    """A constant like ``noun.verb``."""
    outcome: str
    principal: str
    via: str
    peer: str
    session: str
    owner: str
    """Whose session it is, where that is not the principal."""
    detail: dict[str, str]
    """Further facts, each as JSON already."""


class ChainLink(NamedTuple):
    """A row's place in the chain."""

    seq: int
    prev: str
    hash: str


def encode(seq: int, at: float, row: AuditRow, prev: str) -> tuple[bytes, str]:
    """The line of a row, and its hash."""
    detail = _members(row.detail)
    if len(detail) > MAX_LINE:  # short values say most
        short = {name: value for name, value in row.detail.items() if len(value) <= SHORT}
        detail = _members({**short, "cut": "true"})
    owner = f',"owner":{to_json(row.owner)}' if row.owner else ""
    body = (
        f'{{"seq":{seq},"at":{at:.6f},"action":"{row.action}","outcome":"{row.outcome}",'
        f'"principal":{to_json(row.principal)},"via":{to_json(row.via)},'
        f'"peer":{to_json(row.peer)},"session":{to_json(row.session)}{owner},'
        f'"detail":{{{detail}}},"prev":"{prev}"'
    ).encode("ascii")
    found = hashlib.sha256(body).hexdigest()
    return body + f',"hash":"{found}"}}\n'.encode("ascii"), found


def _members(detail: dict[str, str]) -> str:
    return ",".join([f'"{name}":{value}' for name, value in detail.items()])


def link(line: bytes) -> ChainLink | None:
    """The place of a line (without its end) in the chain; None if it is not a row."""
    seq = _SEQ.match(line)
    hashes = _HASH.fullmatch(line, len(line) - _TAIL - _PREV) if len(line) > _TAIL + _PREV else None
    if seq is None or hashes is None:
        return None
    return ChainLink(int(seq[1]), hashes[1].decode(), hashes[2].decode())


def is_whole(line: bytes, found: ChainLink) -> bool:
    """Whether a line matches its own hash."""
    return hashlib.sha256(line[:-_TAIL]).hexdigest() == found.hash


@dataclass(frozen=True)
class Filter:
    """The rows that a query wants; an empty field matches all."""

    session: str = ""
    principal: str = ""
    since: float = 0
    until: float = 0
    action: str = ""
    """One action, or all that begin with what stands before a ``*``."""
    denied: bool = False
    of: str = ""
    """Only rows of this principal and of its sessions, for a caller who is not an admin."""

    def needles(self) -> list[bytes]:
        """Bytes that each matching line contains, since searching for bytes is quick."""
        found = [f'"session":{to_json(self.session)}'] if self.session else []
        if self.principal:
            found.append(f'"principal":{to_json(self.principal)[:-1]}')
        if self.denied:
            found.append(f'"outcome":"{DENIED}"')
        if self.of:
            found.append(f":{to_json(self.of)}")
        return [text.encode("ascii") for text in found]

    def matches(self, row: dict[str, Any]) -> bool:
        return (
            (not self.session or row.get("session") == self.session)
            and (not self.principal or _is_of(str(row.get("principal")), self.principal))
            and (not self.since or row.get("at", 0) >= self.since)
            and (not self.until or row.get("at", 0) < self.until)
            and (not self.action or _is_action(str(row.get("action")), self.action))
            and (not self.denied or row.get("outcome") == DENIED)
            and (not self.of or self.of in (row.get("principal"), row.get("owner")))
        )


def _is_of(principal: str, wanted: str) -> bool:
    """Whether a name matches; ``key:NAME`` means every key that ever had the name."""
    return principal == wanted or principal.startswith(f"{wanted}:")


def _is_action(action: str, wanted: str) -> bool:
    if wanted.endswith("*"):
        return action.startswith(wanted[:-1])
    return action == wanted


def parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None  # pyright: ignore[reportUnknownVariableType]
