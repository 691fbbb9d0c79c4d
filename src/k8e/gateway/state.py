"""What a gateway finds in its folders: looked at as a whole before anything of it is changed."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k8e import database, errors
from k8e.auth import store as keys
from k8e.sessions import (
    approval_store,
    exposure_store,
    snapshot_store,
    store,
    template_store,
)

log = logging.getLogger(__name__)

SESSIONS = "sessions.db"
DATABASES: dict[str, Sequence[str]] = {
    SESSIONS: store.MIGRATIONS,
    "approvals.db": approval_store.MIGRATIONS,
    "exposures.db": exposure_store.MIGRATIONS,
    "keys.db": keys.MIGRATIONS,
    "snapshots.db": snapshot_store.MIGRATIONS,
    "templates.db": template_store.MIGRATIONS,
}
"""Every database of the data folder, with its schema."""
_BESIDE = ("", "-wal", "-shm")


def check(data_dir: Path, running: Sequence[str]) -> None:
    """Refuse what a start would make worse.

    Args:
        data_dir: where the databases are.
        running: the sandboxes whose processes are there.

    Raises:
        StateUnusable: a database is damaged, of a newer release, or gone while sandboxes run.
    """
    for name, migrations in DATABASES.items():
        database.examine(data_dir / name, len(migrations))
    if running and not database.is_there(data_dir / SESSIONS):
        # A new one would know no session, and all of these would be taken for leftovers.
        raise errors.StateUnusable(
            f"the database {data_dir / SESSIONS} is gone or empty, but {len(running)} sandboxes "
            "still run",
            hint="put a copy of it back; or give these sandboxes up: k8e gateway repair, which "
            "makes a new one, and the next start removes them",
        )


@dataclass(frozen=True)
class Repaired:
    """What became of one database."""

    name: str
    kept: str
    """Where the damaged one is now; empty if there was none."""
    rows: int
    """How many could be saved."""

    def to_json(self) -> dict[str, Any]:
        return {"database": self.name, "kept_as": self.kept, "rows_saved": self.rows}


def repair(data_dir: Path) -> list[Repaired]:
    """Make usable databases of damaged ones, out of what can be read; no gateway may be running.

    The damaged ones are kept beside them. One of a newer release is an error, and left alone.
    """
    damaged: list[str] = []
    for name, migrations in DATABASES.items():  # all, before any is changed
        try:
            database.examine(data_dir / name, len(migrations))
        except database.Damaged:
            damaged.append(name)
    done = [_save(data_dir / name, DATABASES[name]) for name in damaged]
    sessions = data_dir / SESSIONS
    if not database.is_there(sessions):
        database.connect(sessions, DATABASES[SESSIONS], durable=True).close()
        done.append(Repaired(SESSIONS, "", 0))
    return done


def _save(path: Path, migrations: Sequence[str]) -> Repaired:
    kept = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
    for suffix in _BESIDE:
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(kept.with_name(kept.name + suffix))
    with contextlib.closing(database.connect(path, migrations, durable=True)) as made:
        rows = _copy_rows(kept, made)
    log.warning("%s was damaged; %d rows of it were saved", path, rows)
    return Repaired(path.name, kept.name, rows)


def _copy_rows(source: Path, target: sqlite3.Connection) -> int:
    """Copy every row that can be read, of every table that there should be."""
    query = "SELECT name FROM sqlite_master WHERE type='table' AND name NOT LIKE 'sqlite_%'"
    tables = [str(row[0]) for row in target.execute(query)]
    with contextlib.closing(sqlite3.connect(source)) as damaged:
        return sum(_copy_table(damaged, target, table) for table in tables)


def _copy_table(source: sqlite3.Connection, target: sqlite3.Connection, table: str) -> int:
    count = 0
    try:
        wanted = {row[1] for row in target.execute(f"PRAGMA table_info({table})")}
        names = [row[1] for row in source.execute(f"PRAGMA table_info({table})")]
        columns = [name for name in names if name in wanted]
        if not columns:
            return 0
        listed, marks = ", ".join(columns), ", ".join("?" * len(columns))
        # Not by an index: that may be what is damaged.
        for row in source.execute(f"SELECT {listed} FROM {table} NOT INDEXED"):  # noqa: S608 - names of ours
            with contextlib.suppress(sqlite3.IntegrityError):
                target.execute(f"INSERT INTO {table} ({listed}) VALUES ({marks})", row)  # noqa: S608 - names of ours
                count += 1
    except (sqlite3.DatabaseError, OverflowError) as error:
        log.warning("the rest of table %s cannot be read: %s", table, error)
    return count
