"""Where secrets of users are written down, encrypted: SQLite in the data folder.

A file of its own: it is written seldom, and what was deleted must be gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k8e import database

MIGRATIONS = (
    """
    CREATE TABLE secrets (
        owner      TEXT NOT NULL,
        tenant     TEXT NOT NULL,
        name       TEXT NOT NULL,
        key        TEXT NOT NULL,
        value      BLOB NOT NULL,
        created_at REAL NOT NULL,
        updated_at REAL NOT NULL,
        PRIMARY KEY (owner, tenant, name, key)
    ) STRICT;
    CREATE TABLE cipher (one INTEGER PRIMARY KEY CHECK (one = 1), proof BLOB NOT NULL) STRICT;
    """,
)
_COLUMNS = "owner, tenant, name, key, created_at, updated_at"


@dataclass(frozen=True)
class Secret:
    """A secret of somebody, without its value."""

    owner: str
    tenant: str
    name: str
    key: str
    """A secret has one value or several, each under a key."""
    created_at: float
    updated_at: float

    def to_json(self) -> dict[str, Any]:
        """What its owner may see."""
        return {
            "name": self.name,
            "key": self.key,
            "tenant_id": self.tenant,
            "created_at": self.created_at,
            "updated_at": self.updated_at,
        }


class SecretStore:
    """The secrets of one gateway; what is kept of a value is for :mod:`k8e.sessions.secrets`."""

    def __init__(self, path: Path) -> None:
        self._db = database.connect(path, MIGRATIONS, durable=True)
        self._db.execute("PRAGMA secure_delete=ON")

    def close(self) -> None:
        self._db.close()

    def put(self, secret: Secret, value: bytes) -> None:
        """Write a value down, in the place of the one before."""
        self._db.execute(
            "INSERT INTO secrets (owner, tenant, name, key, value, created_at, updated_at)"
            " VALUES (?,?,?,?,?,?,?) ON CONFLICT DO UPDATE SET value=excluded.value,"
            " updated_at=excluded.updated_at",
            (
                secret.owner,
                secret.tenant,
                secret.name,
                secret.key,
                value,
                secret.created_at,
                secret.updated_at,
            ),
        )
        self._sweep()

    def value(self, owner: str, tenant: str, name: str, key: str) -> bytes | None:
        query = "SELECT value FROM secrets WHERE owner=? AND tenant=? AND name=? AND key=?"
        row = self._db.execute(query, (owner, tenant, name, key)).fetchone()
        return None if row is None else bytes(row[0])

    def listing(self, owner: str, tenant: str = "") -> list[Secret]:
        """What an owner has, by tenant and name; of one tenant, if it is given."""
        condition, values = "owner=?", (owner,)
        if tenant:
            condition, values = "owner=? AND tenant=?", (owner, tenant)
        query = f"SELECT {_COLUMNS} FROM secrets WHERE {condition} ORDER BY tenant, name, key"  # noqa: S608 - our constants
        return [Secret(*row) for row in self._db.execute(query, values)]

    def count(self, owner: str) -> int:
        query = "SELECT count(*) FROM secrets WHERE owner=?"
        return int(self._db.execute(query, (owner,)).fetchone()[0])

    def delete(self, owner: str, tenant: str, name: str, key: str = "") -> int:
        """Remove a secret, or one value of it; how many values there were."""
        condition, values = "owner=? AND tenant=? AND name=?", [owner, tenant, name]
        if key:
            condition, values = f"{condition} AND key=?", [*values, key]
        done = self._db.execute(f"DELETE FROM secrets WHERE {condition}", values)  # noqa: S608 - our constants
        self._sweep()
        return done.rowcount

    def evict(self, owner: str) -> int:
        """Remove all that somebody had."""
        done = self._db.execute("DELETE FROM secrets WHERE owner=?", (owner,))
        self._sweep()
        return done.rowcount

    def owners(self) -> set[str]:
        return {row[0] for row in self._db.execute("SELECT DISTINCT owner FROM secrets")}

    def is_empty(self) -> bool:
        return self._db.execute("SELECT 1 FROM secrets LIMIT 1").fetchone() is None

    def _sweep(self) -> None:
        """Leave nothing of old values in the log of changes either."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    # What shows that a key is the right one.

    def proof(self) -> bytes | None:
        row = self._db.execute("SELECT proof FROM cipher").fetchone()
        return None if row is None else bytes(row[0])

    def set_proof(self, proof: bytes) -> None:
        self._db.execute("REPLACE INTO cipher (one, proof) VALUES (1, ?)", (proof,))
