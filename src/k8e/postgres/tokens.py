"""Signing keys and revocations in PostgreSQL.

Each token that is checked is looked up here, so a revocation holds on every gateway from its commit
on; while the database is away, no token can be checked, and none is good.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Executable, delete, func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from k8e.auth.token_store import SigningKey
from k8e.postgres.address import is_text
from k8e.postgres.engine import Engine
from k8e.postgres.schema import REVOCATIONS, SIGNING_KEYS

_K, _R = SIGNING_KEYS.c, REVOCATIONS.c


class PostgresTokenStore:
    """The signing keys and revocations of all gateways of a database."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def close(self) -> None:
        """Do nothing: the code that made the engine closes it."""

    async def keys(self) -> list[SigningKey]:
        query = select(_K.kid, _K.secret, _K.made_at, _K.signs_from).order_by(_K.number)

        async def work(connection: AsyncConnection) -> list[SigningKey]:
            rows = await connection.execute(query)
            return [SigningKey(row[0], bytes(row[1]), row[2], row[3]) for row in rows]

        return await self._engine.run(work)

    async def add(self, key: SigningKey, after: str) -> bool:
        values = {
            "kid": key.kid,
            "secret": key.secret,
            "made_at": key.made_at,
            "signs_from": key.signs_from,
        }

        async def work(connection: AsyncConnection) -> bool:
            # One at a time: else two that follow the same key are both the newest.
            await connection.execute(text("LOCK TABLE signing_keys IN EXCLUSIVE MODE"))
            newest = select(_K.kid).order_by(_K.number.desc()).limit(1)
            known = (await connection.execute(newest)).scalar() or ""
            if known == key.kid:  # an attempt before this one, whose answer was lost
                return True
            if known != after:
                return False
            await connection.execute(insert(SIGNING_KEYS).values(**values))
            return True

        return await self._engine.run(work)

    async def remove(self, kid: str) -> None:
        await self._do(delete(SIGNING_KEYS).where(_K.kid == kid))

    async def revoke(self, subject: str, *, issued_before: float, until: float) -> None:
        made = insert(REVOCATIONS).values(subject=subject, issued_before=issued_before, until=until)
        later: dict[str, Any] = {
            "issued_before": func.greatest(_R.issued_before, made.excluded.issued_before),
            "until": func.greatest(_R.until, made.excluded.until),
        }
        await self._do(made.on_conflict_do_update(index_elements=["subject"], set_=later))

    async def issued_before(self, subjects: Sequence[str]) -> float:
        if not is_text(*subjects):
            return 0
        query = select(func.max(_R.issued_before)).where(_R.subject.in_(list(subjects)))

        async def work(connection: AsyncConnection) -> float:
            return float((await connection.execute(query)).scalar() or 0)

        return await self._engine.run(work)

    async def forget(self, now: float) -> None:
        await self._do(delete(REVOCATIONS).where(_R.until < now))

    async def _do(self, statement: Executable) -> None:
        async def work(connection: AsyncConnection) -> None:
            await connection.execute(statement)

        await self._engine.run(work)
