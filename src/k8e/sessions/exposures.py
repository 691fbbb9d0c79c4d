"""Store of exposed ports, so that their URLs outlive a gateway: SQLite, for its user alone.

A file of
its own: it holds tokens, which must not be in a table of sessions that others may read.
"""

from __future__ import annotations

import base64
import secrets
from dataclasses import dataclass
from pathlib import Path

from k8e import database

MIGRATIONS = (
    """
    CREATE TABLE exposures (
        session_id  TEXT NOT NULL,
        sandbox_id  TEXT NOT NULL,
        owner       TEXT NOT NULL,
        port        INTEGER NOT NULL,
        host        TEXT NOT NULL,
        address     TEXT NOT NULL,
        listen_port INTEGER NOT NULL,
        token       TEXT NOT NULL,
        started_at  REAL NOT NULL,
        PRIMARY KEY (session_id, port)
    ) STRICT;
    """,
    # Ports exposed before get a random one as well: their visitors need new cookies.
    """
    ALTER TABLE exposures ADD COLUMN cookie_key TEXT NOT NULL DEFAULT '';
    UPDATE exposures SET cookie_key = lower(hex(randomblob(25)));
    """,
)
_COLUMNS = (
    "session_id, sandbox_id, owner, port, host, address, listen_port, token, started_at, cookie_key"
)
TOKEN_BYTES = 25  # 200 bits, 40 letters and digits


def new_token() -> str:
    """A token that a double click selects, and that needs no quoting in a URL."""
    return base64.b32encode(secrets.token_bytes(TOKEN_BYTES)).decode().lower()


@dataclass(frozen=True)
class Exposure:
    """A port of a session's sandbox, and the address where it can be reached."""

    session_id: str
    sandbox_id: str
    """Sessions may follow each other under one id; their sandboxes never do."""
    owner: str
    port: int
    host: str
    """Where in the sandbox its server listens."""
    address: str
    """Where on this machine we listen for it …"""
    listen_port: int
    """… and on which port."""
    token: str
    """What its URL has."""
    started_at: float
    cookie_key: str
    """What its cookies are made with; no cookie tells the token, and no token the cookie."""


class ExposureStore:
    """The exposed ports of one gateway."""

    def __init__(self, path: Path) -> None:
        self._db = database.connect(path, MIGRATIONS, durable=False)

    def close(self) -> None:
        self._db.close()

    def insert(self, exposure: Exposure) -> None:
        self._db.execute(
            f"INSERT INTO exposures ({_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?)",  # noqa: S608 - our constant
            (
                exposure.session_id,
                exposure.sandbox_id,
                exposure.owner,
                exposure.port,
                exposure.host,
                exposure.address,
                exposure.listen_port,
                exposure.token,
                exposure.started_at,
                exposure.cookie_key,
            ),
        )

    def remove(self, exposure: Exposure) -> None:
        self._db.execute(
            "DELETE FROM exposures WHERE session_id=? AND port=?",
            (exposure.session_id, exposure.port),
        )

    def all(self) -> list[Exposure]:
        query = f"SELECT {_COLUMNS} FROM exposures ORDER BY started_at"  # noqa: S608 - our constant
        return [Exposure(*row) for row in self._db.execute(query)]
