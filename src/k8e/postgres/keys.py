"""Keys in PostgreSQL. Each gateway remembers all of them, so that a call costs no query.

This cache is valid as long as news of the others arrive. When none could for ``TRUST_SECONDS``, no
key is valid: one that we still know may have been deleted.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from sqlalchemy import and_, delete, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from k8e import errors
from k8e.auth.store import MAX_CERTIFICATES, Key
from k8e.model import Role
from k8e.postgres.engine import Engine, Refetch
from k8e.postgres.schema import CERTIFICATES, KEYS

SUBJECT = "keys"
TRUST_SECONDS = 120.0
_K, _C = KEYS.c, CERTIFICATES.c


class PostgresKeyStore:
    """The keys of all gateways of a database."""

    def __init__(self, engine: Engine) -> None:
        self.on_end: list[Callable[[Key], None]] = []
        self._engine = engine
        self._keys: dict[int, Key] = {}
        self._of_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._certificates: dict[str, tuple[int, float]] = {}
        self._mine: set[int] = set()  # those that this gateway is changing
        self._refetch = Refetch(engine, self._fetch, self._fetched)
        engine.on_news[SUBJECT] = self._refetch.one
        engine.on_connect.append(self._refetch.everything)

    async def load(self) -> None:
        """Read all keys, before the first call."""
        await self._refetch.everything()

    def close(self) -> None:
        """Do nothing: the code that made the engine closes it."""

    # Reading.

    def hashed(self, digest: bytes) -> Key | None:
        self._check_trust()
        return self._keys.get(self._of_hash.get(digest, 0))

    def named(self, name: str) -> Key | None:
        return next((key for key in self._living() if key.name == name), None)

    def owned(self, owner: str) -> Key | None:
        return next((key for key in self._living() if key.owner == owner), None)

    def listing(self) -> list[Key]:
        return sorted(self._living(), key=lambda key: (key.created_at, key.key_id))

    def _living(self) -> list[Key]:
        return [key for key in self._keys.values() if not key.revoked_at]

    def revoked(self) -> set[str]:
        return {key.owner for key in self._keys.values() if key.revoked_at}

    def of_certificate(self, serial: str, now: float) -> Key | None:
        self._check_trust()
        key_id, expires_at = self._certificates.get(serial, (0, 0.0))
        return self._keys.get(key_id) if expires_at > now else None

    def certificates(self, key_id: int, now: float) -> int:
        found = self._certificates.values()
        return sum(known == key_id and expires_at > now for known, expires_at in found)

    def _check_trust(self) -> None:
        away = self._engine.seconds_away()
        if away > TRUST_SECONDS:
            raise errors.StoreUnreachable(
                f"the database has not answered for {away:.0f} s, so it is not known any more "
                "which keys are good",
                hint="look whether PostgreSQL runs; the gateway's own user is served all the same",
            )

    # Writing.

    async def insert(self, key: Key, digest: bytes) -> Key:
        values = {
            "name": key.name,
            "hash": digest,
            "roles": ",".join(sorted(key.roles)),
            "created_at": key.created_at,
            "expires_at": key.expires_at,
            "owner": key.owner,
            "max_sessions": key.max_sessions,
            "rate": key.rate,
        }

        async def work(connection: AsyncConnection) -> int | None:
            made = insert(KEYS).values(**values).on_conflict_do_nothing().returning(_K.key_id)
            key_id = (await connection.execute(made)).scalar()
            if key_id is None:  # an attempt before this one, perhaps, whose answer was lost
                same = select(_K.key_id).where(_K.hash == digest)
                return (await connection.execute(same)).scalar()
            await self._engine.tell(connection, SUBJECT, key_id)
            return key_id

        key_id = await self._engine.run(work)
        if key_id is None:
            raise errors.Conflict(
                f"there is a key {key.name!r} already",
                hint=f"choose another name, or delete it: k8e sandbox api-key delete {key.name}",
            )
        await self._refetch.one(str(key_id))
        return replace(key, key_id=key_id)

    async def rotate(self, key: Key, digest: bytes) -> None:
        async def work(connection: AsyncConnection) -> None:
            await connection.execute(delete(CERTIFICATES).where(_C.key_id == key.key_id))
            same = and_(_K.key_id == key.key_id, _K.revoked_at == 0)
            change = (
                update(KEYS)
                .where(same)
                .values(hash=digest, created_at=key.created_at, expires_at=key.expires_at)
            )
            if (await connection.execute(change)).rowcount != 1:
                raise errors.Conflict(f"key {key.name!r} was deleted just now")
            await self._engine.tell(connection, SUBJECT, key.key_id)

        await self._write(key.key_id, work)

    async def revoke(self, name: str, at: float) -> Key | None:
        found = self.named(name)
        if found is None:
            return None

        async def work(connection: AsyncConnection) -> None:
            change = update(KEYS).where(_K.key_id == found.key_id, _K.revoked_at == 0)
            await connection.execute(change.values(revoked_at=at))
            await self._engine.tell(connection, SUBJECT, found.key_id)

        await self._write(found.key_id, work)
        return found

    async def _write(self, key_id: int, work: Callable[[AsyncConnection], Awaitable[None]]) -> None:
        self._mine.add(key_id)
        try:
            await self._engine.run(work)
            await self._refetch.one(str(key_id))
        finally:
            self._mine.discard(key_id)

    async def forget(self, before: float, now: float) -> None:
        async def work(connection: AsyncConnection) -> list[int]:
            old = delete(KEYS).where(_K.revoked_at > 0, _K.revoked_at < before)
            gone = [row[0] for row in await connection.execute(old.returning(_K.key_id))]
            over = and_(_K.revoked_at == 0, _K.expires_at > 0, _K.expires_at < before)
            change = update(KEYS).where(over).values(revoked_at=now).returning(_K.key_id)
            gone += [row[0] for row in await connection.execute(change)]
            await connection.execute(delete(CERTIFICATES).where(_C.expires_at < before))
            for key_id in gone:
                await self._engine.tell(connection, SUBJECT, key_id)
            return gone

        for key_id in await self._engine.run(work):
            await self._refetch.one(str(key_id))

    async def add_certificate(
        self, serial: str, key_id: int, device: str, issued_at: float, expires_at: float
    ) -> None:
        values = {
            "serial": serial,
            "key_id": key_id,
            "device": device,
            "issued_at": issued_at,
            "expires_at": expires_at,
        }

        async def work(connection: AsyncConnection) -> None:
            made = insert(CERTIFICATES).values(**values).on_conflict_do_nothing()
            await connection.execute(made)
            mine = select(_C.serial).where(_C.key_id == key_id)
            newest = mine.order_by(_C.issued_at.desc(), _C.number.desc()).offset(MAX_CERTIFICATES)
            await connection.execute(delete(CERTIFICATES).where(_C.serial.in_(newest)))
            await self._engine.tell(connection, SUBJECT, key_id)

        await self._engine.run(work)
        await self._refetch.one(str(key_id))

    # Memory.

    async def _fetch(self, connection: AsyncConnection, keys: list[str] | None) -> Any:
        rows, shown = select(KEYS), select(_C.serial, _C.key_id, _C.expires_at)
        shown = shown.where(_C.expires_at > time.time())
        if keys is not None:
            wanted = [int(key) for key in keys if key.isdecimal()]
            rows, shown = rows.where(_K.key_id.in_(wanted)), shown.where(_C.key_id.in_(wanted))
        found = [(_key(row), bytes(row.hash)) for row in await connection.execute(rows)]
        return found, [tuple(row) for row in await connection.execute(shown)]

    def _fetched(self, keys: list[str] | None, told: Any) -> None:
        found, certificates = told
        meant = set(self._keys) if keys is None else {int(key) for key in keys if key.isdecimal()}
        before = {key_id: self._keys[key_id] for key_id in meant if key_id in self._keys}
        hashes = {key_id: self._hash_of[key_id] for key_id in before}
        for key_id in before:
            del self._keys[key_id]
            del self._of_hash[self._hash_of.pop(key_id)]
        self._certificates = {
            serial: item for serial, item in self._certificates.items() if item[0] not in meant
        }
        for key, digest in found:
            self._keys[key.key_id] = key
            self._of_hash[digest] = key.key_id
            self._hash_of[key.key_id] = digest
        for serial, key_id, expires_at in certificates:
            self._certificates[serial] = key_id, expires_at
        for key_id, old in before.items():
            now = self._keys.get(key_id)
            same = now is not None and self._hash_of[key_id] == hashes[key_id]
            ended = not same or (now is not None and now.revoked_at and not old.revoked_at)
            if ended and not old.revoked_at and key_id not in self._mine:
                for tell in self.on_end:
                    tell(now if now is not None else replace(old, revoked_at=time.time()))


def _key(row: Any) -> Key:
    # A role that we do not know gives no right.
    roles = frozenset(role for role in Role if role in row.roles.split(","))
    times = row.created_at, row.expires_at, row.revoked_at
    return Key(row.key_id, row.name, roles, *times, row.owner, row.max_sessions, row.rate)
