"""The state that a gateway finds in its folders, checked as a whole before it changes anything."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k8e import database, errors
from k8e.audit.segments import SUFFIX
from k8e.auth import store as keys
from k8e.auth import token_store
from k8e.sessions import (
    approval_store,
    conversations,
    exposures,
    secrets,
    snapshots,
    store,
    templates,
)

SESSIONS = "sessions.db"
DATABASES: dict[str, Sequence[str]] = {
    SESSIONS: store.MIGRATIONS,
    "approvals.db": approval_store.MIGRATIONS,
    "conversations.db": conversations.MIGRATIONS,
    "exposures.db": exposures.MIGRATIONS,
    "keys.db": keys.MIGRATIONS,
    "secrets.db": secrets.MIGRATIONS,
    "snapshots.db": snapshots.MIGRATIONS,
    "templates.db": templates.MIGRATIONS,
    "tokens.db": token_store.MIGRATIONS,
}
"""Every database of the data folder, with its schema."""
SHARED = frozenset((SESSIONS, "approvals.db", "conversations.db", "keys.db", "tokens.db"))
"""Those whose place a database takes that several gateways share."""
AUDIT = "audit"
"""The folder of the audit trail."""
log = logging.getLogger(__name__)

MADE = "databases.json"
"""The file that says which of them were made here, so that one which is gone is missed."""
_BESIDE = ("", "-wal", "-shm")
_ALL = "all that was in it"


def check(data_dir: Path, running: Sequence[str], *, shared: bool = False) -> None:
    """Refuse to start where that would make damage worse.

    Args:
        data_dir: where the databases are.
        running: the sandboxes whose processes are there.
        shared: whether sessions, keys and approvals are in a database of several gateways.

    Raises:
        StateUnusable: a database is damaged, of a newer release, or gone.
    """
    for name, migrations in DATABASES.items():
        database.examine(data_dir / name, len(migrations))
    gone = sorted(_made(data_dir) - _there(data_dir) - (SHARED if shared else set()))
    if gone and not (running and SESSIONS in gone):
        # A new one would silently be weaker: no approver's secret, no deleted keys, no limits that
        # a template had set, no record of what was done.
        raise errors.StateUnusable(
            f"{' and '.join(str(data_dir / name) for name in gone)} was made by a gateway and is "
            "gone or empty",
            hint="put a copy of it back; or let `k8e gateway repair` begin a new one, without "
            "anything that was in it",
        )
    if running and not shared and not database.is_there(data_dir / SESSIONS):
        # A new one would know no session, and these would all be taken for leftovers.
        raise errors.StateUnusable(
            f"the database {data_dir / SESSIONS} is gone, but {len(running)} sandboxes still run",
            hint="put a copy of it back; or give these sandboxes up: k8e gateway repair, which "
            "makes a new one, and the next start removes them",
        )


def _there(data_dir: Path) -> set[str]:
    """The stores that exist: databases, and an audit trail that has a row."""
    found = {name for name in DATABASES if database.is_there(data_dir / name)}
    rows = (path.stat().st_size for path in (data_dir / AUDIT).glob(f"*{SUFFIX}"))
    return found | ({AUDIT} if any(rows) else set())


def _made(data_dir: Path) -> set[str]:
    """The stores that were made here, as far as that is recorded."""
    path = data_dir / MADE
    try:
        found = json.loads(path.read_bytes())["made"]
        return {name for name in found if name in DATABASES or name == AUDIT}
    except FileNotFoundError:
        return set()  # a new folder, or one of an older release
    except errors.UNREADABLE:
        raise errors.StateUnusable(
            f"{path} cannot be read, so it is unknown whether something is missing",
            hint="check that all databases and the audit trail are there, and let "
            "`k8e gateway repair` write it again",
        ) from None


def remember(data_dir: Path) -> None:
    """Record which stores exist; if the disk is full, the next start or end of a gateway does."""
    there = _there(data_dir)
    if there == _made(data_dir):
        return
    try:
        _write_made(data_dir, there)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        log.warning("%s is not up to date: %s", MADE, error.strerror)


def _write_made(data_dir: Path, names: Iterable[str]) -> None:
    scratch = data_dir / f".{MADE}.new"
    with scratch.open("w", encoding="utf-8") as file:
        json.dump({"made": sorted(names)}, file)
        file.flush()
        os.fsync(file.fileno())
    scratch.rename(data_dir / MADE)


@dataclass(frozen=True)
class Repaired:
    """The result of repairing one database."""

    name: str
    kept: str = ""
    """Where the damaged one is now; empty if there was none."""
    rows: int = 0
    """How many could be saved."""
    lost: str = ""
    """Why there may have been more of them; empty if all were saved."""

    def to_json(self) -> dict[str, Any]:
        told = {"database": self.name, "kept_as": self.kept, "rows_saved": self.rows}
        return {**told, "lost": self.lost} if self.lost else told


def repair(data_dir: Path) -> list[Repaired]:
    """Repair damaged databases as far as they can be read; no gateway may be running.

    The damaged ones are kept beside them. One of a newer release is an error, and left alone.
    """
    damaged: list[str] = []
    for name, migrations in DATABASES.items():  # all, before any is changed
        try:
            database.examine(data_dir / name, len(migrations))
        except database.Damaged:
            damaged.append(name)
    done = [_save(data_dir / name, DATABASES[name]) for name in damaged]
    done += _make_missing(data_dir)
    remember(data_dir)
    return done


def _make_missing(data_dir: Path) -> list[Repaired]:
    """Make new databases in place of missing ones."""
    try:
        made = _made(data_dir)
    except errors.StateUnusable:
        made = set[str]()
        (data_dir / MADE).unlink()
    done: list[Repaired] = []
    for name in (item for item in DATABASES if item in {SESSIONS, *made}):
        if not database.is_there(data_dir / name):
            database.connect(data_dir / name, DATABASES[name], durable=True).close()
            lost = _ALL if name in made else ""
            done.append(Repaired(name, lost=lost))
    if AUDIT in made - _there(data_dir):
        done.append(Repaired(AUDIT, lost=_ALL))
    return done


def _save(path: Path, migrations: Sequence[str]) -> Repaired:
    kept = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
    for suffix in _BESIDE:
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(kept.with_name(kept.name + suffix))
    # Rows are put into the schema that they are of: a migration may have to change them.
    before = migrations[: _version(kept) or len(migrations)]
    with contextlib.closing(database.connect(path, before, durable=True)) as made:
        rows, lost = _copy_rows(kept, made) if kept.stat().st_size else (0, _ALL)
    database.connect(path, migrations, durable=True).close()
    return Repaired(path.name, kept.name, rows, lost)


def _version(source: Path) -> int:
    """The schema version of a damaged database; 0 if it does not say."""
    try:
        with contextlib.closing(sqlite3.connect(source)) as damaged:
            return int(damaged.execute("PRAGMA user_version").fetchone()[0])
    except sqlite3.DatabaseError:
        return 0


def _copy_rows(source: Path, target: sqlite3.Connection) -> tuple[int, str]:
    """Copy every readable row of every expected table; return what could not be copied."""
    query = "SELECT name FROM sqlite_master WHERE type='table' AND name NOT LIKE 'sqlite_%'"
    rows, problems = 0, list[str]()
    with contextlib.closing(sqlite3.connect(source)) as damaged:
        for (table,) in target.execute(query).fetchall():
            refused = 0
            try:
                for row in _rows(damaged, target, table):
                    done = _insert(target, table, row)
                    rows, refused = rows + done, refused + 1 - done
            except (sqlite3.DatabaseError, OverflowError) as error:
                problems.append(f"{table}: {error}")
            if refused:
                problems.append(f"{table}: {refused} rows do not belong to it, or are duplicates")
    return rows, "; ".join(problems)


def _rows(
    source: sqlite3.Connection, target: sqlite3.Connection, table: str
) -> Iterator[dict[str, Any]]:
    """The readable rows of a table, with the columns that it still has."""
    wanted = {row[1] for row in target.execute(f"PRAGMA table_info({table})")}
    names = [row[1] for row in source.execute(f"PRAGMA table_info({table})")]
    columns = [name for name in names if name in wanted]
    if columns:
        # Not by an index, which may itself be damaged.
        query = f"SELECT {', '.join(columns)} FROM {table} NOT INDEXED"  # noqa: S608 - names of ours
        for row in source.execute(query):
            yield dict(zip(columns, row, strict=True))


def _insert(target: sqlite3.Connection, table: str, row: dict[str, Any]) -> int:
    listed, marks = ", ".join(row), ", ".join("?" * len(row))
    try:
        target.execute(f"INSERT INTO {table} ({listed}) VALUES ({marks})", [*row.values()])  # noqa: S608 - names of ours
    except sqlite3.IntegrityError:  # a row that was read twice, or is none any more
        return 0
    return 1
