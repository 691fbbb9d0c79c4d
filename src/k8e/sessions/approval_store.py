"""Where approvals and the approver's secret are written down: SQLite in the data folder.

A file of its own: it is written seldom, and must be on the disk before anybody acts on it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from k8e import database
from k8e.sessions import clock

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
    """One action that somebody is asked to allow, once."""

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
    """Whether it was, or can be, decided by anybody who may call the gateway."""
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """What a client may see."""
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


class Waiting(NamedTuple):
    """An action on which nobody has decided, as far as it takes little to know it."""

    approval_id: str
    owner: str
    session_id: str
    sandbox_id: str
    length: int
    """Characters of its text."""


class ApprovalStore:
    """The approvals of one gateway."""

    def __init__(self, path: Path) -> None:
        # What was used stays used, also after a power failure.
        self._db = database.connect(path, MIGRATIONS, durable=True)
        # An older release wrote dates alone.
        self._db.execute(
            "UPDATE approvals SET deadline = expires_at + ? WHERE deadline = 0", (clock.offset(),)
        )

    def close(self) -> None:
        self._db.close()

    def insert(self, approval: Approval) -> None:
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

    def decide(self, approval: Approval, now: float) -> bool:
        """Write a decision down; False if there was one already, or it came too late."""
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
        return done.rowcount == 1

    def use(self, approval_id: str, now: float) -> bool:
        """Approved → used, for exactly one caller."""
        done = self._db.execute(
            "UPDATE approvals SET status='used' "
            "WHERE approval_id=? AND status='approved' AND deadline > ?",
            (approval_id, now),
        )
        return done.rowcount == 1

    def get(self, approval_id: str) -> Approval | None:
        found = self._select("approval_id=?", approval_id)
        return found[0] if found else None

    def pending(self, now: float, owner: str = "") -> list[Waiting]:
        """What waits for a decision, of one owner or of all, oldest first; without the texts."""
        condition, values = "status='pending' AND deadline > ?", [now]
        if owner:
            condition, values = f"{condition} AND owner=?", [now, owner]
        query = "SELECT approval_id, owner, session_id, sandbox_id, length(action) FROM approvals"
        found = self._db.execute(f"{query} WHERE {condition} ORDER BY created_at, rowid", values)
        return [Waiting(*row) for row in found]

    def several(self, approval_ids: Iterable[str]) -> list[Approval]:
        """These approvals, oldest first."""
        wanted = json.dumps(list(approval_ids))
        condition = "approval_id IN (SELECT value FROM json_each(?)) ORDER BY created_at, rowid"
        return self._select(condition, wanted)

    def count_pending(self, sandbox_id: str, now: float) -> int:
        """How many actions of one sandbox wait for a decision."""
        waiting = "sandbox_id=? AND status='pending' AND deadline > ?"
        query = f"SELECT count(*) FROM approvals WHERE {waiting}"  # noqa: S608 - our constants
        return int(self._db.execute(query, (sandbox_id, now)).fetchone()[0])

    def count(self, sandbox_id: str) -> int:
        query = "SELECT count(*) FROM approvals WHERE sandbox_id=?"
        return int(self._db.execute(query, (sandbox_id,)).fetchone()[0])

    def forget_oldest(self, sandbox_id: str, now: float, how_many: int) -> None:
        """Remove the oldest approvals of a sandbox on which nobody can act any more."""
        self._db.execute(
            "DELETE FROM approvals WHERE approval_id IN (SELECT approval_id FROM approvals "
            "WHERE sandbox_id=? AND (status IN ('used', 'rejected') OR deadline <= ?) "
            "ORDER BY created_at LIMIT ?)",
            (sandbox_id, now, how_many),
        )

    def forget(self, before: float) -> None:
        """Remove what expired long ago."""
        self._db.execute("DELETE FROM approvals WHERE deadline < ?", (before,))

    def forget_sandbox(self, sandbox_id: str) -> None:
        """Remove all approvals of a sandbox that has ended."""
        self._db.execute("DELETE FROM approvals WHERE sandbox_id=?", (sandbox_id,))

    def sandboxes(self) -> list[str]:
        """The sandboxes that have approvals here."""
        return [row[0] for row in self._db.execute("SELECT DISTINCT sandbox_id FROM approvals")]

    def _select(self, condition: str, *values: Any) -> list[Approval]:
        if not database.is_text(*values):
            return []
        query = f"SELECT {_COLUMNS} FROM approvals WHERE {condition}"  # noqa: S608 - our constants
        return [
            Approval(*row[:10], advisory=bool(row[10]), reason=row[11])
            for row in self._db.execute(query, values)
        ]

    # The approver's secret, as a salted hash.

    def approver(self) -> tuple[bytes, bytes] | None:
        return self._db.execute("SELECT salt, hash FROM approver").fetchone()

    def set_approver(self, salt: bytes, digest: bytes) -> None:
        self._db.execute("REPLACE INTO approver (one, salt, hash) VALUES (1, ?, ?)", (salt, digest))
        database.settle(self._db)
