"""Conversations: each has one sandbox at a time, however often its clients ask for it.

A conversation belongs to a tenant of an owner. Its row names the session that is meant to be its
sandbox, and is written before that session is made: so of twenty concurrent requests, over any
number of gateways, one chooses the session and the others join it. A session has the names of its
conversation in its labels, so that showing a session needs no look-up.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from k8e import database, errors
from k8e.model import (
    CONVERSATION_NAME,
    MAX_CONVERSATION_NAME,
    Phase,
    Session,
    check_tenant,
    new_id,
)

CONVERSATION_LABEL, USER_LABEL = "k8e/conversation", "k8e/user"
"""Labels of a session that is the sandbox of a conversation."""
OF_ONE_SANDBOX = (CONVERSATION_LABEL, USER_LABEL)
"""Labels that a sub-agent does not get from its parent."""
KEEP_SECONDS = 30 * 24 * 3600.0
"""How long a conversation without a sandbox is remembered."""
SWEEP_EVERY = 256  # claims, between two searches for conversations that can be forgotten
SWEPT = 512  # of them that are examined at once
MAX_SWAPS = 8
"""Attempts to give a conversation another session: each fails because another caller's did not."""
_NAME = re.compile(CONVERSATION_NAME)

MIGRATIONS = (
    """
    CREATE TABLE conversations (
        owner           TEXT NOT NULL,
        tenant          TEXT NOT NULL,
        conversation_id TEXT NOT NULL,
        user_id         TEXT NOT NULL,
        session_id      TEXT NOT NULL,
        options         TEXT NOT NULL,
        claimed_at      REAL NOT NULL,
        PRIMARY KEY (owner, tenant, conversation_id)
    ) STRICT;
    CREATE INDEX by_age ON conversations (claimed_at);
    """,
)
_COLUMNS = "owner, tenant, conversation_id, user_id, session_id, options, claimed_at"


@dataclass(frozen=True)
class Conversation:
    """A conversation, and the session that is its sandbox or will be."""

    owner: str
    tenant: str
    conversation_id: str
    user_id: str
    session_id: str
    options: str = ""
    """A digest of what its sandbox was asked to be like; empty if nothing was said about that."""
    claimed_at: float = 0
    """When it got this session, as Unix time."""


class ConversationStore(Protocol):
    """The store of conversations, shared by all gateways that use one database."""

    async def claim(self, wanted: Conversation, instead_of: str = "") -> Conversation:
        """Give a conversation its session, in one step; return the row that won.

        With ``instead_of``, only in the place of that session; without, only where there is no
        row. A caller that gets a row with another session than the wanted one came too late.
        """
        ...

    async def find(self, owner: str, tenant: str, conversation_id: str) -> Conversation | None: ...

    async def oldest(self, before: float, limit: int) -> list[Conversation]:
        """Conversations that got their session before a date, the oldest first."""
        ...

    async def remove(self, known: Conversation) -> None:
        """Forget a conversation, unless it has got another session meanwhile."""
        ...

    async def evict(self, owner: str) -> None:
        """Forget all conversations of an owner that was removed."""
        ...

    def close(self) -> None: ...


class SqliteConversations:
    """Conversations of one gateway, in a file of the data folder."""

    def __init__(self, path: Path) -> None:
        self._db = database.connect(path, MIGRATIONS, durable=False)

    def close(self) -> None:
        self._db.close()

    async def claim(self, wanted: Conversation, instead_of: str = "") -> Conversation:
        values = (
            wanted.owner,
            wanted.tenant,
            wanted.conversation_id,
            wanted.user_id,
            wanted.session_id,
            wanted.options,
            wanted.claimed_at,
        )
        if instead_of:
            self._db.execute(
                "UPDATE conversations SET user_id=?, session_id=?, options=?, claimed_at=?"
                " WHERE owner=? AND tenant=? AND conversation_id=? AND session_id=?",
                (*values[3:], *values[:3], instead_of),
            )
        else:
            self._db.execute(
                f"INSERT INTO conversations ({_COLUMNS}) VALUES (?,?,?,?,?,?,?)"  # noqa: S608 - our constants
                " ON CONFLICT DO NOTHING",
                values,
            )
        found = await self.find(*values[:3])
        return found if found is not None else await self.claim(wanted)

    async def find(self, owner: str, tenant: str, conversation_id: str) -> Conversation | None:
        found = self._select(
            "owner=? AND tenant=? AND conversation_id=?", owner, tenant, conversation_id
        )
        return found[0] if found else None

    async def oldest(self, before: float, limit: int) -> list[Conversation]:
        return self._select("claimed_at < ? ORDER BY claimed_at LIMIT ?", before, limit)

    async def remove(self, known: Conversation) -> None:
        self._db.execute(
            "DELETE FROM conversations WHERE owner=? AND tenant=? AND conversation_id=?"
            " AND session_id=?",
            (known.owner, known.tenant, known.conversation_id, known.session_id),
        )

    async def evict(self, owner: str) -> None:
        self._db.execute("DELETE FROM conversations WHERE owner=?", (owner,))

    def _select(self, condition: str, *values: Any) -> list[Conversation]:
        if not database.is_text(*values):
            return []
        query = f"SELECT {_COLUMNS} FROM conversations WHERE {condition}"  # noqa: S608 - our constants
        return [Conversation(*row) for row in self._db.execute(query, values)]


