"""``python tests/state/make.py``: write down what today's databases look like, for later releases.

Run it before you add a migration: it makes ``fixtures/NAME-VERSION.sql`` for each database whose
present version has none yet, by the code of this release. What is there is never changed.
"""

from __future__ import annotations

import contextlib
import sqlite3
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"
NOW = 1_790_000_000.0
SECRETS_KEY = bytes(range(32))


def make_sessions(path: Path) -> None:
    from dataclasses import replace

    from k8e.model import Limits, Phase, Session, SessionSpec
    from k8e.sessions.store import SqliteSessionStore

    spec = SessionSpec(
        tenant="team",
        request_id="once",
        env={"COLOUR": "red"},
        labels={"a": "b"},
        limits=Limits(cpus=0.5, memory=64 << 20, pids=30, disk=16 << 20),
        lifetime=3600,
        idle_timeout=600,
    )
    base = Session(
        "live", "local", spec, "gvisor", "sb-live", Phase.CREATING, NOW, NOW + 3600, True
    )
    over = replace(base, session_id="over", sandbox_id="sb-over", auto=False, spec=SessionSpec())
    half = replace(over, session_id="half", sandbox_id="sb-half")
    store = SqliteSessionStore(path)
    for session in (base, over, half):
        store.insert(session)
    store.activate(base)
    store.end("over", "destroyed by its owner", NOW + 5)
    if hasattr(store, "allow"):
        store.allow(base, ("example.com", "*.example.org:443"))
    store.close()


def make_approvals(path: Path) -> None:
    from k8e.sessions.approval_store import Approval, SqliteApprovalStore

    store = SqliteApprovalStore(path)
    words = ("local", "live", "sb-live", "rm -r /workspace", "pending")
    store.insert(Approval("approval-1", *words, NOW, NOW + 600, NOW))
    store.set_approver(b"salt", b"hash")
    store.close()


def make_conversations(path: Path) -> None:
    import asyncio

    from k8e.sessions.conversations import Conversation, SqliteConversations

    store = SqliteConversations(path)
    asyncio.run(store.claim(Conversation("local", "team", "c-1", "ann", "live", "", NOW)))
    store.close()


def make_exposures(path: Path) -> None:
    from k8e.sessions.exposures import Exposure, ExposureStore

    store = ExposureStore(path)
    place = (8000, "localhost", "127.9.8.7", 700)
    store.insert(Exposure("live", "sb-live", "local", *place, "a" * 40, NOW, "c" * 40))
    store.close()


def make_keys(path: Path) -> None:
    from k8e.auth.store import Key, SqliteKeyStore
    from k8e.model import Role

    store = SqliteKeyStore(path)
    key = store.insert(Key(0, "ci", frozenset({Role.AGENT}), NOW, 0), b"digest").value
    store.add_certificate("01ab", key.key_id, "laptop", NOW, NOW + 1000)
    store.close()


def make_snapshots(path: Path) -> None:
    from k8e.sessions.snapshots import Snapshot, SqliteSnapshotStore

    store = SqliteSnapshotStore(path)
    told = (3, 10240, "sha256:00", "live", ("sha256:00",), "blob-1")
    store.insert(Snapshot("local", "base", NOW, *told), replace=False)
    store.close()


def make_secrets(path: Path) -> None:
    """With a key that everybody knows, :data:`SECRETS_KEY`."""
    import asyncio

    from k8e.sessions.secrets import Secrets

    with tempfile.NamedTemporaryFile() as key:
        key.write(SECRETS_KEY)
        key.flush()
        store = Secrets(path.parent, key.name)
        asyncio.run(store.set("local", "team", "github", "value", "a token"))
        store.close()
    (path.parent / "secrets.db").rename(path)


def make_templates(path: Path) -> None:
    from k8e.sessions.templates import TemplateStore

    store = TemplateStore(path)
    store.put("small", {"name": "small", "limits": {"pids": 20}}, "local")
    store.close()


def make_tokens(path: Path) -> None:
    import asyncio

    from k8e.auth.token_store import SigningKey, SqliteTokenStore

    store = SqliteTokenStore(path)
    asyncio.run(store.add(SigningKey("kid-1", bytes(range(32)), NOW, NOW + 900), ""))
    asyncio.run(store.revoke("sandbox live", issued_before=NOW + 10, until=NOW + 4000))
    store.close()


MAKERS: dict[str, Callable[[Path], None]] = {
    "sessions": make_sessions,
    "approvals": make_approvals,
    "conversations": make_conversations,
    "exposures": make_exposures,
    "keys": make_keys,
    "secrets": make_secrets,
    "snapshots": make_snapshots,
    "templates": make_templates,
    "tokens": make_tokens,
}


def dump(path: Path) -> tuple[int, str]:
    """The version of a database, and its content as text."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        version = int(database.execute("PRAGMA user_version").fetchone()[0])
        lines = [*database.iterdump(), f"PRAGMA user_version={version};"]
    return version, "\n".join(lines) + "\n"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        for name, make in MAKERS.items():
            path = Path(folder, f"{name}.db")
            try:
                make(path)
            except ImportError:
                continue  # a release that had none of these
            version, text = dump(path)
            fixture = FIXTURES / f"{name}-{version}.sql"
            if not fixture.exists():
                fixture.write_text(text, "utf-8")
                print(fixture.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
