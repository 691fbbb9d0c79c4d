"""Approvals in PostgreSQL: asked for on one gateway, decided on any, used once on one.

Nothing is cached here: texts may be long, and are seldom read. Times are Unix times, as in the
database's rows; a machine's clock since its start means nothing on another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from k8e.postgres.address import is_text
from k8e.postgres.engine import Engine
from k8e.postgres.schema import APPROVALS, APPROVER
from k8e.sessions import live
from k8e.sessions.approval_store import (
    APPROVED,
    PENDING,
    REJECTED,
    USED,
    Approval,
    PendingApproval,
)

SUBJECT = "approvals"
_C = APPROVALS.c


class PostgresApprovalStore:
    """The approvals of all gateways of a database."""

    def __init__(self, engine: Engine) -> None:
        self.on_change: list[Callable[[str], None]] = []
        self._engine = engine
        engine.on_news[SUBJECT] = self._changed

    def _changed(self, approval_id: str) -> None:
        for tell in self.on_change:
            tell(approval_id)

    def close(self) -> None:
        """Do nothing: the code that made the engine closes it."""

    # Reading.

    async def get(self, approval_id: str) -> Approval | None:
        if not is_text(approval_id):
            return None
        found = await self._select(_C.approval_id == approval_id)
        return found[0] if found else None

    async def pending(self, now: float, owner: str = "") -> list[PendingApproval]:
        waiting = and_(_C.status == PENDING, _C.expires_at > _date(now))
        if owner:
            waiting = and_(waiting, _C.owner == owner)
        length = func.char_length(_C.action)
        query = select(_C.approval_id, _C.owner, _C.session_id, _C.sandbox_id, length)
        query = query.where(waiting).order_by(_C.created_at, _C.number)

        async def work(connection: AsyncConnection) -> list[PendingApproval]:
            return [PendingApproval(*row) for row in await connection.execute(query)]

        return await self._engine.run(work)

    async def several(self, approval_ids: Iterable[str]) -> list[Approval]:
        return await self._select(_C.approval_id.in_(list(approval_ids)))

    async def count_pending(self, sandbox_id: str, now: float) -> int:
        waiting = and_(_C.status == PENDING, _C.expires_at > _date(now))
        return await self._count(and_(_C.sandbox_id == sandbox_id, waiting))

    async def count(self, sandbox_id: str) -> int:
        return await self._count(_C.sandbox_id == sandbox_id)

    async def _count(self, which: ColumnElement[bool]) -> int:
        query = select(func.count()).select_from(APPROVALS).where(which)

        async def work(connection: AsyncConnection) -> int:
            return int((await connection.execute(query)).scalar_one())

        return await self._engine.run(work)

    async def sandboxes(self) -> list[str]:
        query = select(_C.sandbox_id).where(_C.gateway_id == self._engine.gateway_id).distinct()

        async def work(connection: AsyncConnection) -> list[str]:
            return [str(row[0]) for row in await connection.execute(query)]

        return await self._engine.run(work)

    async def _select(self, which: ColumnElement[bool]) -> list[Approval]:
        query = select(APPROVALS).where(which).order_by(_C.created_at, _C.number)

        async def work(connection: AsyncConnection) -> list[Approval]:
            return [_approval(row) for row in await connection.execute(query)]

        return await self._engine.run(work)

    # Writing.

    async def insert(self, approval: Approval) -> None:
        values = {
            "approval_id": approval.approval_id,
            "gateway_id": self._engine.gateway_id,
            "owner": approval.owner,
            "session_id": approval.session_id,
            "sandbox_id": approval.sandbox_id,
            "action": approval.action,
            "status": approval.status,
            "created_at": approval.created_at,
            "expires_at": approval.expires_at,
        }
        made = insert(APPROVALS).values(**values).on_conflict_do_nothing()

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(made)

        await self._engine.run(work)

    async def decide(self, approval: Approval, now: float) -> bool:
        open_yet = and_(
            _C.approval_id == approval.approval_id,
            _C.status == PENDING,
            _C.expires_at > _date(now),
        )
        return await self._swap(
            approval.approval_id,
            open_yet,
            status=approval.status,
            decided_at=approval.decided_at,
            advisory=approval.advisory,
            reason=approval.reason,
        )

    async def use(self, approval_id: str, now: float) -> bool:
        given = and_(
            _C.approval_id == approval_id, _C.status == APPROVED, _C.expires_at > _date(now)
        )
        return await self._swap(approval_id, given, status=USED)

    async def _swap(self, approval_id: str, which: ColumnElement[bool], **values: Any) -> bool:
        change = update(APPROVALS).where(which).values(**values)

        async def work(connection: AsyncConnection) -> bool:
            done = await connection.execute(change)
            await self._engine.tell(connection, SUBJECT, approval_id)
            return done.rowcount == 1

        return await self._engine.run(work)

    async def forget_oldest(self, sandbox_id: str, now: float, how_many: int) -> None:
        over = or_(_C.status.in_((USED, REJECTED)), _C.expires_at <= _date(now))
        oldest = select(_C.approval_id).where(_C.sandbox_id == sandbox_id, over)
        oldest = oldest.order_by(_C.created_at).limit(how_many)
        await self._delete(_C.approval_id.in_(oldest))

    async def forget(self, before: float) -> None:
        await self._delete(_C.expires_at < _date(before))

    async def _delete(self, which: ColumnElement[bool]) -> None:
        async def work(connection: AsyncConnection) -> None:
            await connection.execute(delete(APPROVALS).where(which))

        await self._engine.run(work)

    def forget_sandbox(self, sandbox_id: str) -> Any:
        async def work(connection: AsyncConnection) -> None:
            gone = delete(APPROVALS).where(_C.sandbox_id == sandbox_id)
            for row in await connection.execute(gone.returning(_C.approval_id)):
                await self._engine.tell(connection, SUBJECT, row[0])

        return self._engine.write(work, kept=True)

    # The approver's secret, as a salted hash.

    async def approver(self) -> tuple[bytes, bytes] | None:
        async def work(connection: AsyncConnection) -> tuple[bytes, bytes] | None:
            row = (await connection.execute(select(APPROVER.c.salt, APPROVER.c.hash))).first()
            return None if row is None else (bytes(row[0]), bytes(row[1]))

        return await self._engine.run(work)

    async def set_approver(self, salt: bytes, digest: bytes) -> None:
        made = insert(APPROVER).values(one=1, salt=salt, hash=digest)
        made = made.on_conflict_do_update(
            index_elements=["one"], set_={"salt": salt, "hash": digest}
        )

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(made)

        await self._engine.run(work)


def _date(boot_time: float) -> float:
    """The date of a moment on the clock of this machine's run."""
    return boot_time - live.boot_offset()


def _approval(row: Any) -> Approval:
    return Approval(
        approval_id=row.approval_id,
        owner=row.owner,
        session_id=row.session_id,
        sandbox_id=row.sandbox_id,
        action=row.action,
        status=row.status,
        created_at=row.created_at,
        expires_at=row.expires_at,
        deadline=row.expires_at + live.boot_offset(),
        decided_at=row.decided_at,
        advisory=row.advisory,
        reason=row.reason,
    )
