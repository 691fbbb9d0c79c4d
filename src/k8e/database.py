"""SQLite files in the data folder: opened in one way, with their schema brought up to date.

Plain ``sqlite3`` on the event loop: a row costs 0.03 ms there, and 0.25 ms through a thread.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from k8e import errors


def connect(path: Path, migrations: Sequence[str], *, durable: bool) -> sqlite3.Connection:
    """Open a database for its owner alone.

    Args:
        path: the file; made where there is none.
        migrations: one script per schema version, applied in order; the file remembers how far.
        durable: whether a row is on the disk before its writer goes on, also for a power failure.
    """
    database = sqlite3.connect(path, isolation_level=None)
    try:
        return _prepared(database, path, migrations, durable=durable)
    except sqlite3.DatabaseError as error:
        database.close()
        raise errors.InvalidRequest(
            f"the database {path.name} cannot be used: {error}",
            hint="if it is damaged: put it aside or back from a copy, or set K8E_DATA_DIR",
        ) from None
    except BaseException:
        database.close()
        raise


def _prepared(
    database: sqlite3.Connection, path: Path, migrations: Sequence[str], *, durable: bool
) -> sqlite3.Connection:
    path.chmod(0o600)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
    database.execute("PRAGMA busy_timeout=5000")
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version > len(migrations):
        raise errors.InvalidRequest(
            f"the database {path.name} is of a newer k8e (schema {version}, this release has "
            f"{len(migrations)})",
            hint="update k8e, or set K8E_DATA_DIR to another folder",
        )
    for number in range(version, len(migrations)):
        database.executescript(
            f"BEGIN;{migrations[number]};PRAGMA user_version={number + 1};COMMIT;"
        )
    return database


def is_text(*values: object) -> bool:
    """Whether SQLite takes all of ``values``; nothing else was ever written to it."""
    return not any("\ud800" <= char <= "\udfff" for value in values for char in str(value))
