"""Where signing keys and revocations of conversation tokens are written down.

Whoever shares these stores signs and verifies alike, and learns of a revocation with the next
token that it looks at. Nothing here needs PyJWT: the gateway loads that with the first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from k8e import database

MIGRATIONS = (
    """
    CREATE TABLE signing_keys (
        number     INTEGER PRIMARY KEY AUTOINCREMENT,
        kid        TEXT NOT NULL UNIQUE,
        secret     BLOB NOT NULL,
        made_at    REAL NOT NULL,
        signs_from REAL NOT NULL
    ) STRICT;
    CREATE TABLE revocations (
        subject       TEXT PRIMARY KEY,
        issued_before REAL NOT NULL,
        until         REAL NOT NULL
    ) STRICT;
    CREATE INDEX by_end ON revocations (until);
    """,
)


@dataclass(frozen=True)
class SigningKey:
    """An Ed25519 key that signs tokens."""

    kid: str
    secret: bytes = field(repr=False)
    """The 32 bytes of the private key."""
    made_at: float
    signs_from: float
    """Unix time from which it signs. It is published from ``made_at`` on, so that everybody who
    verifies has it by then."""


class SigningKeyStore(Protocol):
    """The signing keys of all gateways that share them."""

    async def keys(self) -> list[SigningKey]:
        """All keys, in the order in which they were added."""
        ...

    async def add(self, key: SigningKey, after: str) -> bool:
        """Add a key if the newest one is ``after`` (empty: if there is none); whether it was."""
        ...

    async def remove(self, kid: str) -> None: ...


class RevocationStore(Protocol):
    """Revoked tokens, by what they have in common."""

    async def revoke(self, subject: str, *, issued_before: float, until: float) -> None:
        """Refuse tokens with this subject that were issued up to a time.

        Where the subject has a row already, the later of both times holds. After ``until`` every
        such token has expired, and the row may be forgotten.
        """
        ...

    async def issued_before(self, subjects: Sequence[str]) -> float:
        """The time up to which tokens that have all of these subjects are revoked; 0 for none."""
        ...

    async def forget(self, now: float) -> None:
        """Remove the rows that are of no more use."""
        ...


class SqliteTokenStore:
    """Both stores of one gateway, in a file of the data folder."""

    def __init__(self, path: Path) -> None:
        # A revoked token stays revoked, also after a power failure.
        self._db = database.connect(path, MIGRATIONS, durable=True)
        self._db.execute("PRAGMA secure_delete=ON")

    def close(self) -> None:
        self._db.close()

    async def keys(self) -> list[SigningKey]:
        query = "SELECT kid, secret, made_at, signs_from FROM signing_keys ORDER BY number"
        return [
            SigningKey(kid, bytes(secret), made_at, signs_from)
            for kid, secret, made_at, signs_from in self._db.execute(query)
        ]

    async def add(self, key: SigningKey, after: str) -> bool:
        newest = "SELECT kid FROM signing_keys ORDER BY number DESC LIMIT 1"
        done = self._db.execute(
            "INSERT INTO signing_keys (kid, secret, made_at, signs_from) SELECT ?,?,?,?"
            f" WHERE coalesce(({newest}), '') = ?",
            (key.kid, key.secret, key.made_at, key.signs_from, after),
        )
        return done.rowcount == 1

    async def remove(self, kid: str) -> None:
        self._db.execute("DELETE FROM signing_keys WHERE kid=?", (kid,))
        database.settle(self._db)

    async def revoke(self, subject: str, *, issued_before: float, until: float) -> None:
        self._db.execute(
            "INSERT INTO revocations (subject, issued_before, until) VALUES (?,?,?)"
            " ON CONFLICT DO UPDATE SET until=max(until, excluded.until),"
            " issued_before=max(issued_before, excluded.issued_before)",
            (subject, issued_before, until),
        )

    async def issued_before(self, subjects: Sequence[str]) -> float:
        if not database.is_text(*subjects):
            return 0
        places = ",".join("?" * len(subjects))
        query = f"SELECT max(issued_before) FROM revocations WHERE subject IN ({places})"  # noqa: S608 - question marks
        row: tuple[Any, ...] = self._db.execute(query, tuple(subjects)).fetchone()
        return float(row[0] or 0)

    async def forget(self, now: float) -> None:
        self._db.execute("DELETE FROM revocations WHERE until < ?", (now,))
