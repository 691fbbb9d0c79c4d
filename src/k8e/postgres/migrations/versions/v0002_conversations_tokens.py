"""Conversations, and the signing keys and revocations of their tokens."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"

_TABLES = (
    """
    CREATE TABLE conversations (
        owner           text,
        tenant          text,
        conversation_id text,
        user_id         text NOT NULL DEFAULT '',
        session_id      text NOT NULL DEFAULT '',
        options         text NOT NULL DEFAULT '',
        claimed_at      double precision NOT NULL,
        PRIMARY KEY (owner, tenant, conversation_id)
    )
    """,
    "CREATE INDEX ix_conversations_claimed_at ON conversations (claimed_at)",
    """
    CREATE TABLE signing_keys (
        number     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        kid        text NOT NULL UNIQUE,
        secret     bytea NOT NULL,
        made_at    double precision NOT NULL DEFAULT 0,
        signs_from double precision NOT NULL DEFAULT 0
    )
    """,
    """
    CREATE TABLE revocations (
        subject       text PRIMARY KEY,
        issued_before double precision NOT NULL DEFAULT 0,
        until         double precision NOT NULL
    )
    """,
    "CREATE INDEX ix_revocations_until ON revocations (until)",
)


def upgrade() -> None:
    for statement in _TABLES:
        op.execute(statement)


def downgrade() -> None:
    for table in ("revocations", "signing_keys", "conversations"):
        op.drop_table(table)
