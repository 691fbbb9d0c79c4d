"""All stores of one gateway in PostgreSQL, opened together and closed together."""

from __future__ import annotations

import asyncio
from pathlib import Path

from k8e.postgres import migration
from k8e.postgres.address import parse
from k8e.postgres.approvals import PostgresApprovalStore
from k8e.postgres.conversations import PostgresConversations
from k8e.postgres.engine import Engine
from k8e.postgres.gateways import Gateways, gateway_id
from k8e.postgres.keys import PostgresKeyStore
from k8e.postgres.sessions import PostgresSessionStore
from k8e.postgres.tokens import PostgresTokenStore

LEASE = 30.0


class PostgresStores:
    """The stores of this gateway, and its place among the others."""

    def __init__(self, engine: Engine, *, lease: float = LEASE) -> None:
        self.engine = engine
        self.gateways = Gateways(engine, lease=lease)
        self.sessions = PostgresSessionStore(engine, self.gateways.elsewhere)
        self.keys = PostgresKeyStore(engine)
        self.approvals = PostgresApprovalStore(engine)
        self.conversations = PostgresConversations(engine)
        self.tokens = PostgresTokenStore(engine)
        self.gateways.on_ended = self.sessions.read_again

    async def close(self) -> None:
        await self.gateways.stop()
        await self.engine.stop()


async def open_stores(address: str, data_dir: Path, *, lease: float = LEASE) -> PostgresStores:
    """Open the database of ``address``, whose tables are made where it is empty.

    Raises:
        StoreUnreachable: it does not answer.
        StateUnusable: it has other tables than this release needs.
    """
    url = parse(address)
    await asyncio.to_thread(migration.ensure, url)
    stores = PostgresStores(Engine(url, gateway_id(data_dir)), lease=lease)
    stores.engine.start()
    try:
        await stores.gateways.start()
        await stores.sessions.load()
        await stores.keys.load()
    except BaseException:
        await stores.close()
        raise
    return stores
