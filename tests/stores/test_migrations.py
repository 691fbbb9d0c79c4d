"""The tables in PostgreSQL: made, moved up and down with data in them, and refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import URL, create_engine

from k8e import errors
from k8e.postgres import address, migration
from k8e.postgres.schema import METADATA, VERSIONS
from k8e.postgres.stores import open_stores
from k8e.sessions.conversations import Conversation
from tests.stores.contracts import BASE, KEY
from tests.stores.servers import PostgresServer

pytestmark = pytest.mark.anyio


def version(server: PostgresServer, name: str) -> str:
    return server.sql("SELECT version_num FROM alembic_version", name)


def test_the_migrations_make_the_tables_that_the_stores_use(database_url: str) -> None:
    engine = create_engine(address.parse(database_url))
    with engine.connect() as connection:
        context = MigrationContext.configure(connection)
        assert compare_metadata(context, METADATA) == []
    engine.dispose()


async def test_rows_survive_the_way_down_and_up(
    server: PostgresServer, template: str, tmp_path: Path
) -> None:
    name = server.create(template)
    url = address.parse(server.url(name))
    stores = await open_stores(server.url(name), tmp_path)
    await stores.sessions.insert(BASE)
    made = await stores.keys.insert(KEY, b"digest")
    await stores.conversations.claim(Conversation("me", "t", "c", "ann", "sess-a"))
    await stores.gateways.leave()
    await stores.close()
    assert migration.migrate(url, down=True) == ("0002", "0001")
    assert server.sql("SELECT to_regclass('conversations') IS NULL", name) == "t"
    with pytest.raises(
        errors.StateUnusable, match="has schema 0001, this release needs 0002"
    ) as no:
        await open_stores(server.url(name), tmp_path)
    assert "k8e gateway migrate" in no.value.hint
    assert migration.migrate(url) == ("0001", "0002")
    again = await open_stores(server.url(name), tmp_path)
    assert again.sessions.unended() == [BASE]
    assert again.keys.listing() == [made]
    assert await again.conversations.find("me", "t", "c") is None, "its table was removed"
    await again.gateways.leave()
    await again.close()
    for before, after in (("0002", "0001"), ("0001", ""), ("", "")):
        assert migration.migrate(url, down=True) == (before, after)
    assert migration.migrate(url) == ("", VERSIONS[-1])


async def test_a_database_that_gateways_use_is_not_migrated(
    database_url: str, tmp_path: Path
) -> None:
    stores = await open_stores(database_url, tmp_path)
    with pytest.raises(errors.Conflict, match="gateways use the database"):
        migration.migrate(address.parse(database_url), down=True)
    await stores.close()


@pytest.mark.parametrize("work", [migration.ensure, migration.migrate])
def test_a_database_of_a_newer_release_is_refused_and_left_alone(
    server: PostgresServer, template: str, work: Callable[[URL], object]
) -> None:
    name = server.create(template)
    server.sql("UPDATE alembic_version SET version_num = '0099'", name)
    with pytest.raises(errors.StateUnusable, match=r"newer k8e \(schema 0099"):
        work(address.parse(server.url(name)))
    assert version(server, name) == "0099"


def test_somebody_elses_database_is_refused_and_left_alone(server: PostgresServer) -> None:
    name = server.create()
    server.sql("CREATE TABLE sessions (a int)", name)
    for work in (migration.ensure, migration.migrate):
        with pytest.raises(errors.StateUnusable, match="tables of somebody else"):
            work(address.parse(server.url(name)))
    assert server.sql("SELECT to_regclass('gateways') IS NULL", name) == "t"


def test_a_migration_that_fails_changes_nothing(server: PostgresServer) -> None:
    name = server.create()
    url = address.parse(server.url(name))
    migration.migrate(url)
    migration.migrate(url, down=True)
    server.sql("CREATE TABLE revocations (a int)", name)
    with pytest.raises(errors.StoreUnreachable, match="already exists"):
        migration.migrate(url)
    assert version(server, name) == "0001"
    assert server.sql("SELECT to_regclass('conversations') IS NULL", name) == "t"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("no address", "not the address of a database"),
        ("mysql://me:hush-hush@host/db", "not of PostgreSQL"),
        ("postgresql://me:hush-hush@host", "names no database"),
        ("postgresql://me:hush-hush@host:port/db", "not the address of a database"),
    ],
)
def test_a_wrong_address_is_refused_without_its_password(text: str, why: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=why) as refused:
        address.parse(text)
    assert "hush" not in str(refused.value) + refused.value.hint


def test_a_server_that_is_not_there_is_told_without_the_password(tmp_path: Path) -> None:
    url = address.parse(f"postgresql://me:hush-hush@/db?host={tmp_path}")
    with pytest.raises(errors.StoreUnreachable, match="does not answer") as refused:
        migration.ensure(url)
    assert "hush" not in str(refused.value) + refused.value.hint
