"""Stores of keys and certificates: the interface, and SQLite.

A file of its own: it is written seldom, and a deletion must be on the disk before it is reported.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from k8e import database, errors
from k8e.database import DONE, Done
from k8e.model import Role

MIGRATIONS = (
    """
    CREATE TABLE keys (
        key_id     INTEGER PRIMARY KEY AUTOINCREMENT,
        name       TEXT NOT NULL,
        hash       BLOB NOT NULL UNIQUE,
        roles      TEXT NOT NULL,
        created_at REAL NOT NULL,
        expires_at REAL NOT NULL,
        revoked_at REAL NOT NULL DEFAULT 0
    ) STRICT;
    CREATE UNIQUE INDEX one_name ON keys (name) WHERE revoked_at = 0;
    CREATE TABLE certificates (
        serial     TEXT PRIMARY KEY,
        key_id     INTEGER NOT NULL REFERENCES keys (key_id) ON DELETE CASCADE,
        device     TEXT NOT NULL,
        issued_at  REAL NOT NULL,
        expires_at REAL NOT NULL
    ) STRICT;
    CREATE INDEX by_key ON certificates (key_id);
    """,
    # What keys made was once theirs by name. Those that live keep it; no later one gets it.
    """
    ALTER TABLE keys ADD COLUMN owner TEXT NOT NULL DEFAULT '';
    ALTER TABLE keys ADD COLUMN max_sessions INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE keys ADD COLUMN rate REAL NOT NULL DEFAULT 0;
    UPDATE keys SET owner = 'key:' || name || CASE revoked_at WHEN 0 THEN '' ELSE ':' || key_id END;
    CREATE UNIQUE INDEX one_owner ON keys (owner);
    """,
)
MAX_CERTIFICATES = 4096
"""Of one key: the newest. Otherwise logins could fill the disk with them."""
_COLUMNS = "key_id, name, roles, created_at, expires_at, revoked_at, owner, max_sessions, rate"


@dataclass(frozen=True)
class Key:
    """An API key, without its secret."""

    key_id: int
    name: str
    roles: frozenset[Role]
    created_at: float
    expires_at: float
    """Unix time; 0 means never."""
    revoked_at: float = 0
    owner: str = ""
    """The name of its principal. Random in part, so that its things never become another key's."""
    max_sessions: int = 0
    """How many sessions it may have at once; 0 means as many as the gateway takes."""
    rate: float = 0
    """How many calls it may make a second; 0 means as many as any key."""

    def valid(self, now: float) -> bool:
        return not self.revoked_at and (not self.expires_at or now < self.expires_at)


class KeyStore(Protocol):
    """The keys of one gateway, or of several that share a database."""

    on_end: list[Callable[[Key], None]]
    """Called with each key that another gateway has deleted or rotated."""

    def close(self) -> None: ...

    def hashed(self, digest: bytes) -> Key | None: ...

    def named(self, name: str) -> Key | None: ...

    def owned(self, owner: str) -> Key | None:
        """The key whose principal has this name."""
        ...

    def listing(self) -> list[Key]: ...

    def revoked(self) -> set[str]:
        """The principals of all deleted keys that are still recorded."""
        ...

    def of_certificate(self, serial: str, now: float) -> Key | None:
        """The key of a certificate, if both are valid later than ``now``."""
        ...

    def certificates(self, key_id: int, now: float) -> int: ...

    def insert(self, key: Key, digest: bytes) -> Awaitable[Key]:
        """Write a new key down; Conflict if its name is taken."""
        ...

    def rotate(self, key: Key, digest: bytes) -> Awaitable[None]:
        """Give a key another secret and lifetime; its certificates end with the old secret."""
        ...

    def revoke(self, name: str, at: float) -> Awaitable[Key | None]:
        """Delete a key; return it, or None if there is none."""
        ...

    def forget(self, before: float, now: float) -> Awaitable[None]:
        """Remove keys that ended long ago, with their certificates.

        A key that only expired must be deleted first: that confirms that its sessions and data are
        not needed.
        """
        ...

    def add_certificate(
        self, serial: str, key_id: int, device: str, issued_at: float, expires_at: float
    ) -> Awaitable[None]: ...


