"""Sessions in PostgreSQL: the rows of all gateways, which every gateway caches.

Reads are answered from this cache at once, even while the database is unreachable; rows of others
are read again when news of them come. A session is written by its own gateway alone, until that is
taken for dead. The database decides claims of ids, requests, standing sessions and limits.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, func, or_, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from k8e import errors
from k8e.model import Phase, Session, SessionSpec, words_from_json
from k8e.postgres.engine import Engine, Refetch
from k8e.postgres.schema import SESSIONS
from k8e.sessions import live
from k8e.sessions.store import (
    ANY_NUMBER,
    ENDS_BETWEEN,
    MAX_ENDED,
    MAX_ENDED_EACH,
    Elsewhere,
    Most,
)

SUBJECT = "sessions"
SETTLE_SECONDS = 120.0
"""That another gateway may take to make a session for which a caller waits."""
_C = SESSIONS.c
_UNENDED = _C.phase != Phase.ENDED


@dataclass(frozen=True)
class StoredSession:
    """A row: a session, and the fields that only its gateway needs."""

    session: Session
    gateway_id: str
    ended_at: float
    rebinding: bool
    ending: str


class PostgresSessionStore:
    """The sessions of all gateways of a database."""

    def __init__(self, engine: Engine, gateway_of: Callable[[str], Elsewhere]) -> None:
        """``gateway_of`` returns the gateway with an id."""
        self.on_forget: list[Callable[[str], None]] = []
        self.on_lost: list[Callable[[Session], None]] = []
        self.most_of: Callable[[Session], Most] = lambda _: ANY_NUMBER
        self._engine = engine
        self._me = engine.gateway_id
        self._gateway_of = gateway_of
        self._rows: dict[str, StoredSession] = {}  # by sandbox
        self._of_id: defaultdict[str, set[str]] = defaultdict(set)  # sandboxes
        self._of_owner: defaultdict[str, set[str]] = defaultdict(set)
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)  # by session
        self._ends = 0
        self._refetch = Refetch(engine, self._fetch, self._fetched)
        engine.on_news[SUBJECT] = self._refetch.one
        engine.on_connect.append(self._refetch.everything)

    async def load(self) -> None:
        """Read all rows, before anything is asked for."""
        await self._refetch.everything()

    def read_again(self, sandbox_id: str) -> None:
        """Read a row again that other code has changed."""
        self._refetch.one(sandbox_id)

    def close(self) -> None:
        """Do nothing: the code that made the engine closes it."""

    # Reading.

    def half_ended(self) -> dict[str, str]:
        return {row.session.session_id: row.ending for row in self._mine() if row.ending}

    def half_allowed(self) -> list[Session]:
        return [row.session for row in self._mine() if row.rebinding]

    def unended(self) -> list[Session]:
        return [row.session for row in self._mine()]

    def _mine(self) -> list[StoredSession]:
        return [
            row
            for row in self._rows.values()
            if row.gateway_id == self._me and row.session.phase is not Phase.ENDED
        ]

    def sandboxes(self, owner: str = "") -> list[str]:
        return list(self._of_owner.get(owner, ()) if owner else self._rows)

    def get(self, session_id: str, owner: str = "") -> Session | None:
        rows = [self._rows[sandbox_id] for sandbox_id in self._of_id.get(session_id, ())]
        rows = [row for row in rows if owner in ("", row.session.owner)]
        if not rows:
            return None
        return max(rows, key=lambda row: (row.session.phase != Phase.ENDED, row.ended_at)).session

    def find_request(self, owner: str, request_id: str) -> Session | None:
        for session in self.of_owner(owner):
            if session.spec.request_id == request_id:
                return session
        return None

    def of_owner(self, owner: str, *, ended: bool = False) -> list[Session]:
        found = [self._rows[sandbox_id].session for sandbox_id in self._of_owner.get(owner, ())]
        found = [item for item in found if ended or item.phase is not Phase.ENDED]
        return sorted(found, key=lambda item: (item.created_at, item.sandbox_id))

    def elsewhere(self, session: Session) -> Elsewhere | None:
        row = self._rows.get(session.sandbox_id)
        if row is None or row.gateway_id == self._me:
            return None
        return self._gateway_of(row.gateway_id)

    def others(self) -> Iterable[Session]:
        for row in self._rows.values():
            if row.gateway_id != self._me and row.session.phase is not Phase.ENDED:
                yield row.session

    async def settled(self, session: Session) -> Session:
        if self.elsewhere(session) is None:
            return session  # whoever makes it here is waited for by itself
        changed = asyncio.Event()
        waiting = self._waiting[session.session_id]
        waiting.add(changed)
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                while True:
                    changed.clear()
                    found = self.get(session.session_id, session.owner)
                    if found is None:
                        return replace(session, phase=Phase.ENDED, ended_reason="it is gone")
                    if found.phase is not Phase.CREATING:
                        return found
                    await changed.wait()
        except TimeoutError:
            raise errors.TimedOut(
                f"session {session.session_id} is still being made by another gateway",
                hint="ask for it again",
            ) from None
        finally:
            waiting.discard(changed)
            if not waiting:
                self._waiting.pop(session.session_id, None)

    # Writing.

    async def insert(self, session: Session) -> None:
        most = self.most_of(session)
        values = _values(session) | {"gateway_id": self._me}

        async def work(connection: AsyncConnection) -> list[str]:
            await _check_number(connection, session, most)
            made = insert(SESSIONS).values(**values).on_conflict_do_nothing()
            done = await connection.execute(made.returning(_C.sandbox_id))
            if done.first() is None and not await self._is_mine(connection, session):
                await self._refuse(connection, session)
            await self._engine.tell(connection, SUBJECT, session.sandbox_id)
            return await self._forget_same(connection, session)

        def then(gone: list[str]) -> None:
            self._remember(StoredSession(session, self._me, 0, rebinding=False, ending=""))
            self._drop(gone)

        try:
            await self._engine.write(work, then)
        except (asyncio.CancelledError, errors.StoreUnreachable):
            # Perhaps it was written all the same; nobody goes on with it.
            self.end(session.session_id, "its creation was given up", session.created_at)
            raise

    async def _is_mine(self, connection: AsyncConnection, session: Session) -> bool:
        """Whether an attempt before this one was committed, and only its answer was lost."""
        same = and_(_C.sandbox_id == session.sandbox_id, _C.gateway_id == self._me, _UNENDED)
        known = self._rows.get(session.sandbox_id)
        found = await connection.execute(select(_C.sandbox_id).where(same))
        return known is None and found.first() is not None

    async def _refuse(self, connection: AsyncConnection, session: Session) -> None:
        """Raise Conflict, and remember the sessions that are in the way."""
        clash: list[ColumnElement[bool]] = [_C.session_id == session.session_id]
        mine = _C.owner == session.owner
        if session.spec.request_id:
            clash.append(and_(mine, _C.request_id == session.spec.request_id))
        if session.auto:
            clash.append(and_(mine, _C.tenant == session.spec.tenant, _C.auto))
        for row in await connection.execute(select(SESSIONS).where(_UNENDED, or_(*clash))):
            self._remember(_read(row, self._me))
        raise errors.Conflict(
            f"session {session.session_id!r} exists already",
            hint="choose another id, or leave it away to get a random one",
        )

    async def _forget_same(self, connection: AsyncConnection, session: Session) -> list[str]:
        """Forget the session that had the id before: it means one session to its owner."""
        if not session.spec.session_id:
            return []
        same = and_(_C.session_id == session.session_id, _C.owner == session.owner)
        return await self._forget(connection, same)

    async def activate(self, session: Session) -> Session:
        active = replace(session, phase=Phase.ACTIVE)
        creating = and_(
            _C.session_id == session.session_id,
            _C.gateway_id == self._me,
            or_(_C.phase == Phase.CREATING, _C.sandbox_id == session.sandbox_id),
            _UNENDED,
        )
        # A session that was claimed from the pool has another sandbox than was planned for it.
        planned = [row.session.sandbox_id for row in self._mine_named(session.session_id)]

        async def work(connection: AsyncConnection) -> None:
            change = update(SESSIONS).where(creating)
            change = change.values(phase=Phase.ACTIVE, sandbox_id=session.sandbox_id)
            if (await connection.execute(change)).rowcount != 1:
                raise errors.SandboxDied(f"session {session.session_id} was ended meanwhile")
            for sandbox_id in {*planned, session.sandbox_id}:
                await self._engine.tell(connection, SUBJECT, sandbox_id)

        def then(_: None) -> None:
            for sandbox_id in planned:
                self._drop_row(sandbox_id)
            self._remember(StoredSession(active, self._me, 0, rebinding=False, ending=""))

        await self._engine.write(work, then)
        return active

    def _mine_named(self, session_id: str) -> list[StoredSession]:
        return [row for row in self._mine() if row.session.session_id == session_id]

    def set_phase(self, session_id: str, phase: Phase) -> Awaitable[None]:
        running = _C.phase.in_((Phase.ACTIVE, Phase.PAUSED))
        return self._change(and_(self._named(session_id), running), phase=phase)

    def begin_end(self, session_id: str, reason: str) -> Awaitable[None]:
        return self._change(self._named(session_id), kept=True, ending=_plain(reason))

    def end(self, session_id: str, reason: str, at: float) -> Awaitable[None]:
        values = {"phase": Phase.ENDED, "ended_reason": _plain(reason), "ended_at": at}
        return self._change(self._named(session_id), kept=True, **values)

    def extend(self, session_id: str, expires_at: float, deadline: float) -> Awaitable[None]:
        return self._change(self._named(session_id), expires_at=expires_at, deadline=deadline)

    def allow(
        self, session: Session, words: tuple[str, ...], *, under_way: bool = False
    ) -> Awaitable[None]:
        told = json.dumps(words)
        same = _C.sandbox_id == session.sandbox_id
        return self._change(same, allowed_hosts=told, rebinding=under_way)

    def _named(self, session_id: str) -> ColumnElement[bool]:
        return and_(_C.session_id == session_id, _C.gateway_id == self._me, _UNENDED)

    def _change(
        self, which: ColumnElement[bool], *, kept: bool = False, **values: Any
    ) -> Awaitable[None]:
        async def work(connection: AsyncConnection) -> list[StoredSession]:
            change = update(SESSIONS).where(which).values(**values).returning(SESSIONS)
            rows = [_read(row, self._me) for row in await connection.execute(change)]
            for row in rows:
                await self._engine.tell(connection, SUBJECT, row.session.sandbox_id)
            return rows

        def then(rows: list[StoredSession]) -> None:
            for row in rows:
                self._remember(row)

        return _Quiet(self._engine.write(work, then, kept=kept))

    def forget_ended(self, before: float, owner: str = "") -> Awaitable[None]:
        self._ends += 1
        too_many = self._ends % ENDS_BETWEEN == 0

        async def work(connection: AsyncConnection) -> list[str]:
            gone = await self._forget(connection, _C.ended_at < before)
            ended = select(_C.ended_at).where(_C.phase == Phase.ENDED)
            mine = ended.where(_C.owner == owner).order_by(_C.ended_at.desc())
            last = mine.limit(1).offset(MAX_ENDED_EACH).scalar_subquery()
            gone += await self._forget(connection, and_(_C.owner == owner, _C.ended_at <= last))
            if too_many:
                newest = ended.order_by(_C.ended_at.desc()).limit(1).offset(MAX_ENDED)
                gone += await self._forget(connection, _C.ended_at <= newest.scalar_subquery())
            return gone

        return _Quiet(self._engine.write(work, self._drop))

    async def _forget(self, connection: AsyncConnection, which: ColumnElement[bool]) -> list[str]:
        gone = delete(SESSIONS).where(_C.phase == Phase.ENDED, which).returning(_C.sandbox_id)
        found = [str(row[0]) for row in await connection.execute(gone)]
        for sandbox_id in found:
            await self._engine.tell(connection, SUBJECT, sandbox_id)
        return found

    # Memory.

    async def _fetch(self, connection: AsyncConnection, keys: list[str] | None) -> list[Any]:
        query = select(SESSIONS)
        if keys is not None:
            query = query.where(_C.sandbox_id.in_(keys))
        return [_read(row, self._me) for row in await connection.execute(query)]

    def _fetched(self, keys: list[str] | None, rows: list[StoredSession]) -> None:
        found = {row.session.sandbox_id for row in rows}
        for row in rows:
            before = self._rows.get(row.session.sandbox_id)
            self._remember(row)
            lived = before is not None and before.session.phase is not Phase.ENDED
            if lived and row.gateway_id == self._me and row.session.phase is Phase.ENDED:
                for tell in self.on_lost:
                    tell(row.session)
        self._drop([key for key in (self._rows if keys is None else keys) if key not in found])

    def _remember(self, row: StoredSession) -> None:
        session = row.session
        self._rows[session.sandbox_id] = row
        self._of_id[session.session_id].add(session.sandbox_id)
        self._of_owner[session.owner].add(session.sandbox_id)
        self._wake(session.session_id)

    def _drop(self, gone: Sequence[str]) -> None:
        for sandbox_id in gone:
            row = self._drop_row(sandbox_id)
            if row is not None and row.session.phase is Phase.ENDED:
                for tell in self.on_forget:
                    tell(sandbox_id)

    def _drop_row(self, sandbox_id: str) -> StoredSession | None:
        row = self._rows.pop(sandbox_id, None)
        if row is not None:
            session = row.session
            places = (self._of_id, session.session_id), (self._of_owner, session.owner)
            for table, key in places:
                table[key].discard(sandbox_id)
                if not table[key]:
                    del table[key]
            self._wake(session.session_id)
        return row

    def _wake(self, session_id: str) -> None:
        for changed in self._waiting.get(session_id, ()):
            changed.set()


class _Quiet:
    """An answer without a value."""

    def __init__(self, answer: Awaitable[object]) -> None:
        self._answer = answer

    def __await__(self) -> Any:
        yield from self._answer.__await__()


async def _check_number(connection: AsyncConnection, session: Session, most: Most) -> None:
    """Refuse a session beyond the limits of its holder, over all gateways."""
    if not any(most):
        return
    # One at a time for each owner, so that two gateways do not both find the last place free.
    lock = text("SELECT pg_advisory_xact_lock(hashtextextended(:owner, 0))")
    await connection.execute(lock, {"owner": f"sessions {session.owner}"})
    here = func.count().filter(_C.tenant == session.spec.tenant)
    query = select(func.count(), here).where(_C.owner == session.owner, _UNENDED)
    found = (await connection.execute(query)).one()
    for count, limit, whose in zip(found, most, ("principal", "tenant"), strict=True):
        if limit and count >= limit:
            raise errors.LimitExceeded(
                f"{whose} has {count} sessions on all gateways; the limit is {limit}",
                hint="destroy some: k8e sandbox sessions, k8e sandbox destroy ID",
            )


def _plain(reason: str) -> str:
    """A text that PostgreSQL accepts."""
    return reason.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def _values(session: Session) -> dict[str, Any]:
    return {
        "session_id": session.session_id,
        "owner": session.owner,
        "tenant": session.spec.tenant,
        "auto": session.auto,
        "phase": session.phase,
        "runtime": session.runtime,
        "sandbox_id": session.sandbox_id,
        "request_id": session.spec.request_id,
        "spec": json.dumps(session.spec.to_json()),
        "created_at": session.created_at,
        "expires_at": session.expires_at,
        "allowed_hosts": json.dumps(session.allowed_hosts),
        "parent": session.parent,
        "deadline": session.deadline,
    }


def _read(row: Any, me: str) -> StoredSession:
    try:
        return StoredSession(
            _session(row, me), row.gateway_id, row.ended_at, row.rebinding, row.ending
        )
    except (errors.K8eError, *errors.UNREADABLE) as error:
        raise errors.StateUnusable(
            f"session {row.session_id} cannot be read: {error}",
            hint="a newer k8e may have made it: update k8e; until then its sandbox goes on running",
        ) from None


def _session(row: Any, me: str) -> Session:
    told = row.expires_at
    if row.gateway_id == me and row.deadline and row.phase != Phase.ENDED:
        told = live.date_of(row.deadline, told)  # only here does this clock mean the same
    return Session(
        session_id=row.session_id,
        owner=row.owner,
        spec=SessionSpec.from_json(json.loads(row.spec), stored=True),
        runtime=row.runtime,
        sandbox_id=row.sandbox_id,
        phase=Phase(row.phase),
        created_at=row.created_at,
        expires_at=told,
        auto=row.auto,
        ended_reason=row.ended_reason,
        allowed_hosts=words_from_json(json.loads(row.allowed_hosts)),
        parent=row.parent,
        deadline=row.deadline,
    )
