"""How children and pauses are written down."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from k8e.model import Phase
from k8e.sessions.store import MIGRATIONS, SqliteSessionStore
from tests.sessions.test_store import BASE, OTHER


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


def test_the_parent_of_a_session_is_kept(path: Path) -> None:
    store = SqliteSessionStore(path)
    store.insert(replace(OTHER, parent="sess-a"))
    store.close()
    again = SqliteSessionStore(path)
    found = again.get("sess-b")
    assert found is not None
    assert found.parent == "sess-a"
    again.close()


def test_a_session_of_a_release_without_children_has_no_parent(path: Path) -> None:
    with sqlite3.connect(path) as database:
        at = next(at for at, script in enumerate(MIGRATIONS) if "COLUMN parent" in script)
        for script in MIGRATIONS[:at]:
            database.executescript(script)
        database.execute(f"PRAGMA user_version={at}")
        database.execute(
            "INSERT INTO sessions (session_id, owner, tenant, auto, phase, runtime, sandbox_id,"
            " request_id, spec, created_at, expires_at)"
            " VALUES ('sess-old', 'me', 't', 0, 'active', 'gvisor', 'sb-old', '', '{}', 1, 2)"
        )
    database.close()
    store = SqliteSessionStore(path)
    found = store.get("sess-old")
    assert found is not None
    assert found.parent == ""
    store.close()


def test_only_an_active_session_is_paused_and_only_a_paused_one_resumed(path: Path) -> None:
    store = SqliteSessionStore(path)
    store.insert(BASE)

    def phase() -> Phase:
        found = store.get("sess-a")
        assert found is not None
        return found.phase

    store.set_phase("sess-a", Phase.PAUSED)
    assert phase() is Phase.CREATING
    store.activate(BASE)
    store.set_phase("sess-a", Phase.PAUSED)
    assert phase() is Phase.PAUSED
    store.activate(BASE)
    assert phase() is Phase.PAUSED
    store.set_phase("sess-a", Phase.ACTIVE)
    assert phase() is Phase.ACTIVE
    store.end("sess-a", "enough", 5.0)
    store.set_phase("sess-a", Phase.PAUSED)
    assert phase() is Phase.ENDED
    store.close()
