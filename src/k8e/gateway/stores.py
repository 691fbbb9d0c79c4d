"""The stores of a gateway: SQLite in its data folder, or PostgreSQL where DATABASE_URL is set."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from k8e import errors
from k8e.auth.store import KeyStore, SqliteKeyStore
from k8e.auth.token_store import RevocationStore, SigningKeyStore, SqliteTokenStore
from k8e.database import is_there
from k8e.sessions.approval_store import ApprovalStore, SqliteApprovalStore
from k8e.sessions.conversations import ConversationStore, SqliteConversations
from k8e.sessions.store import SessionStore, SqliteSessionStore
from k8e.settings import Settings

if TYPE_CHECKING:
    from k8e.postgres.stores import PostgresStores


class TokenStore(SigningKeyStore, RevocationStore, Protocol):
    """Signing keys and revocations, as one object."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Stores:
    """The databases in which a gateway keeps its state."""

    sessions: SessionStore
    keys: KeyStore
    approvals: ApprovalStore
    shared: PostgresStores | None = None
    """The database that this gateway shares with others, if it does."""

    def conversations(self, data_dir: Path) -> ConversationStore:
        """The store of conversations; opened when the first one is asked for."""
        if self.shared is not None:
            return self.shared.conversations
        return SqliteConversations(data_dir / "conversations.db")

    def tokens(self, data_dir: Path) -> TokenStore:
        """The store of signing keys and revocations; opened with the first token."""
        if self.shared is not None:
            return self.shared.tokens
        return SqliteTokenStore(data_dir / "tokens.db")

    def describe(self) -> dict[str, Any]:
        """A description of the database for administrators; never its password."""
        if self.shared is None:
            return {}
        known = self.shared.gateways.living()
        return {
            "database": self.shared.engine.describe(),
            "database_reachable": self.shared.engine.reachable,
            "gateway_id": self.shared.engine.gateway_id,
            "gateways": [{"name": item.name, "address": item.address} for item in known],
        }


@contextlib.asynccontextmanager
async def opened(settings: Settings) -> AsyncGenerator[Stores]:
    """The stores of a gateway, open while the block runs."""
    if not settings.database_url:
        with contextlib.ExitStack() as stack:
            sessions = SqliteSessionStore(settings.data_dir / "sessions.db")
            stack.callback(sessions.close)
            approvals = SqliteApprovalStore(settings.data_dir / "approvals.db")
            stack.callback(approvals.close)
            keys = SqliteKeyStore(settings.data_dir / "keys.db")
            stack.callback(keys.close)
            yield Stores(sessions, keys, approvals)
        return
    _refuse_sessions_elsewhere(settings)
    try:
        from k8e.postgres.stores import open_stores
    except ImportError as error:
        raise errors.InvalidRequest(
            f"DATABASE_URL is set, and a part that PostgreSQL needs is missing: {error}",
            hint=errors.install_extra("gateway,postgres"),
        ) from None
    shared = await open_stores(
        settings.database_url, settings.data_dir, lease=settings.gateway_lease
    )
    try:
        yield Stores(shared.sessions, shared.keys, shared.approvals, shared)
    finally:
        await shared.close()


def _refuse_sessions_elsewhere(settings: Settings) -> None:
    """Refuse a database to a gateway whose sessions are in SQLite: there they would be missing."""
    path = settings.data_dir / "sessions.db"
    if not is_there(path):
        return
    try:
        with contextlib.closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        ) as db:
            found = db.execute("SELECT count(*) FROM sessions WHERE phase != 'ended'").fetchone()
    except sqlite3.Error:
        return  # it says nothing of sessions; what runs without one is removed
    if found[0]:
        raise errors.StateUnusable(
            f"{found[0]} sessions of this gateway are in {path}, not in the database of "
            "DATABASE_URL",
            hint="end them first, without DATABASE_URL: k8e gateway stop --destroy",
        )
