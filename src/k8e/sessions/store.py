"""Stores of sessions: the interface, and SQLite in the data folder.

Reads answer at once, on the event loop. A write takes its place among the others when it is asked
for; its caller awaits the commit before it tells a client.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from k8e import database, errors
from k8e.database import DONE, Done
from k8e.model import Phase, Session, SessionSpec, words_from_json
from k8e.sessions import live

MIGRATIONS = (
    """
    CREATE TABLE sessions (
        session_id   TEXT PRIMARY KEY,
        owner        TEXT NOT NULL,
        tenant       TEXT NOT NULL,
        auto         INTEGER NOT NULL,
        phase        TEXT NOT NULL,
        runtime      TEXT NOT NULL,
        sandbox_id   TEXT NOT NULL UNIQUE,
        request_id   TEXT NOT NULL,
        spec         TEXT NOT NULL,
        created_at   REAL NOT NULL,
        expires_at   REAL NOT NULL,
        ended_at     REAL NOT NULL DEFAULT 0,
        ended_reason TEXT NOT NULL DEFAULT ''
    ) STRICT;
    CREATE UNIQUE INDEX one_auto ON sessions (owner, tenant) WHERE auto = 1 AND phase != 'ended';
    CREATE UNIQUE INDEX one_request ON sessions (owner, request_id)
        WHERE request_id != '' AND phase != 'ended';
    CREATE INDEX by_owner ON sessions (owner, phase);
    """,
    "ALTER TABLE sessions ADD COLUMN allowed_hosts TEXT NOT NULL DEFAULT '[]';",
    "ALTER TABLE sessions ADD COLUMN parent TEXT NOT NULL DEFAULT '';",
    """
    ALTER TABLE sessions ADD COLUMN deadline REAL NOT NULL DEFAULT 0;
    ALTER TABLE sessions ADD COLUMN rebinding INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE sessions ADD COLUMN ending TEXT NOT NULL DEFAULT '';
    """,
    # An id is unique among live sessions; an ended session keeps its row, even if the id is used
    # again.
    """
    CREATE TABLE sessions_5 (
        sandbox_id    TEXT PRIMARY KEY,
        session_id    TEXT NOT NULL,
        owner         TEXT NOT NULL,
        tenant        TEXT NOT NULL,
        auto          INTEGER NOT NULL,
        phase         TEXT NOT NULL,
        runtime       TEXT NOT NULL,
        request_id    TEXT NOT NULL,
        spec          TEXT NOT NULL,
        created_at    REAL NOT NULL,
        expires_at    REAL NOT NULL,
        ended_at      REAL NOT NULL DEFAULT 0,
        ended_reason  TEXT NOT NULL DEFAULT '',
        allowed_hosts TEXT NOT NULL DEFAULT '[]',
        parent        TEXT NOT NULL DEFAULT '',
        deadline      REAL NOT NULL DEFAULT 0,
        rebinding     INTEGER NOT NULL DEFAULT 0,
        ending        TEXT NOT NULL DEFAULT ''
    ) STRICT;
    INSERT INTO sessions_5 SELECT sandbox_id, session_id, owner, tenant, auto, phase, runtime,
        request_id, spec, created_at, expires_at, ended_at, ended_reason, allowed_hosts, parent,
        deadline, rebinding, ending FROM sessions;
    DROP TABLE sessions;
    ALTER TABLE sessions_5 RENAME TO sessions;
    CREATE UNIQUE INDEX one_session ON sessions (session_id) WHERE phase != 'ended';
    CREATE UNIQUE INDEX one_auto ON sessions (owner, tenant) WHERE auto = 1 AND phase != 'ended';
    CREATE UNIQUE INDEX one_request ON sessions (owner, request_id)
        WHERE request_id != '' AND phase != 'ended';
    CREATE INDEX by_session ON sessions (session_id);
    CREATE INDEX by_owner ON sessions (owner, phase, ended_at);
    CREATE INDEX by_end ON sessions (ended_at) WHERE phase = 'ended';
    """,
)
MAX_ENDED_EACH = 1000
"""Sessions of one owner that have ended and can still be asked about …"""
MAX_ENDED = 5000
"""… and of all owners. Each has a row and a file of events."""
ENDS_BETWEEN = 50
_COLUMNS = (
    "session_id, owner, spec, runtime, sandbox_id, phase, created_at, expires_at, auto, "
    "ended_reason, allowed_hosts, parent, deadline"
)


class Elsewhere(NamedTuple):
    """The gateway that has a session which is not this gateway's."""

    name: str
    address: str
    """Where its gRPC endpoint is, as it says; empty if it has none."""


class Most(NamedTuple):
    """The session limits of a principal and one of its tenants over all gateways; 0: any number."""

    principal: int = 0
    tenant: int = 0


ANY_NUMBER = Most()


