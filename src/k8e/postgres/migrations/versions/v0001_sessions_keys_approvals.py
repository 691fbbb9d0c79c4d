"""Gateways, sessions, keys, certificates and approvals."""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None

_TABLES = (
    """
    CREATE TABLE gateways (
        gateway_id text PRIMARY KEY,
        name       text NOT NULL DEFAULT '',
        address    text NOT NULL DEFAULT '',
        state      text NOT NULL DEFAULT '',
        lease      double precision NOT NULL DEFAULT 0,
        seen_at    timestamptz NOT NULL DEFAULT now()
    )
    """,
    """
    CREATE TABLE sessions (
        sandbox_id    text PRIMARY KEY,
        gateway_id    text NOT NULL DEFAULT '',
        session_id    text NOT NULL DEFAULT '',
        owner         text NOT NULL DEFAULT '',
        tenant        text NOT NULL DEFAULT '',
        auto          boolean NOT NULL,
        phase         text NOT NULL DEFAULT '',
        runtime       text NOT NULL DEFAULT '',
        request_id    text NOT NULL DEFAULT '',
        spec          text NOT NULL DEFAULT '',
        created_at    double precision NOT NULL DEFAULT 0,
        expires_at    double precision NOT NULL DEFAULT 0,
        ended_at      double precision NOT NULL DEFAULT 0,
        ended_reason  text NOT NULL DEFAULT '',
        allowed_hosts text NOT NULL DEFAULT '',
        parent        text NOT NULL DEFAULT '',
        deadline      double precision NOT NULL DEFAULT 0,
        rebinding     boolean NOT NULL DEFAULT false,
        ending        text NOT NULL DEFAULT ''
    )
    """,
    "CREATE UNIQUE INDEX one_session ON sessions (session_id) WHERE phase <> 'ended'",
    "CREATE UNIQUE INDEX one_auto ON sessions (owner, tenant) WHERE auto AND phase <> 'ended'",
    """
    CREATE UNIQUE INDEX one_request ON sessions (owner, request_id)
        WHERE request_id <> '' AND phase <> 'ended'
    """,
    "CREATE INDEX sessions_by_owner ON sessions (owner, phase, ended_at)",
    "CREATE INDEX sessions_by_id ON sessions (session_id)",
    """
    CREATE TABLE keys (
        key_id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        name         text NOT NULL DEFAULT '',
        hash         bytea NOT NULL UNIQUE,
        roles        text NOT NULL DEFAULT '',
        created_at   double precision NOT NULL DEFAULT 0,
        expires_at   double precision NOT NULL DEFAULT 0,
        revoked_at   double precision NOT NULL DEFAULT 0,
        owner        text NOT NULL UNIQUE,
        max_sessions bigint NOT NULL DEFAULT 0,
        rate         double precision NOT NULL DEFAULT 0
    )
    """,
    "CREATE UNIQUE INDEX one_name ON keys (name) WHERE revoked_at = 0",
    """
    CREATE TABLE certificates (
        serial     text PRIMARY KEY,
        key_id     bigint NOT NULL REFERENCES keys (key_id) ON DELETE CASCADE,
        device     text NOT NULL DEFAULT '',
        issued_at  double precision NOT NULL DEFAULT 0,
        expires_at double precision NOT NULL DEFAULT 0,
        number     bigint GENERATED ALWAYS AS IDENTITY
    )
    """,
    "CREATE INDEX ix_certificates_key_id ON certificates (key_id)",
    """
    CREATE TABLE approvals (
        approval_id text PRIMARY KEY,
        gateway_id  text NOT NULL DEFAULT '',
        owner       text NOT NULL DEFAULT '',
        session_id  text NOT NULL DEFAULT '',
        sandbox_id  text NOT NULL,
        action      text NOT NULL DEFAULT '',
        status      text NOT NULL DEFAULT '',
        created_at  double precision NOT NULL DEFAULT 0,
        expires_at  double precision NOT NULL DEFAULT 0,
        decided_at  double precision NOT NULL DEFAULT 0,
        advisory    boolean NOT NULL DEFAULT true,
        reason      text NOT NULL DEFAULT '',
        number      bigint GENERATED ALWAYS AS IDENTITY
    )
    """,
    "CREATE INDEX ix_approvals_sandbox_id ON approvals (sandbox_id)",
    "CREATE INDEX approvals_by_status ON approvals (status, created_at)",
    """
    CREATE TABLE approver (
        one  smallint PRIMARY KEY,
        salt bytea NOT NULL,
        hash bytea NOT NULL
    )
    """,
)


def upgrade() -> None:
    for statement in _TABLES:
        op.execute(statement)


def downgrade() -> None:
    for table in ("approver", "approvals", "certificates", "keys", "sessions", "gateways"):
        op.drop_table(table)
