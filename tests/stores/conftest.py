"""A PostgreSQL server for the tests of a worker, and a new database for each of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest

from tests.stores import servers
from tests.stores.servers import PostgresServer


@pytest.fixture(scope="session")
def server() -> Generator[PostgresServer]:
    if servers.programs() is None:
        pytest.skip("PostgreSQL is not installed (Debian: postgresql)")
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def template(server: PostgresServer) -> str:
    """A database with the tables of this release, of which copies are quickly made."""
    from k8e.postgres import address, migration

    name = server.create()
    migration.ensure(address.parse(server.url(name)))
    return name


@pytest.fixture
def database_url(server: PostgresServer, template: str) -> str:
    return server.url(server.create(template))


@pytest.fixture
async def postgres(database_url: str, tmp_path: Path) -> AsyncGenerator[object]:
    from k8e.postgres.stores import open_stores

    stores = await open_stores(database_url, tmp_path)
    yield stores
    await stores.close()
