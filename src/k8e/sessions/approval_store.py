"""Stores of approvals: the interface, and SQLite in the data folder.

A file of its own: it is written seldom, and an
approval must be on the disk before a client acts on it.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from k8e import database
from k8e.database import DONE, Done
from k8e.sessions import live

MIGRATIONS = (
    """
    CREATE TABLE approvals (
        approval_id TEXT PRIMARY KEY,
        owner       TEXT NOT NULL,
        session_id  TEXT NOT NULL,
        sandbox_id  TEXT NOT NULL,
        action      TEXT NOT NULL,
        status      TEXT NOT NULL,
        created_at  REAL NOT NULL,
        expires_at  REAL NOT NULL,
        decided_at  REAL NOT NULL DEFAULT 0,
        advisory    INTEGER NOT NULL DEFAULT 1,
        reason      TEXT NOT NULL DEFAULT ''
    ) STRICT;
    CREATE INDEX by_status ON approvals (status, created_at);
    CREATE TABLE approver (one INTEGER PRIMARY KEY CHECK (one = 1), salt BLOB, hash BLOB) STRICT;
    """,
    """
    ALTER TABLE approvals ADD COLUMN deadline REAL NOT NULL DEFAULT 0;
    CREATE INDEX by_sandbox ON approvals (sandbox_id);
    """,
)
_COLUMNS = (
    "approval_id, owner, session_id, sandbox_id, action, status, created_at, expires_at, "
    "deadline, decided_at, advisory, reason"
)

PENDING = "pending"
APPROVED = "approved"
REJECTED = "rejected"
USED = "used"
EXPIRED = "expired"


@dataclass(frozen=True)
class Approval:
    """One action that an approver is asked to allow, once."""

    approval_id: str
    owner: str
    session_id: str
    sandbox_id: str
    """Sessions may follow each other under one id; their sandboxes never do."""
    action: str
    status: str
    """``pending``, ``approved``, ``rejected``, ``used`` or ``expired``."""
    created_at: float
    expires_at: float
    """A date, for people."""
    deadline: float
    """The same moment by the clock that counts from the machine's start: it decides."""
    decided_at: float = 0
    advisory: bool = True
    """Whether any caller of the gateway can decide it, or has decided it."""
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields that a client may see."""
        return {
            "approval_id": self.approval_id,
            "session_id": self.session_id,
            "action": self.action,
            "status": self.status,
            "approved": self.status in (APPROVED, USED),
            "advisory": self.advisory,
            "reason": self.reason,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "decided_at": self.decided_at,
        }


class PendingApproval(NamedTuple):
    """An action that waits for a decision, without its long texts."""

    approval_id: str
    owner: str
    session_id: str
    sandbox_id: str
    length: int
    """Characters of its text."""


class ApprovalStore(Protocol):
    """The approvals of one gateway, or of several that share a database."""

    on_change: list[Callable[[str], None]]
    """Called with the id of each approval that another gateway has changed."""

    def close(self) -> None: ...

    def get(self, approval_id: str) -> Awaitable[Approval | None]: ...

    def pending(self, now: float, owner: str = "") -> Awaitable[list[PendingApproval]]:
        """Undecided actions of one owner or of all, oldest first, without their texts."""
        ...

    def several(self, approval_ids: Iterable[str]) -> Awaitable[list[Approval]]:
        """These approvals, oldest first."""
        ...

    def count_pending(self, sandbox_id: str, now: float) -> Awaitable[int]:
        """How many actions of one sandbox are undecided."""
        ...

    def count(self, sandbox_id: str) -> Awaitable[int]: ...

    def sandboxes(self) -> Awaitable[list[str]]:
        """The sandboxes of this gateway that have approvals."""
        ...

    def approver(self) -> Awaitable[tuple[bytes, bytes] | None]:
        """Salt and hash of the approver's secret."""
        ...

    def insert(self, approval: Approval) -> Awaitable[None]: ...

    def decide(self, approval: Approval, now: float) -> Awaitable[bool]:
        """Store a decision; False if there was one already, or it came too late."""
        ...

    def use(self, approval_id: str, now: float) -> Awaitable[bool]:
        """Mark an approved action as used; True for exactly one caller."""
        ...

    def forget_oldest(self, sandbox_id: str, now: float, how_many: int) -> Awaitable[None]:
        """Remove a sandbox's oldest approvals that can no longer be used."""
        ...

    def forget(self, before: float) -> Awaitable[None]:
        """Remove approvals that expired long ago."""
        ...

    def forget_sandbox(self, sandbox_id: str) -> Awaitable[None]:
        """Remove all approvals of a sandbox that has ended."""
        ...

    def set_approver(self, salt: bytes, digest: bytes) -> Awaitable[None]: ...


