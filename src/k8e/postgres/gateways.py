"""The gateways that share a database: each has a row with a lease, which it renews.

A gateway that finds an expired lease takes its holder for dead, and ends its sessions in the
database; a gateway that comes back with the same data folder before that adopts them. After the
database was unreachable, no gateway is judged until all had the time of a lease to come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from k8e import errors
from k8e.model import Phase
from k8e.postgres import sessions
from k8e.postgres.engine import Engine, Refetch
from k8e.postgres.schema import GATEWAYS, SESSIONS
from k8e.sessions.store import Elsewhere

log = logging.getLogger(__name__)

SUBJECT = "gateways"
ID_FILE = "gateway.id"
ALIVE, GONE = "alive", "gone"
BEATS = 3
"""Renewals within one lease."""
_G = GATEWAYS.c


def gateway_id(data_dir: Path) -> str:
    """The id of the gateway of a data folder; made with it, and kept as long as it."""
    path = data_dir / ID_FILE
    with contextlib.suppress(FileNotFoundError):
        return path.read_text("ascii").strip()
    made = f"gw-{secrets.token_hex(8)}"
    scratch = path.with_name(f".{ID_FILE}.new")
    scratch.write_text(f"{made}\n", "ascii")
    scratch.rename(path)
    return made


@dataclass(frozen=True)
class GatewayRow:
    """A gateway, as the others see it."""

    gateway_id: str
    name: str
    address: str
    state: str


class _Burial(NamedTuple):
    """A gateway that was taken for dead, and the sandboxes of its sessions."""

    gateway_id: str
    name: str
    sandboxes: list[str]


class Gateways:
    """This gateway among the others."""

    def __init__(self, engine: Engine, *, lease: float, name: str = "") -> None:
        self.on_ended: Callable[[str], object] = lambda _: None
        """Called with the sandbox of each session that this gateway has ended for another one."""
        self._engine = engine
        self._me = engine.gateway_id
        self._lease = lease
        self._name = name or f"{socket.gethostname()}/{self._me}"
        self._address = ""
        self._rows: dict[str, GatewayRow] = {}
        self._task: asyncio.Task[None] | None = None
        self._judges_from = float("inf")
        self._refetch = Refetch(engine, self._fetch, self._fetched)
        engine.on_news[SUBJECT] = self._refetch.one
        engine.on_connect.append(self._refetch.everything)
        engine.on_connect.append(self._begin_to_judge)

    # Knowing.

    def elsewhere(self, gateway: str) -> Elsewhere:
        known = self._rows.get(gateway)
        return Elsewhere(known.name, known.address) if known is not None else Elsewhere(gateway, "")

    def living(self) -> list[GatewayRow]:
        """All gateways that renew their leases, as far as is known."""
        found = [row for row in self._rows.values() if row.state == ALIVE]
        return sorted(found, key=lambda row: row.name)

    # Living.

    async def start(self) -> None:
        """Announce that this gateway lives, before it reads its sessions: so none ends them."""
        await self._engine.run(self._renew_and_tell)
        await self._refetch.everything()
        self._task = asyncio.create_task(self._beat())

    async def announce(self, address: str) -> None:
        """Tell the others the address of this gateway."""
        self._address = address
        await self._engine.run(self._renew_and_tell)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._lease / BEATS)
            try:
                await self._engine.run(self._renew)
                if asyncio.get_running_loop().time() >= self._judges_from:
                    await self._judge()
            except errors.StoreUnreachable as error:
                self._judges_from = float("inf")
                log.warning("the lease of this gateway is not renewed: %s", error)
                continue
            if self._judges_from == float("inf") and self._engine.reachable:
                self._begin_to_judge()

    def _begin_to_judge(self) -> None:
        """Begin to judge a lease after the database came back: others may need that time too."""
        self._judges_from = asyncio.get_running_loop().time() + self._lease * (1 + 1 / BEATS)

    async def _renew(self, connection: AsyncConnection) -> None:
        values = {
            "name": self._name,
            "address": self._address,
            "state": ALIVE,
            "lease": self._lease,
            "seen_at": func.clock_timestamp(),
        }
        made = insert(GATEWAYS).values(gateway_id=self._me, **values)
        await connection.execute(
            made.on_conflict_do_update(index_elements=["gateway_id"], set_=values)
        )

    async def _renew_and_tell(self, connection: AsyncConnection) -> None:
        await self._renew(connection)
        await self._engine.tell(connection, SUBJECT, self._me)

    async def leave(self) -> None:
        """Announce that this gateway has ended all its sessions and leaves."""
        change = update(GATEWAYS).where(_G.gateway_id == self._me).values(state=GONE)

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(change)
            await self._engine.tell(connection, SUBJECT, self._me)

        with contextlib.suppress(errors.StoreUnreachable):
            await self._engine.run(work)

    # Judging.

    async def _judge(self) -> None:
        """End the sessions of gateways whose leases have expired."""
        for gone in await self._engine.run(self._bury):
            count = len(gone.sandboxes)
            log.warning("gateway %s is gone: %d of its sessions are ended", gone.name, count)
            for sandbox_id in gone.sandboxes:
                self.on_ended(sandbox_id)
            await self._refetch.one(gone.gateway_id)

    async def _bury(self, connection: AsyncConnection) -> list[_Burial]:
        over = text("seen_at + lease * interval '1 second' < clock_timestamp()")
        gone = update(GATEWAYS).where(_G.state == ALIVE, _G.gateway_id != self._me, over)
        gone = gone.values(state=GONE).returning(_G.gateway_id, _G.name, _G.lease)
        told: list[_Burial] = []
        for found, name, lease in (await connection.execute(gone)).all():
            why = f"its gateway {name} did not renew its lease of {lease:g} s"
            ended = update(SESSIONS).where(
                SESSIONS.c.gateway_id == found, SESSIONS.c.phase != Phase.ENDED
            )
            ended = ended.values(
                phase=Phase.ENDED,
                ended_reason=why,
                ended_at=func.extract("epoch", func.clock_timestamp()),
            )
            rows = (await connection.execute(ended.returning(SESSIONS.c.sandbox_id))).all()
            for (sandbox_id,) in rows:
                await self._engine.tell(connection, sessions.SUBJECT, sandbox_id)
            await self._engine.tell(connection, SUBJECT, found)
            told.append(_Burial(found, name, [str(row[0]) for row in rows]))
        return told

    # Memory.

    async def _fetch(self, connection: AsyncConnection, keys: list[str] | None) -> list[GatewayRow]:
        query = select(_G.gateway_id, _G.name, _G.address, _G.state)
        if keys is not None:
            query = query.where(_G.gateway_id.in_(keys))
        return [_row(row) for row in await connection.execute(query)]

    def _fetched(self, keys: list[str] | None, rows: list[GatewayRow]) -> None:
        if keys is None:
            self._rows.clear()
        self._rows |= {row.gateway_id: row for row in rows}


def _row(row: Any) -> GatewayRow:
    return GatewayRow(*row)