class SessionStore(Protocol):
    """The sessions of one gateway, or of several that share a database."""

    on_forget: list[Callable[[str], None]]
    """Called with the sandbox of each session that can no longer be asked about."""
    on_lost: list[Callable[[Session], None]]
    """Called with each session of this gateway that another one has ended."""
    most_of: Callable[[Session], Most]
    """How many sessions the holder of one may have over all gateways; asked where there are more
    than one, since no gateway alone can count them."""

    def close(self) -> None: ...

    # Reading.

    def half_ended(self) -> dict[str, str]:
        """This gateway's sessions whose removal had begun, and why."""
        ...

    def half_allowed(self) -> list[Session]:
        """This gateway's sessions with a policy that was written down, but perhaps not applied."""
        ...

    def unended(self) -> list[Session]:
        """All sessions of this gateway that have not ended."""
        ...

    def sandboxes(self, owner: str = "") -> list[str]:
        """The sandboxes of all sessions, also of those that have ended; of ``owner``, if given."""
        ...

    def get(self, session_id: str, owner: str = "") -> Session | None:
        """The session that has this id, else the one that had it last; of ``owner``, if given."""
        ...

    def find_request(self, owner: str, request_id: str) -> Session | None:
        """The session that lives or is being made for a request."""
        ...

    def of_owner(self, owner: str, *, ended: bool = False) -> list[Session]: ...

    def elsewhere(self, session: Session) -> Elsewhere | None:
        """The other gateway that has a session; None if this one has it."""
        ...

    def others(self) -> Iterable[Session]:
        """The sessions of all other gateways that have not ended."""
        ...

    async def settled(self, session: Session) -> Session:
        """A session that another gateway is making, once it is made or has ended."""
        ...

    # Writing.

    def insert(self, session: Session) -> Awaitable[None]:
        """Write a new session down; Conflict if its id, request or auto place is taken."""
        ...

    def activate(self, session: Session) -> Awaitable[Session]:
        """CREATING → ACTIVE, in the sandbox that it got."""
        ...

    def set_phase(self, session_id: str, phase: Phase) -> Awaitable[None]:
        """ACTIVE ↔ PAUSED; nothing else becomes either of them here."""
        ...

    def begin_end(self, session_id: str, reason: str) -> Awaitable[None]:
        """Write down that a session is being removed, before its removal begins."""
        ...

    def end(self, session_id: str, reason: str, at: float) -> Awaitable[None]: ...

    def extend(self, session_id: str, expires_at: float, deadline: float) -> Awaitable[None]: ...

    def allow(
        self, session: Session, words: tuple[str, ...], *, under_way: bool = False
    ) -> Awaitable[None]:
        """Write down what a session may reach; ``under_way`` until the kernel enforces it."""
        ...

    def forget_ended(self, before: float, owner: str = "") -> Awaitable[None]:
        """Forget what ended before a date, and the oldest where ``owner`` or all have too many."""
        ...