class SqliteKeyStore:
    """The keys of one gateway, in a file."""

    def __init__(self, path: Path) -> None:
        self.on_end: list[Callable[[Key], None]] = []
        # A deleted key stays deleted, also after a power failure.
        self._db = database.connect(path, MIGRATIONS, durable=True)
        self._db.execute("PRAGMA foreign_keys=ON")

    def close(self) -> None:
        self._db.close()

    def insert(self, key: Key, digest: bytes) -> Done[Key]:
        roles = ",".join(sorted(key.roles))
        times = (key.created_at, key.expires_at)
        try:
            done = self._db.execute(
                "INSERT INTO keys (name, hash, roles, created_at, expires_at, owner, max_sessions,"
                " rate) VALUES (?,?,?,?,?,?,?,?)",
                (key.name, digest, roles, *times, key.owner, key.max_sessions, key.rate),
            )
        except sqlite3.IntegrityError:
            raise errors.Conflict(
                f"there is a key {key.name!r} already",
                hint=f"choose another name, or delete it: k8e sandbox api-key delete {key.name}",
            ) from None
        return Done(replace(key, key_id=done.lastrowid or 0))

    def rotate(self, key: Key, digest: bytes) -> Done[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.execute("DELETE FROM certificates WHERE key_id=?", (key.key_id,))
            self._db.execute(
                "UPDATE keys SET hash=?, created_at=?, expires_at=? WHERE key_id=?",
                (digest, key.created_at, key.expires_at, key.key_id),
            )
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        database.settle(self._db)
        return DONE

    def revoke(self, name: str, at: float) -> Done[Key | None]:
        found = self.named(name)
        if found is not None:
            query = "UPDATE keys SET revoked_at=? WHERE key_id=?"
            self._db.execute(query, (at, found.key_id))
            database.settle(self._db)
        return Done(found)

    def forget(self, before: float, now: float) -> Done[None]:
        self._db.execute("DELETE FROM keys WHERE revoked_at > 0 AND revoked_at < ?", (before,))
        query = "UPDATE keys SET revoked_at=? WHERE revoked_at=0 AND expires_at > 0"
        self._db.execute(f"{query} AND expires_at < ?", (now, before))
        self._db.execute("DELETE FROM certificates WHERE expires_at < ?", (before,))
        return DONE

    def hashed(self, digest: bytes) -> Key | None:
        return self._one("hash=?", digest)

    def named(self, name: str) -> Key | None:
        return self._one("name=? AND revoked_at=0", name)

    def owned(self, owner: str) -> Key | None:
        return self._one("owner=? AND revoked_at=0", owner)

    def listing(self) -> list[Key]:
        query = f"SELECT {_COLUMNS} FROM keys WHERE revoked_at=0 ORDER BY created_at, key_id"  # noqa: S608 - our constants
        return [_key(row) for row in self._db.execute(query)]

    def revoked(self) -> set[str]:
        return {row[0] for row in self._db.execute("SELECT owner FROM keys WHERE revoked_at > 0")}

    # Certificates.

    def add_certificate(
        self, serial: str, key_id: int, device: str, issued_at: float, expires_at: float
    ) -> Done[None]:
        self._db.execute(
            "INSERT INTO certificates (serial, key_id, device, issued_at, expires_at)"
            " VALUES (?,?,?,?,?)",
            (serial, key_id, device, issued_at, expires_at),
        )
        self._db.execute(
            "DELETE FROM certificates WHERE serial IN (SELECT serial FROM certificates"
            " WHERE key_id=? ORDER BY issued_at DESC, rowid DESC LIMIT -1 OFFSET ?)",
            (key_id, MAX_CERTIFICATES),
        )
        return DONE

    def of_certificate(self, serial: str, now: float) -> Key | None:
        condition = "key_id=(SELECT key_id FROM certificates WHERE serial=? AND expires_at > ?)"
        return self._one(condition, serial, now)

    def certificates(self, key_id: int, now: float) -> int:
        query = "SELECT count(*) FROM certificates WHERE key_id=? AND expires_at > ?"
        return int(self._db.execute(query, (key_id, now)).fetchone()[0])

    def _one(self, condition: str, *values: Any) -> Key | None:
        texts = [value for value in values if isinstance(value, str)]
        if not database.is_text(*texts):
            return None
        query = f"SELECT {_COLUMNS} FROM keys WHERE {condition}"  # noqa: S608 - our constants
        row = self._db.execute(query, values).fetchone()
        return None if row is None else _key(row)


def _key(row: tuple[Any, ...]) -> Key:
    # One that we do not know gives no right.
    roles = frozenset(role for role in Role if role in row[2].split(","))
    return Key(row[0], row[1], roles, *row[3:])