class SqliteApprovalStore:
    """The approvals of one gateway, in a file."""

    def __init__(self, path: Path) -> None:
        self.on_change: list[Callable[[str], None]] = []
        # A used approval stays used, also after a power failure.
        self._db = database.connect(path, MIGRATIONS, durable=True)
        # An older release wrote dates alone.
        self._db.execute(
            "UPDATE approvals SET deadline = expires_at + ? WHERE deadline = 0",
            (live.boot_offset(),),
        )

    def close(self) -> None:
        self._db.close()

    def insert(self, approval: Approval) -> Done[None]:
        self._db.execute(
            "INSERT INTO approvals (approval_id, owner, session_id, sandbox_id, action, status,"
            " created_at, expires_at, deadline) VALUES (?,?,?,?,?,?,?,?,?)",
            (
                approval.approval_id,
                approval.owner,
                approval.session_id,
                approval.sandbox_id,
                approval.action,
                approval.status,
                approval.created_at,
                approval.expires_at,
                approval.deadline,
            ),
        )
        return DONE

    def decide(self, approval: Approval, now: float) -> Done[bool]:
        done = self._db.execute(
            "UPDATE approvals SET status=?, decided_at=?, advisory=?, reason=? "
            "WHERE approval_id=? AND status='pending' AND deadline > ?",
            (
                approval.status,
                approval.decided_at,
                int(approval.advisory),
                approval.reason,
                approval.approval_id,
                now,
            ),
        )
        return Done(done.rowcount == 1)

    def use(self, approval_id: str, now: float) -> Done[bool]:
        done = self._db.execute(
            "UPDATE approvals SET status='used' "
            "WHERE approval_id=? AND status='approved' AND deadline > ?",
            (approval_id, now),
        )
        return Done(done.rowcount == 1)

    def get(self, approval_id: str) -> Done[Approval | None]:
        found = self._select("approval_id=?", approval_id)
        return Done(found[0] if found else None)

    def pending(self, now: float, owner: str = "") -> Done[list[PendingApproval]]:
        condition, values = "status='pending' AND deadline > ?", [now]
        if owner:
            condition, values = f"{condition} AND owner=?", [now, owner]
        query = "SELECT approval_id, owner, session_id, sandbox_id, length(action) FROM approvals"
        found = self._db.execute(f"{query} WHERE {condition} ORDER BY created_at, rowid", values)
        return Done([PendingApproval(*row) for row in found])

    def several(self, approval_ids: Iterable[str]) -> Done[list[Approval]]:
        wanted = json.dumps(list(approval_ids))
        condition = "approval_id IN (SELECT value FROM json_each(?)) ORDER BY created_at, rowid"
        return Done(self._select(condition, wanted))

    def count_pending(self, sandbox_id: str, now: float) -> Done[int]:
        waiting = "sandbox_id=? AND status='pending' AND deadline > ?"
        query = f"SELECT count(*) FROM approvals WHERE {waiting}"  # noqa: S608 - our constants
        return Done(int(self._db.execute(query, (sandbox_id, now)).fetchone()[0]))

    def count(self, sandbox_id: str) -> Done[int]:
        query = "SELECT count(*) FROM approvals WHERE sandbox_id=?"
        return Done(int(self._db.execute(query, (sandbox_id,)).fetchone()[0]))

    def forget_oldest(self, sandbox_id: str, now: float, how_many: int) -> Done[None]:
        self._db.execute(
            "DELETE FROM approvals WHERE approval_id IN (SELECT approval_id FROM approvals "
            "WHERE sandbox_id=? AND (status IN ('used', 'rejected') OR deadline <= ?) "
            "ORDER BY created_at LIMIT ?)",
            (sandbox_id, now, how_many),
        )
        return DONE

    def forget(self, before: float) -> Done[None]:
        self._db.execute("DELETE FROM approvals WHERE deadline < ?", (before,))
        return DONE

    def forget_sandbox(self, sandbox_id: str) -> Done[None]:
        self._db.execute("DELETE FROM approvals WHERE sandbox_id=?", (sandbox_id,))
        return DONE

    def sandboxes(self) -> Done[list[str]]:
        query = "SELECT DISTINCT sandbox_id FROM approvals"
        return Done([row[0] for row in self._db.execute(query)])

    def _select(self, condition: str, *values: Any) -> list[Approval]:
        if not database.is_text(*values):
            return []
        query = f"SELECT {_COLUMNS} FROM approvals WHERE {condition}"  # noqa: S608 - our constants
        return [
            Approval(*row[:10], advisory=bool(row[10]), reason=row[11])
            for row in self._db.execute(query, values)
        ]

    # The approver's secret, as a salted hash.

    def approver(self) -> Done[tuple[bytes, bytes] | None]:
        return Done(self._db.execute("SELECT salt, hash FROM approver").fetchone())

    def set_approver(self, salt: bytes, digest: bytes) -> Done[None]:
        self._db.execute("REPLACE INTO approver (one, salt, hash) VALUES (1, ?, ?)", (salt, digest))
        database.settle(self._db)
        return DONE
