"""Conversations in PostgreSQL: of all gateways that ask at once, one chooses the session."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, and_, delete, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from k8e.postgres.address import is_text
from k8e.postgres.engine import Engine
from k8e.postgres.schema import CONVERSATIONS
from k8e.sessions.conversations import Conversation

_C = CONVERSATIONS.c


class PostgresConversations:
    """The conversations of all gateways of a database."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def close(self) -> None:
        """Do nothing: the code that made the engine closes it."""

    async def claim(self, wanted: Conversation, instead_of: str = "") -> Conversation:
        chosen = {
            "user_id": wanted.user_id,
            "session_id": wanted.session_id,
            "options": wanted.options,
            "claimed_at": wanted.claimed_at,
        }
        named = {
            "owner": wanted.owner,
            "tenant": wanted.tenant,
            "conversation_id": wanted.conversation_id,
        }
        same = _named(*named.values())

        async def work(connection: AsyncConnection) -> Conversation | None:
            if instead_of:
                swap = update(CONVERSATIONS).where(same, _C.session_id == instead_of)
                await connection.execute(swap.values(**chosen))
            else:
                made = insert(CONVERSATIONS).values(**named, **chosen)
                await connection.execute(made.on_conflict_do_nothing())
            return await _one(connection, same)

        found = await self._engine.run(work)
        return found if found is not None else await self.claim(wanted)

    async def find(self, owner: str, tenant: str, conversation_id: str) -> Conversation | None:
        if not is_text(owner, tenant, conversation_id):
            return None
        same = _named(owner, tenant, conversation_id)
        return await self._engine.run(lambda connection: _one(connection, same))

    async def oldest(self, before: float, limit: int) -> list[Conversation]:
        query = select(CONVERSATIONS).where(_C.claimed_at < before)
        query = query.order_by(_C.claimed_at).limit(limit)

        async def work(connection: AsyncConnection) -> list[Conversation]:
            return [Conversation(*row) for row in await connection.execute(query)]

        return await self._engine.run(work)

    async def remove(self, known: Conversation) -> None:
        same = _named(known.owner, known.tenant, known.conversation_id)
        await self._delete(and_(same, _C.session_id == known.session_id))

    async def evict(self, owner: str) -> None:
        await self._delete(_C.owner == owner)

    async def _delete(self, which: ColumnElement[bool]) -> None:
        async def work(connection: AsyncConnection) -> None:
            await connection.execute(delete(CONVERSATIONS).where(which))

        await self._engine.run(work)


def _named(*names: Any) -> ColumnElement[bool]:
    owner, tenant, conversation_id = names
    return and_(_C.owner == owner, _C.tenant == tenant, _C.conversation_id == conversation_id)


async def _one(connection: AsyncConnection, which: ColumnElement[bool]) -> Conversation | None:
    row = (await connection.execute(select(CONVERSATIONS).where(which))).first()
    return None if row is None else Conversation(*row)
