"""Where snapshots are written down: SQLite beside their blobs."""

from __future__ import annotations

import json
import logging
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k8e import database, errors
from k8e.model import words_from_json

log = logging.getLogger(__name__)

MIGRATIONS = (
    """
    CREATE TABLE snapshots (
        owner      TEXT NOT NULL,
        name       TEXT NOT NULL,
        created_at REAL NOT NULL,
        file_count INTEGER NOT NULL,
        size_bytes INTEGER NOT NULL,
        digest     TEXT NOT NULL,
        session_id TEXT NOT NULL,
        layers     TEXT NOT NULL,
        blob       TEXT NOT NULL,
        PRIMARY KEY (owner, name)
    ) STRICT;
    """,
)
_COLUMNS = "owner, name, created_at, file_count, size_bytes, digest, session_id, layers, blob"

_BRIEF = _COLUMNS.replace("layers", "CASE blob WHEN '' THEN '[]' ELSE layers END")


@dataclass(frozen=True)
class Snapshot:
    """What /workspace of a session held at one time; or only a name for content elsewhere."""

    owner: str
    name: str
    created_at: float
    file_count: int = 0
    size_bytes: int = 0
    """Of the archive."""
    digest: str = ""
    """Of the archive; empty if the content is not here."""
    session_id: str = ""
    layers: tuple[str, ...] = ()
    """What K8E's registry knows it by; for ours, the digest alone."""
    blob: str = ""

    def to_json(self) -> dict[str, Any]:
        """What a client may see."""
        return {
            "name": self.name,
            "created_at": self.created_at,
            "file_count": self.file_count,
            "size_bytes": self.size_bytes,
            "digest": self.digest,
            "session_id": self.session_id,
            "layers": list(self.layers),
        }


class SnapshotStore:
    """The snapshots of one gateway."""

    def __init__(self, path: Path) -> None:
        self._db = database.connect(path, MIGRATIONS, durable=True)

    def close(self) -> None:
        self._db.close()

    def insert(self, snapshot: Snapshot, *, replace: bool) -> None:
        """Write one down, in the place of that of the same name or (Conflict) only if it is free.

        One statement: whoever looks finds the old one or the new one.
        """
        values = (
            snapshot.owner,
            snapshot.name,
            snapshot.created_at,
            snapshot.file_count,
            snapshot.size_bytes,
            snapshot.digest,
            snapshot.session_id,
            json.dumps(snapshot.layers),
            snapshot.blob,
        )
        verb = "REPLACE" if replace else "INSERT"
        try:
            self._db.execute(
                f"{verb} INTO snapshots ({_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?)",
                values,
            )
        except sqlite3.IntegrityError:
            raise taken(snapshot.name) from None

    def delete(self, owner: str, name: str) -> None:
        self._db.execute("DELETE FROM snapshots WHERE owner=? AND name=?", (owner, name))

    def get(self, owner: str, name: str) -> Snapshot | None:
        found = self._select("owner=? AND name=?", owner, name)
        return found[0] if found else None

    def of_owner(self, owner: str) -> list[Snapshot]:
        """All of an owner, without the layers of what is elsewhere: those may be many."""
        return self._select("owner=? ORDER BY created_at, name", owner, columns=_BRIEF)

    def owners(self) -> set[str]:
        return {row[0] for row in self._db.execute("SELECT DISTINCT owner FROM snapshots")}

    def used(self, owner: str) -> int:
        """Bytes of all snapshots of an owner."""
        query = "SELECT COALESCE(SUM(size_bytes), 0) FROM snapshots WHERE owner=?"
        return self._db.execute(query, (owner,)).fetchone()[0]

    def count(self, owner: str) -> int:
        query = "SELECT COUNT(*) FROM snapshots WHERE owner=?"
        return self._db.execute(query, (owner,)).fetchone()[0]

    def with_blobs(self) -> list[Snapshot]:
        return self._select("blob != ''")

    def _select(self, condition: str, *values: Any, columns: str = _COLUMNS) -> list[Snapshot]:
        if not database.is_text(*values):
            return []
        query = f"SELECT {columns} FROM snapshots WHERE {condition}"  # noqa: S608 - our constants
        return [
            Snapshot(*row[:7], layers=_layers(row[7]), blob=row[8])
            for row in self._db.execute(query, values)
        ]


def _layers(text: str) -> tuple[str, ...]:
    """The digests of what is elsewhere; none where they cannot be read."""
    try:
        return words_from_json(json.loads(text))
    except errors.UNREADABLE:
        log.error("the layers of a snapshot cannot be read")
        return ()


def taken(name: str) -> errors.Conflict:
    return errors.Conflict(
        f"snapshot {name!r} exists already",
        hint="choose another name, or replace it: k8e sandbox snapshot save --replace",
    )
