"""What a gateway finds in its folders: looked at as a whole before anything of it is changed."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k8e import database, errors
from k8e.auth import store as keys
from k8e.sessions import (
    approval_store,
    exposure_store,
    secret_store,
    snapshot_store,
    store,
    template_store,
)

SESSIONS = "sessions.db"
DATABASES: dict[str, Sequence[str]] = {
    SESSIONS: store.MIGRATIONS,
    "approvals.db": approval_store.MIGRATIONS,
    "exposures.db": exposure_store.MIGRATIONS,
    "keys.db": keys.MIGRATIONS,
    "secrets.db": secret_store.MIGRATIONS,
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
        done.append(Repaired(SESSIONS))
    return done


def _save(path: Path, migrations: Sequence[str]) -> Repaired:
    kept = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
    for suffix in _BESIDE:
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(kept.with_name(kept.name + suffix))
    # Rows are put into the schema that they are of: a migration may have to change them.
    before = migrations[: _version(kept) or len(migrations)]
    with contextlib.closing(database.connect(path, before, durable=True)) as made:
        rows, lost = _copy_rows(kept, made)
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
    """Copy every row that can be read, of every table that there should be; and what cannot."""
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
                problems.append(f"{table}: {refused} rows are no rows of it, or there twice")
    return rows, "; ".join(problems)


def _rows(
    source: sqlite3.Connection, target: sqlite3.Connection, table: str
) -> Iterator[dict[str, Any]]:
    """The rows of a table as far as they can be read, with the columns that it still has."""
    wanted = {row[1] for row in target.execute(f"PRAGMA table_info({table})")}
    names = [row[1] for row in source.execute(f"PRAGMA table_info({table})")]
    columns = [name for name in names if name in wanted]
    if columns:
        # Not by an index: that may be what is damaged.
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
