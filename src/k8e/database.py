"""SQLite files in the data folder: opened in one way, with their schema brought up to date.

Plain ``sqlite3`` on the event loop: a row costs 0.03 ms there, and 0.25 ms through a thread.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from k8e import disk, errors

CHECKED_BYTES = 64 << 20
"""Larger files are not read as a whole when they are opened: that would take a second."""
BUSY_SECONDS = 5.0
LOG_BYTES = 4 << 20
"""Of a database's write-ahead log, which SQLite begins anew when it is about as long. It has its
blocks from the start: a row that is changed needs none then."""
_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)


T = TypeVar("T")


class Done(Generic[T]):
    """The answer of a write that was done when it was asked for, for callers that await it.

    Awaiting it never lets anybody else run, so a store in SQLite is as quick as it was, and
    whoever writes to one of PostgreSQL waits for the commit in the same words.
    """

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def __await__(self) -> Generator[None, None, T]:
        return self.value
        yield  # what makes this a generator


DONE = Done(None)
"""The answer of a write that tells nothing."""


class Damaged(errors.StateUnusable):
    """A file is not a database any more, or parts of it are damaged."""


class ReserveConnection(sqlite3.Connection):
    """A connection whose single statements get room from the gateway's reserve on a full disk."""

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        while True:
            alone = not self.in_transaction
            try:
                return super().execute(sql, parameters)
            except sqlite3.OperationalError as error:
                # In a transaction, what was done before is undone, and whoever began it decides.
                if not is_full(error) or not alone or not disk.give_way():
                    raise


def is_full(error: BaseException) -> bool:
    """Whether a database failed because its disk is full."""
    return (
        isinstance(error, sqlite3.OperationalError)
        and getattr(error, "sqlite_errorcode", 0) in _NO_ROOM
    )


def full() -> errors.LimitExceeded:
    """The error for callers if a row cannot be written."""
    return errors.LimitExceeded(
        "disk is full: the gateway cannot write down what is asked for, so it is not done",
        hint="make room on the disk of the gateway's data folder: destroy sessions, remove "
        "snapshots and images",
    )


def connect(path: Path, migrations: Sequence[str], *, durable: bool) -> sqlite3.Connection:
    """Open a database for its owner alone.

    Args:
        path: the file; made where there is none.
        migrations: one script per schema version, applied in order; the file remembers how far.
        durable: whether a row is on the disk before its writer goes on, also for a power failure.

    Raises:
        StateUnusable: it is damaged, or of a newer release, or closed to us; it was not changed.
    """
    version = examine(path, len(migrations))
    try:
        if not version and not is_there(path):
            _make(path, migrations)
            version = len(migrations)
        database = sqlite3.connect(
            path, isolation_level=None, timeout=BUSY_SECONDS, factory=ReserveConnection
        )
    except sqlite3.DatabaseError as error:
        raise _unusable(path, error) from None
    try:
        path.chmod(0o600)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
        for number in range(version, len(migrations)):
            database.executescript(
                f"BEGIN;{migrations[number]};PRAGMA user_version={number + 1};COMMIT;"
            )
        database.execute("SELECT count(*) FROM sqlite_master").fetchone()  # now there is a log
        _allocate_log(path)
    except sqlite3.DatabaseError as error:
        database.close()
        raise _unusable(path, error) from None
    return database


def _make(path: Path, migrations: Sequence[str]) -> None:
    """Make a database that appears whole: so an empty file is never a new one of ours."""
    scratch = path.with_name(f".{path.name}.new")
    for suffix in ("", "-journal"):
        scratch.with_name(scratch.name + suffix).unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(scratch, isolation_level=None)) as database:
        database.execute("PRAGMA synchronous=OFF")  # it is brought to the disk as a whole, below
        for number, migration in enumerate(migrations, start=1):
            database.executescript(f"BEGIN;{migration};PRAGMA user_version={number};COMMIT;")
    scratch.chmod(0o600)
    for place, rename in ((scratch, True), (path.parent, False)):
        fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        if rename:
            scratch.rename(path)


def settle(database: sqlite3.Connection) -> None:
    """Write all rows into the file itself.

    For rows without which we would be weaker, such as the deletion of a key: what stands only in
    the file beside the database is gone with that file, and nobody would notice.
    """
    database.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()


def _allocate_log(path: Path) -> None:
    """Allocate blocks for the write-ahead log; if there are none, the reserve is used."""
    log = path.with_name(path.name + "-wal")
    with contextlib.suppress(OSError):
        fd = os.open(log, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            disk.allocate(fd, LOG_BYTES)
        finally:
            os.close(fd)


def examine(path: Path, newest: int) -> int:
    """The schema version of a database, 0 where there is none; StateUnusable if it cannot be used.

    Nothing is written: a damaged file stays as it is for whoever can mend it.
    """
    if not is_there(path):
        return 0
    if not path.stat().st_size:  # a new one appears whole, so this one was another before
        raise _damaged(path, "it is empty")
    try:
        with contextlib.closing(_open_to_read(path)) as database:
            version = int(database.execute("PRAGMA user_version").fetchone()[0])
            if version > newest:
                raise errors.StateUnusable(
                    f"the database {path} is of a newer k8e (schema {version}, this release has "
                    f"{newest})",
                    hint="update k8e, or set K8E_DATA_DIR to another folder",
                )
            if path.stat().st_size <= CHECKED_BYTES:
                said = str(database.execute("PRAGMA quick_check(1)").fetchone()[0])
                if said != "ok":
                    raise _damaged(path, said)
    except sqlite3.DatabaseError as error:
        raise _unusable(path, error) from None
    return version


def is_there(path: Path) -> bool:
    """Whether there is a file of this name, damaged or not."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True


def _damaged(path: Path, why: str) -> Damaged:
    return Damaged(
        f"the database {path} is damaged: {' '.join(why.split())}",
        hint="put a copy of it back, or let `k8e gateway repair` save what can be read; until "
        "then all sandboxes go on running",
    )


def _unusable(path: Path, error: sqlite3.DatabaseError) -> errors.K8eError:
    # The disk is full, or another process has locked it.
    if isinstance(error, sqlite3.OperationalError):
        return errors.StateUnusable(
            f"the database {path} cannot be used: {error}",
            hint="check whether the disk is full, and who owns the file",
        )
    return _damaged(path, str(error))


def _open_to_read(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_SECONDS)


def is_text(*values: object) -> bool:
    """Whether SQLite accepts all of ``values``; no others were ever written to it."""
    return not any("\ud800" <= char <= "\udfff" for value in values for char in str(value))
