"""The schema of the database: checked before anything is used, and migrated up or down.

A gateway makes the tables of an empty database by itself. It changes none that others use: an
operator does that, with every gateway of the older release stopped.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import URL, Connection, create_engine, inspect, text
from sqlalchemy.exc import DBAPIError

from k8e import errors
from k8e.postgres.address import describe, unreachable
from k8e.postgres.schema import VERSIONS

_LOCK = 0x6B3865  # one migration at a time, whoever begins it
_FOLDER = Path(__file__).with_name("migrations")
CONNECT_SECONDS = 10


def ensure(url: URL) -> None:
    """Make the tables of an empty database; StateUnusable if its tables are not ours.

    Blocks: call it in a thread.
    """
    with _connected(url) as connection:
        found = _version(connection)
        if not found and not _has_tables(connection):
            _move(connection, VERSIONS[-1])
            return
        _check(found, url)
        if found != VERSIONS[-1]:
            raise errors.StateUnusable(
                f"the database {describe(url)} has schema {found or 'none'}, this release needs "
                f"{VERSIONS[-1]}",
                hint="stop every gateway that uses it, and run k8e gateway migrate",
            )


def migrate(url: URL, *, down: bool = False) -> tuple[str, str]:
    """Migrate to the newest schema, or one step down; return the versions before and afterwards."""
    with _connected(url) as connection:
        found = _version(connection)
        if found or _has_tables(connection):
            _check(found, url)
        if down:
            place = VERSIONS.index(found) if found else 0
            wanted = VERSIONS[place - 1] if place else ""
        else:
            wanted = VERSIONS[-1]
        if wanted != found:
            _refuse_while_used(connection, found)
            _move(connection, wanted, down=down)
        return found, wanted


def _check(found: str, url: URL) -> None:
    if found in VERSIONS:
        return
    if found > VERSIONS[-1]:
        raise errors.StateUnusable(
            f"the database {describe(url)} is of a newer k8e (schema {found}, this release has "
            f"{VERSIONS[-1]})",
            hint="update k8e, or set DATABASE_URL to another database",
        )
    raise errors.StateUnusable(
        f"the database {describe(url)} has tables of somebody else",
        hint="set DATABASE_URL to a database of k8e's own: createdb k8e",
    )


def _refuse_while_used(connection: Connection, found: str) -> None:
    """Refuse while a gateway runs, which would meet unknown tables."""
    if not found:
        return
    query = (
        "SELECT name FROM gateways WHERE state = 'alive'"
        " AND seen_at + lease * interval '1 second' > now() ORDER BY name"
    )
    running = [str(row[0]) for row in connection.execute(text(query))]
    if running:
        raise errors.Conflict(
            f"gateways use the database: {', '.join(running[:5])}",
            hint="stop them first: k8e gateway stop, on each of their machines",
        )


def _move(connection: Connection, version: str, *, down: bool = False) -> None:
    config = Config()
    config.set_main_option("script_location", str(_FOLDER))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    if down:
        command.downgrade(config, version or "base")
    else:
        command.upgrade(config, version)


def _version(connection: Connection) -> str:
    """The schema version; empty where there is none."""
    if not inspect(connection).has_table("alembic_version"):
        return ""
    row = connection.execute(text("SELECT version_num FROM alembic_version")).fetchone()
    return str(row[0]) if row is not None else ""


def _has_tables(connection: Connection) -> bool:
    return bool(set(inspect(connection).get_table_names()) - {"alembic_version"})


@contextmanager
def _connected(url: URL) -> Generator[Connection]:
    """A transaction that excludes other migrations; rolled back if anything fails."""
    engine = create_engine(
        url, hide_parameters=True, connect_args={"connect_timeout": CONNECT_SECONDS}
    )
    try:
        with engine.begin() as connection:
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
            yield connection
    except DBAPIError as error:
        raise unreachable(url, error) from None
    finally:
        engine.dispose()
