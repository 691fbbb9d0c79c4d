"""Tables of the database, as the newest migration leaves them.

Texts that clients choose are JSON inside of text columns, not of JSON columns: PostgreSQL takes no
lone surrogates there, and an environment variable may have some.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Double,
    ForeignKey,
    Identity,
    Index,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    func,
    text,
)

VERSIONS = ("0001", "0002")
"""All schema versions of this release, oldest first; each is a file in ``migrations/versions``."""
METADATA = MetaData()


def _text(name: str) -> Column[str]:
    return Column(name, Text, nullable=False, server_default="")


def _time(name: str) -> Column[float]:
    """Seconds, as Unix time or since a machine started; exact to the microsecond."""
    return Column(name, Double, nullable=False, server_default="0")


GATEWAYS = Table(
    "gateways",
    METADATA,
    Column("gateway_id", Text, primary_key=True),
    _text("name"),
    _text("address"),
    _text("state"),
    _time("lease"),
    Column("seen_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
)
"""One row for each gateway that ever used the database."""

SESSIONS = Table(
    "sessions",
    METADATA,
    Column("sandbox_id", Text, primary_key=True),
    _text("gateway_id"),
    _text("session_id"),
    _text("owner"),
    _text("tenant"),
    Column("auto", Boolean, nullable=False),
    _text("phase"),
    _text("runtime"),
    _text("request_id"),
    _text("spec"),
    _time("created_at"),
    _time("expires_at"),
    _time("ended_at"),
    _text("ended_reason"),
    _text("allowed_hosts"),
    _text("parent"),
    _time("deadline"),
    Column("rebinding", Boolean, nullable=False, server_default="false"),
    _text("ending"),
)
_UNENDED = text("phase <> 'ended'")
Index("one_session", SESSIONS.c.session_id, unique=True, postgresql_where=_UNENDED)
Index(
    "one_auto",
    SESSIONS.c.owner,
    SESSIONS.c.tenant,
    unique=True,
    postgresql_where=text("auto AND phase <> 'ended'"),
)
Index(
    "one_request",
    SESSIONS.c.owner,
    SESSIONS.c.request_id,
    unique=True,
    postgresql_where=text("request_id <> '' AND phase <> 'ended'"),
)
Index("sessions_by_owner", SESSIONS.c.owner, SESSIONS.c.phase, SESSIONS.c.ended_at)
Index("sessions_by_id", SESSIONS.c.session_id)

KEYS = Table(
    "keys",
    METADATA,
    Column("key_id", BigInteger, Identity(always=True), primary_key=True),
    _text("name"),
    Column("hash", LargeBinary, nullable=False, unique=True),
    _text("roles"),
    _time("created_at"),
    _time("expires_at"),
    _time("revoked_at"),
    Column("owner", Text, nullable=False, unique=True),
    Column("max_sessions", BigInteger, nullable=False, server_default="0"),
    _time("rate"),
)
Index("one_name", KEYS.c.name, unique=True, postgresql_where=text("revoked_at = 0"))

CERTIFICATES = Table(
    "certificates",
    METADATA,
    Column("serial", Text, primary_key=True),
    Column(
        "key_id",
        BigInteger,
        ForeignKey("keys.key_id", ondelete="CASCADE"),
        nullable=False,
        index=True,
    ),
    _text("device"),
    _time("issued_at"),
    _time("expires_at"),
    Column("number", BigInteger, Identity(always=True)),
)

APPROVALS = Table(
    "approvals",
    METADATA,
    Column("approval_id", Text, primary_key=True),
    _text("gateway_id"),
    _text("owner"),
    _text("session_id"),
    Column("sandbox_id", Text, nullable=False, index=True),
    _text("action"),
    _text("status"),
    _time("created_at"),
    _time("expires_at"),
    _time("decided_at"),
    Column("advisory", Boolean, nullable=False, server_default="true"),
    _text("reason"),
    Column("number", BigInteger, Identity(always=True)),
)
Index("approvals_by_status", APPROVALS.c.status, APPROVALS.c.created_at)

APPROVER = Table(
    "approver",
    METADATA,
    Column("one", SmallInteger, primary_key=True),
    Column("salt", LargeBinary, nullable=False),
    Column("hash", LargeBinary, nullable=False),
)

CONVERSATIONS = Table(
    "conversations",
    METADATA,
    Column("owner", Text, primary_key=True),
    Column("tenant", Text, primary_key=True),
    Column("conversation_id", Text, primary_key=True),
    _text("user_id"),
    _text("session_id"),
    _text("options"),
    Column("claimed_at", Double, nullable=False, index=True),
)

SIGNING_KEYS = Table(
    "signing_keys",
    METADATA,
    Column("number", BigInteger, Identity(always=True), primary_key=True),
    Column("kid", Text, nullable=False, unique=True),
    Column("secret", LargeBinary, nullable=False),
    _time("made_at"),
    _time("signs_from"),
)

REVOCATIONS = Table(
    "revocations",
    METADATA,
    Column("subject", Text, primary_key=True),
    _time("issued_before"),
    Column("until", Double, nullable=False, index=True),
)