class SqliteSessionStore:
    """The sessions of one gateway, in a file."""

    def __init__(self, path: Path) -> None:
        self._db = database.connect(path, MIGRATIONS, durable=False)
        self._ends = 0
        self.on_forget: list[Callable[[str], None]] = []
        self.on_lost: list[Callable[[Session], None]] = []  # no other gateway could take it away
        self.most_of: Callable[[Session], Most] = lambda _: ANY_NUMBER

    def close(self) -> None:
        self._db.close()

    def insert(self, session: Session) -> Done[None]:
        try:
            self._insert(session)
        except sqlite3.IntegrityError:
            raise errors.Conflict(
                f"session {session.session_id!r} exists already",
                hint="choose another id, or leave it out to get a random one",
            ) from None
        if session.spec.session_id:
            # An id means one session to its owner, the newest. Other owners' sessions under it are
            # theirs.
            ours = (session.session_id, session.owner)
            self._forget("session_id=? AND owner=?", *ours)
        return DONE

    def _insert(self, session: Session) -> None:
        self._db.execute(
            "INSERT INTO sessions (session_id, owner, tenant, auto, phase, runtime, sandbox_id,"
            " request_id, spec, created_at, expires_at, allowed_hosts, parent, deadline)"
            " VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
            (
                session.session_id,
                session.owner,
                session.spec.tenant,
                int(session.auto),
                str(session.phase),
                session.runtime,
                session.sandbox_id,
                session.spec.request_id,
                json.dumps(session.spec.to_json()),
                session.created_at,
                session.expires_at,
                json.dumps(session.allowed_hosts),
                session.parent,
                session.deadline,
            ),
        )

    def activate(self, session: Session) -> Done[Session]:
        self._db.execute(
            "UPDATE sessions SET phase='active', sandbox_id=? "
            "WHERE session_id=? AND phase='creating'",
            (session.sandbox_id, session.session_id),
        )
        return Done(replace(session, phase=Phase.ACTIVE))

    def set_phase(self, session_id: str, phase: Phase) -> Done[None]:
        self._db.execute(
            "UPDATE sessions SET phase=? WHERE session_id=? AND phase IN ('active', 'paused')",
            (str(phase), session_id),
        )
        return DONE

    def begin_end(self, session_id: str, reason: str) -> Done[None]:
        self._db.execute(
            "UPDATE sessions SET ending=? WHERE session_id=? AND phase != 'ended'",
            (reason, session_id),
        )
        return DONE

    def half_ended(self) -> dict[str, str]:
        query = "SELECT session_id, ending FROM sessions WHERE ending != '' AND phase != 'ended'"
        return dict(self._db.execute(query))

    def end(self, session_id: str, reason: str, at: float) -> Done[None]:
        self._db.execute(
            "UPDATE sessions SET phase='ended', ended_reason=?, ended_at=? "
            "WHERE session_id=? AND phase != 'ended'",
            (reason, at, session_id),
        )
        return DONE

    def extend(self, session_id: str, expires_at: float, deadline: float) -> Done[None]:
        self._db.execute(
            "UPDATE sessions SET expires_at=?, deadline=? WHERE session_id=? AND phase != 'ended'",
            (expires_at, deadline, session_id),
        )
        return DONE

    def allow(
        self, session: Session, words: tuple[str, ...], *, under_way: bool = False
    ) -> Done[None]:
        # By its sandbox: that takes a while, and another session may have its id by then.
        self._db.execute(
            "UPDATE sessions SET allowed_hosts=?, rebinding=? WHERE sandbox_id=?",
            (json.dumps(words), int(under_way), session.sandbox_id),
        )
        return DONE

    def half_allowed(self) -> list[Session]:
        return self._select("rebinding=1 AND phase != 'ended'")

    def forget_ended(self, before: float, owner: str = "") -> Done[None]:
        self._forget("ended_at < ?", before)
        newest = "SELECT ended_at FROM sessions WHERE phase='ended'"
        last = "ORDER BY ended_at DESC LIMIT 1 OFFSET ?"
        mine = "owner=? AND ended_at <= "
        self._forget(f"{mine} ({newest} AND owner=? {last})", owner, owner, MAX_ENDED_EACH)
        self._ends += 1
        if self._ends % ENDS_BETWEEN == 0:  # to count all of them takes a while
            self._forget(f"ended_at <= ({newest} {last})", MAX_ENDED)
        return DONE

    def _forget(self, condition: str, *values: Any) -> None:
        query = f"DELETE FROM sessions WHERE phase='ended' AND {condition} RETURNING sandbox_id"  # noqa: S608 - our constants
        for (sandbox_id,) in self._db.execute(query, values).fetchall():
            for tell in self.on_forget:
                tell(sandbox_id)

    def sandboxes(self, owner: str = "") -> list[str]:
        if owner:
            query = "SELECT sandbox_id FROM sessions WHERE owner=?"
            return [row[0] for row in self._db.execute(query, (owner,))]
        return [row[0] for row in self._db.execute("SELECT sandbox_id FROM sessions")]

    def get(self, session_id: str, owner: str = "") -> Session | None:
        newest = "ORDER BY phase='ended', ended_at DESC LIMIT 1"
        mine = "session_id=? AND owner=?" if owner else "session_id=?"
        rows = self._select(f"{mine} {newest}", session_id, *((owner,) if owner else ()))
        return rows[0] if rows else None

    def find_request(self, owner: str, request_id: str) -> Session | None:
        rows = self._select("owner=? AND request_id=? AND phase != 'ended'", owner, request_id)
        return rows[0] if rows else None

    def of_owner(self, owner: str, *, ended: bool = False) -> list[Session]:
        condition = "owner=?" if ended else "owner=? AND phase != 'ended'"
        return self._select(condition + " ORDER BY created_at", owner)

    def unended(self) -> list[Session]:
        return self._select("phase != 'ended'")

    def elsewhere(self, session: Session) -> Elsewhere | None:
        return None  # no other process uses the file

    def others(self) -> Iterable[Session]:
        return ()

    async def settled(self, session: Session) -> Session:
        return session

    def _select(self, condition: str, *values: Any) -> list[Session]:
        if not database.is_text(*values):
            return []
        query = f"SELECT {_COLUMNS} FROM sessions WHERE {condition}"  # noqa: S608 - our constants
        return [_read(row) for row in self._db.execute(query, values)]


def _read(row: tuple[Any, ...]) -> Session:
    try:
        return _session(row)
    except (errors.K8eError, *errors.UNREADABLE) as error:
        raise errors.StateUnusable(
            f"session {row[0]} cannot be read: {error}",
            hint="a newer k8e may have made it: update k8e; until then its sandbox goes on running",
        ) from None


def _date(row: tuple[Any, ...]) -> float:
    """Its expiry date; a session that ended in an earlier run of the machine keeps its date."""
    told, deadline = row[7], row[12]
    return told if not deadline or row[5] == Phase.ENDED else live.date_of(deadline, told)


def _session(row: tuple[Any, ...]) -> Session:
    return Session(
        session_id=row[0],
        owner=row[1],
        spec=SessionSpec.from_json(json.loads(row[2]), stored=True),
        runtime=row[3],
        sandbox_id=row[4],
        phase=Phase(row[5]),
        created_at=row[6],
        expires_at=_date(row),
        auto=bool(row[8]),
        ended_reason=row[9],
        allowed_hosts=words_from_json(json.loads(row[10])),
        parent=row[11],
        deadline=row[12],
    )
