"""Where sessions are written down."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from k8e import errors
from k8e.model import Phase, Session, SessionSpec
from k8e.sessions import store as stores
from k8e.sessions.store import MIGRATIONS, SqliteSessionStore

BASE = Session(
    session_id="sess-a",
    owner="me",
    spec=SessionSpec(tenant="t", request_id="once", env={"A": "\udcff"}, labels={"x": "y"}),
    runtime="gvisor",
    sandbox_id="sb-a",
    phase=Phase.CREATING,
    created_at=1000.5,
    expires_at=2000.5,
    auto=True,
)
OTHER = replace(BASE, session_id="sess-b", sandbox_id="sb-b", auto=False, spec=SessionSpec())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


def test_a_session_survives_closing_and_opening(path: Path) -> None:
    store = SqliteSessionStore(path)
    store.insert(BASE)
    active = store.activate(BASE).value
    store.close()
    again = SqliteSessionStore(path)
    assert again.get("sess-a") == active == replace(BASE, phase=Phase.ACTIVE)
    assert again.get("sess-x") is None
    again.close()


def test_the_database_is_closed_to_others(path: Path) -> None:
    SqliteSessionStore(path).close()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "clashing",
    [
        replace(OTHER, session_id="sess-a"),
        replace(OTHER, sandbox_id="sb-a"),
        replace(OTHER, spec=SessionSpec(request_id="once")),
        replace(OTHER, spec=SessionSpec(tenant="t"), auto=True),
    ],
    ids=["id", "sandbox", "request", "auto"],
)
def test_what_must_be_unique_is_a_conflict(path: Path, clashing: Session) -> None:
    store = SqliteSessionStore(path)
    store.insert(BASE)
    with pytest.raises(errors.Conflict):
        store.insert(clashing)
    assert len(store.unended()) == 1
    store.close()


def test_an_ended_session_frees_its_request_and_its_auto_place(path: Path) -> None:
    store = SqliteSessionStore(path)
    store.insert(BASE)
    store.end("sess-a", "because", 1500.0)
    store.insert(replace(BASE, session_id="sess-b", sandbox_id="sb-b"))
    found = store.find_request("me", "once")
    assert found is not None
    assert found.session_id == "sess-b"
    assert [item.session_id for item in store.unended()] == ["sess-b"]
    store.close()


def test_the_first_reason_of_an_end_stays(path: Path) -> None:
    store = SqliteSessionStore(path)
    store.insert(BASE)
    store.end("sess-a", "first", 1.0)
    store.end("sess-a", "second", 2.0)
    found = store.get("sess-a")
    assert found is not None
    assert (found.phase, found.ended_reason) == (Phase.ENDED, "first")
    store.close()


def test_an_ended_session_is_not_activated(path: Path) -> None:
    store = SqliteSessionStore(path)
    store.insert(BASE)
    store.end("sess-a", "given up", 1.0)
    store.activate(BASE)
    assert store.unended() == []
    store.close()


def test_old_ends_are_forgotten_and_new_ones_kept(path: Path) -> None:
    store = SqliteSessionStore(path)
    store.insert(BASE)
    store.insert(OTHER)
    store.end("sess-a", "x", 100.0)
    store.end("sess-b", "x", 200.0)
    store.forget_ended(150.0)
    assert [item.session_id for item in store.of_owner("me", ended=True)] == ["sess-b"]
    store.close()


def test_times_are_kept(path: Path) -> None:
    store = SqliteSessionStore(path)
    store.insert(BASE)
    store.extend("sess-a", 9999.5, 0)
    assert store.get("sess-a") == replace(BASE, expires_at=9999.5)
    store.close()


def test_every_migration_is_applied_once_and_counted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = SqliteSessionStore(path)
    first.insert(BASE)
    first.close()
    added = "ALTER TABLE sessions ADD COLUMN colour TEXT NOT NULL DEFAULT 'red'"
    monkeypatch.setattr(stores, "MIGRATIONS", (*MIGRATIONS, added))
    for _ in range(2):
        store = SqliteSessionStore(path)
        assert store.get("sess-a") == BASE
        store.close()
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA user_version").fetchone()[0] == len(MIGRATIONS) + 1
        assert database.execute("SELECT colour FROM sessions").fetchall() == [("red",)]
    database.close()


def test_a_migration_that_fails_changes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SqliteSessionStore(path).close()
    broken = "CREATE TABLE half (x INTEGER); SELECT nonsense FROM nowhere"
    monkeypatch.setattr(stores, "MIGRATIONS", (*MIGRATIONS, broken))
    with pytest.raises(errors.StateUnusable, match="no such table"):
        SqliteSessionStore(path)
    monkeypatch.undo()
    SqliteSessionStore(path).close()
    with sqlite3.connect(path) as database:
        tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master")}
    database.close()
    assert "half" not in tables


def test_a_database_of_a_newer_release_is_refused_with_advice(path: Path) -> None:
    SqliteSessionStore(path).close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 999")
    database.close()
    with pytest.raises(errors.StateUnusable, match="newer k8e") as caught:
        SqliteSessionStore(path)
    assert "K8E_DATA_DIR" in caught.value.hint


@pytest.mark.parametrize("name", ["\udcff", "x\ud800", "'; DROP TABLE sessions; --", "\0"])
def test_a_strange_name_is_simply_not_there(path: Path, name: str) -> None:
    store = SqliteSessionStore(path)
    assert store.get(name) is None
    assert store.find_request("me", name) is None
    assert store.of_owner(name) == []
    store.close()


def test_a_request_id_that_is_no_text_is_refused_before_it_gets_here() -> None:
    with pytest.raises(errors.InvalidRequest):
        SessionSpec(request_id="bad-\udcff")


def test_so_many_ended_sessions_of_one_owner_and_of_all_are_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "MAX_ENDED_EACH", 3)
    monkeypatch.setattr(stores, "MAX_ENDED", 5)
    monkeypatch.setattr(stores, "ENDS_BETWEEN", 1)
    store = SqliteSessionStore(path)
    forgotten: list[str] = []
    store.on_forget.append(forgotten.append)
    for number in range(12):
        owner = "me" if number % 2 else f"other-{number}"
        ids = {"session_id": f"s{number}", "sandbox_id": f"sb-{number}"}
        store.insert(replace(OTHER, owner=owner, **ids))
        store.end(f"s{number}", "over", 100.0 + number)
        store.forget_ended(50.0, owner)
    assert store.sandboxes("me") == ["sb-7", "sb-9", "sb-11"]
    assert sorted(store.sandboxes()) == ["sb-10", "sb-11", "sb-7", "sb-8", "sb-9"]
    assert len(forgotten) == 7
    store.close()


def test_the_end_of_a_session_stays_cheap_though_thousands_have_ended(path: Path) -> None:
    store = SqliteSessionStore(path)
    plans = [
        "DELETE FROM sessions WHERE phase='ended' AND ended_at < 1",
        "SELECT ended_at FROM sessions WHERE phase='ended' AND owner='me' ORDER BY ended_at DESC",
    ]
    for plan in plans:
        told = str([row[3] for row in store._db.execute(f"EXPLAIN QUERY PLAN {plan}")])  # pyright: ignore[reportPrivateUsage]
        assert "USING" in told, "an index"
        assert "TEMP B-TREE" not in told
    store.close()