def check_name(value: str, what: str) -> str:
    """Return ``value`` if it can be the id of a conversation or a user."""
    if len(value) > MAX_CONVERSATION_NAME or not _NAME.fullmatch(value):
        raise errors.InvalidRequest(
            f"{what} {value[:80]!r} cannot be used",
            hint=f"use 1 to {MAX_CONVERSATION_NAME} letters, digits and . _ : @ + = ~ -, and begin "
            "with a letter or digit",
        )
    return value


class Conversations:
    """The rules that decide which session is a conversation's sandbox."""

    def __init__(
        self, store: ConversationStore, find: Callable[[str, str], Session | None]
    ) -> None:
        """``find`` gives the newest session that has an id and an owner, ended or not."""
        self._store = store
        self._find = find
        self._claims = 0

    async def session_id(
        self, owner: str, tenant: str, conversation_id: str, user_id: str, options: str = ""
    ) -> str:
        """The id of the conversation's session, which may still have to be made.

        Raises:
            Conflict: the conversation has a sandbox that is another user's, or was asked to be
                different.
        """
        check_tenant(tenant)
        check_name(conversation_id, "the conversation_id")
        check_name(user_id, "the user_id")
        await self._sweep()
        instead_of = ""
        for _ in range(MAX_SWAPS):
            mine = new_id("sess")
            wanted = Conversation(
                owner, tenant, conversation_id, user_id, mine, options, time.time()
            )
            found = await self._store.claim(wanted, instead_of)
            if found.session_id == mine:
                return mine
            if not self._is_over(found):
                _check_same(found, user_id, options)
                return found.session_id
            instead_of = found.session_id
        raise errors.Conflict(
            f"conversation {conversation_id} changes too quickly", hint="try again"
        )

    async def let_go(self, owner: str, tenant: str, conversation_id: str, session_id: str) -> None:
        """Forget which session a conversation has, since it could not be made."""
        known = await self._store.find(owner, tenant, conversation_id)
        meant = known is not None and known.session_id == session_id
        if known is not None and meant and self._find(session_id, owner) is None:
            await self._store.remove(known)

    async def holds(
        self, owner: str, tenant: str, conversation_id: str, user_id: str, options: str, made: str
    ) -> bool:
        """Whether a session that was just made is the conversation's sandbox.

        Another caller may have failed to make it, and have let it go meanwhile.
        """
        wanted = Conversation(owner, tenant, conversation_id, user_id, made, options, time.time())
        return (await self._store.claim(wanted)).session_id == made

    def _is_over(self, known: Conversation) -> bool:
        """Whether its session has ended. One that cannot be found is still to be made."""
        session = self._find(known.session_id, known.owner)
        return session is not None and session.phase is Phase.ENDED

    async def _sweep(self) -> None:
        self._claims += 1
        if self._claims % SWEEP_EVERY != 1:
            return
        for known in await self._store.oldest(time.time() - KEEP_SECONDS, SWEPT):
            session = self._find(known.session_id, known.owner)
            if session is None or session.phase is Phase.ENDED:
                await self._store.remove(known)

    async def evict(self, owner: str) -> None:
        """Forget the conversations of an owner that was removed."""
        await self._store.evict(owner)

    def close(self) -> None:
        self._store.close()


def _check_same(known: Conversation, user_id: str, options: str) -> None:
    if known.user_id != user_id:
        raise errors.Conflict(
            f"conversation {known.conversation_id} has a sandbox, which is another user's",
            hint="a sandbox is one user's alone: use another conversation_id, or destroy that one",
        )
    if options and options != known.options:
        raise errors.Conflict(
            f"conversation {known.conversation_id} has a sandbox that was asked to be different",
            hint="leave the options out to get that one, or destroy it first",
        )
