"""What older and newer releases wrote down, and what no release ever did."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from k8e import database, errors
from k8e.auth.store import Key, SqliteKeyStore
from k8e.auth.token_store import SqliteTokenStore
from k8e.egress.policy import parse_policy
from k8e.egress.records import NetworkRecords
from k8e.gateway import state
from k8e.model import Limits, Phase, Role, SecretRef
from k8e.runtimes.host import FORMAT, SandboxRecord
from k8e.sessions import live
from k8e.sessions.approval_store import SqliteApprovalStore
from k8e.sessions.conversations import SqliteConversations
from k8e.sessions.exposures import ExposureStore
from k8e.sessions.secrets import Secrets
from k8e.sessions.snapshots import SqliteSnapshotStore
from k8e.sessions.store import SqliteSessionStore
from k8e.sessions.templates import TemplateStore
from tests.state import make

VERSIONS = sorted(path.stem.rpartition("-")[::2] for path in make.FIXTURES.glob("*.sql"))
LIMITS = Limits(cpus=0.5, memory=64 << 20, pids=30, disk=16 << 20)


def restore(name: str, version: str, folder: Path) -> Path:
    """A database as a release of old left it."""
    path = folder / f"{name}.db"
    with contextlib.closing(sqlite3.connect(path)) as made:
        made.executescript((make.FIXTURES / f"{name}-{version}.sql").read_text("utf-8"))
    return path


def schema(path: Path) -> list[str]:
    """How the tables of a database are made, whatever is in them."""
    with contextlib.closing(sqlite3.connect(path)) as found:
        query = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name"
        return [f"{name}: {' '.join(sql.split())}" for name, sql in found.execute(query)]


@pytest.mark.parametrize("name", make.MAKERS)
def test_the_newest_schema_is_written_down_and_is_still_what_it_was(
    name: str, tmp_path: Path
) -> None:
    today = tmp_path / "today.db"
    make.MAKERS[name](today)
    version, _ = make.dump(today)
    missing = "run tests/state/make.py: this version of the database is not written down"
    assert (name, str(version)) in VERSIONS, missing
    changed = "a migration that may be out there was changed: add another one instead"
    assert schema(today) == schema(restore(name, str(version), tmp_path)), changed


def check_sessions(path: Path) -> None:
    store = SqliteSessionStore(path)
    live, over, half = (store.get(name) for name in ("live", "over", "half"))
    assert live is not None
    assert over is not None
    assert half is not None
    assert [item.phase for item in (live, over, half)] == [
        Phase.ACTIVE,
        Phase.ENDED,
        Phase.CREATING,
    ]
    assert (live.owner, live.spec.tenant, live.auto) == ("local", "team", True)
    assert (live.spec.limits, live.spec.env) == (LIMITS, {"COLOUR": "red"})
    assert live.expires_at == make.NOW + 3600
    assert over.ended_reason == "destroyed by its owner"
    assert store.find_request("local", "once") == live
    store.allow(live, live.allowed_hosts, under_way=True)
    assert [item.session_id for item in store.half_allowed()] == ["live"]
    store.close()


def check_approvals(path: Path) -> None:
    store = SqliteApprovalStore(path)
    waiting = store.pending(make.NOW + live.boot_offset()).value
    (found,) = (store.get(item.approval_id).value for item in waiting)
    assert found is not None
    assert found.action == "rm -r /workspace"
    assert store.approver().value == (b"salt", b"hash")
    store.close()


def check_conversations(path: Path) -> None:
    store = SqliteConversations(path)
    found = asyncio.run(store.find("local", "team", "c-1"))
    assert found is not None
    assert (found.user_id, found.session_id, found.claimed_at) == ("ann", "live", make.NOW)
    store.close()


def check_tokens(path: Path) -> None:
    store = SqliteTokenStore(path)
    (key,) = asyncio.run(store.keys())
    assert (key.kid, key.secret, key.made_at) == ("kid-1", bytes(range(32)), make.NOW)
    assert asyncio.run(store.issued_before(["sandbox live"])) == make.NOW + 10
    store.close()


def check_exposures(path: Path) -> None:
    store = ExposureStore(path)
    (found,) = store.all()
    assert (found.port, found.address, found.listen_port) == (8000, "127.9.8.7", 700)
    assert found.token == "a" * 40
    assert len(found.cookie_key) >= 40
    store.close()


def check_keys(path: Path) -> None:
    store = SqliteKeyStore(path)
    found = store.of_certificate("01ab", make.NOW)
    assert found is not None
    assert (found.name, found.roles) == ("ci", frozenset({Role.AGENT}))
    store.close()


def check_secrets(path: Path) -> None:
    with tempfile.NamedTemporaryFile() as key:
        key.write(make.SECRETS_KEY)
        key.flush()
        store = Secrets(path.parent, key.name)
        refs = (SecretRef("github", "value", "TOKEN"),)
        assert asyncio.run(store.resolve("local", "team", refs)) == {"TOKEN": "a token"}
    assert [item.name for item in store.listing("local")] == ["github"]
    store.close()


def check_snapshots(path: Path) -> None:
    store = SqliteSnapshotStore(path)
    found = store.get("local", "base")
    assert found is not None
    assert (found.blob, found.file_count) == ("blob-1", 3)
    store.close()


def check_templates(path: Path) -> None:
    store = TemplateStore(path)
    assert store.all() == {"small": {"name": "small", "limits": {"pids": 20}}}
    store.close()


CHECKS: dict[str, Callable[[Path], None]] = {
    "sessions": check_sessions,
    "approvals": check_approvals,
    "conversations": check_conversations,
    "exposures": check_exposures,
    "keys": check_keys,
    "secrets": check_secrets,
    "snapshots": check_snapshots,
    "templates": check_templates,
    "tokens": check_tokens,
}
EVERY = pytest.mark.parametrize("name", sorted(CHECKS))


# Older releases.


@pytest.mark.parametrize(("name", "version"), VERSIONS)
def test_what_an_older_release_wrote_can_be_used(name: str, version: str, tmp_path: Path) -> None:
    path = restore(name, version, tmp_path)
    for _ in range(2):  # the second time, nothing is left to migrate
        CHECKS[name](path)
    newest = len(state.DATABASES[f"{name}.db"])
    assert database.examine(path, newest) == newest


@EVERY
def test_every_older_schema_has_a_fixture(name: str) -> None:
    known = {int(version) for other, version in VERSIONS if other == name}
    newest = len(state.DATABASES[f"{name}.db"])
    assert known >= set(range(1, newest)), "run tests/state/make.py before you add a migration"
    assert known, "run tests/state/make.py"


@pytest.mark.parametrize("name", ["sandbox-0a", "sandbox-0b"])
def test_the_record_of_an_older_sandbox_can_be_read(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "sb-live"
    folder.mkdir()
    shutil.copy(make.FIXTURES / f"{name}.json", folder / "sandbox.json")
    found = SandboxRecord.load(folder)
    assert found is not None
    assert (found.sandbox_id, found.pid, found.limits) == ("sb-live", 4711, LIMITS)
    assert found.boot == "", "it did not say"


def test_the_network_record_of_an_older_release_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "sandboxes").mkdir()
    shutil.copy(make.FIXTURES / "network-0.json", tmp_path / "sandboxes" / "sb-live.json")
    (found,) = NetworkRecords(tmp_path).load().values()
    assert found.slot == 3
    assert found.bound.policy == parse_policy(["example.com", "8.8.0.0/16:443", "strict"])
    assert found.before.policy == parse_policy(["open"])


# Newer releases.


@EVERY
def test_what_a_newer_release_wrote_is_refused_and_left_alone(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.db"
    make.MAKERS[name](path)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as made:
        made.execute("PRAGMA journal_mode=DELETE")
        made.execute("CREATE TABLE from_the_future (x)")
        made.execute("PRAGMA user_version=999")
    before = path.read_bytes()
    for use in (lambda: CHECKS[name](path), lambda: state.check(tmp_path, [])):
        with pytest.raises(errors.StateUnusable, match="newer k8e") as caught:
            use()
        assert "update k8e" in caught.value.hint
    with pytest.raises(errors.StateUnusable, match="newer k8e"):
        state.repair(tmp_path)
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_no_database_is_migrated_if_another_one_is_of_a_newer_release(tmp_path: Path) -> None:
    old = restore("sessions", "1", tmp_path)
    newer = restore("keys", "1", tmp_path)
    with contextlib.closing(sqlite3.connect(newer)) as made:
        made.execute("PRAGMA user_version=999")
    with pytest.raises(errors.StateUnusable, match=r"keys\.db"):
        state.check(tmp_path, [])
    assert database.examine(old, 9) == 1


def test_a_sandbox_of_a_newer_release_is_not_taken_for_half_made(tmp_path: Path) -> None:
    record = SandboxRecord("sb-x", "container", Limits(), None, pid=1, pid_started=1)
    folder = tmp_path / "sb-x"
    folder.mkdir()
    record.save(folder)
    file = folder / "sandbox.json"
    file.write_text(file.read_text().replace('"pid": 1,', '"pid": 1, "colour": "red",'))
    assert SandboxRecord.load(folder) == record, "what is only unknown does no harm"
    file.write_text(file.read_text().replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}'))
    with pytest.raises(errors.StateUnusable, match="newer k8e"):
        SandboxRecord.load(folder)


def test_a_sandbox_of_before_the_machine_started_does_not_run(tmp_path: Path) -> None:
    ours = SandboxRecord("sb-x", "container", Limits(), None, pid=1, pid_started=0)
    assert not ours.is_running(), "somebody else has its pid"
    again = SandboxRecord(
        "sb-x", "container", Limits(), None, pid=1, pid_started=-1, boot="another"
    )
    assert not again.is_running()


def test_a_session_that_cannot_be_understood_says_whose_it_may_be(tmp_path: Path) -> None:
    path = restore("sessions", "1", tmp_path)
    SqliteSessionStore(path).close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as made:
        made.execute("UPDATE sessions SET spec='{\"colour\": 1}' WHERE session_id='live'")
    store = SqliteSessionStore(path)
    with pytest.raises(errors.StateUnusable, match=r"session live .*colour") as caught:
        store.unended()
    assert "update k8e" in caught.value.hint
    store.close()


# Damage.


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def nonsense(data: bytes) -> bytes:
    return b"nonsense" * (len(data) // 8)


def hole(data: bytes) -> bytes:
    """The first page has the schema; what follows are tables and indexes."""
    return data[:4096] + bytes(4096) + data[8192:]


def stump(data: bytes) -> bytes:
    return data[:100]


@EVERY
@pytest.mark.parametrize("damage", [half, nonsense, hole, stump])
def test_a_damaged_database_is_refused_and_left_alone(
    name: str, damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / f"{name}.db"
    make.MAKERS[name](path)
    after = damage(path.read_bytes())
    path.write_bytes(after)
    for use in (lambda: CHECKS[name](path), lambda: state.check(tmp_path, [])):
        with pytest.raises(errors.StateUnusable, match=rf"{name}\.db is damaged") as caught:
            use()
        assert "k8e gateway repair" in caught.value.hint
    assert path.read_bytes() == after


@EVERY
def test_an_empty_database_is_not_taken_for_a_new_one(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.db"
    path.touch()
    for use in (lambda: CHECKS[name](path), lambda: state.check(tmp_path, [])):
        with pytest.raises(errors.StateUnusable, match=rf"{name}\.db is damaged: it is empty"):
            use()
    assert path.stat().st_size == 0
    repaired = {item.name: item for item in state.repair(tmp_path)}[path.name]
    assert (repaired.rows, repaired.lost) == (0, "all that was in it")
    assert (tmp_path / repaired.kept).stat().st_size == 0
    state.check(tmp_path, [])


def test_a_new_database_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path, __: Path) -> None:
        raise OSError("killed before it had its name")

    path = tmp_path / "keys.db"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(OSError, match="killed"):
            SqliteKeyStore(path)
    assert not path.exists()
    SqliteKeyStore(path).close()
    assert path.stat().st_mode & 0o777 == 0o600
    assert [item.name for item in tmp_path.iterdir()] == ["keys.db"]


def make_all(folder: Path) -> None:
    for name, maker in make.MAKERS.items():
        maker(folder / f"{name}.db")
    (folder / "audit").mkdir()
    (folder / "audit" / "000000000000001.jsonl").write_text("{}\n")
    state.remember(folder)
    state.check(folder, [])


@pytest.mark.parametrize("name", [*state.DATABASES, "audit"])
def test_what_was_made_here_and_is_gone_is_missed(name: str, tmp_path: Path) -> None:
    make_all(tmp_path)
    gone = tmp_path / name
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    with pytest.raises(errors.StateUnusable, match=rf"{name} was made .* is gone") as caught:
        state.check(tmp_path, [])
    assert "k8e gateway repair" in caught.value.hint
    (repaired,) = state.repair(tmp_path)
    assert (repaired.name, repaired.rows, repaired.lost) == (name, 0, "all that was in it")
    state.check(tmp_path, [])
    assert state.repair(tmp_path) == []


@pytest.mark.parametrize("content", ["", "{", "[]", '{"made": 3}'])
def test_without_knowing_what_was_made_nothing_starts(content: str, tmp_path: Path) -> None:
    make_all(tmp_path)
    (tmp_path / state.MADE).write_text(content)
    with pytest.raises(errors.StateUnusable, match="it is unknown") as caught:
        state.check(tmp_path, [])
    assert "k8e gateway repair" in caught.value.hint
    assert state.repair(tmp_path) == []
    state.check(tmp_path, [])
    (tmp_path / "approvals.db").unlink()
    with pytest.raises(errors.StateUnusable, match=r"approvals\.db"):
        state.check(tmp_path, [])


def test_a_folder_of_an_older_release_is_used_and_remembered(tmp_path: Path) -> None:
    restore("approvals", "1", tmp_path)
    state.check(tmp_path, [])
    state.remember(tmp_path)
    (tmp_path / "approvals.db").unlink()
    with pytest.raises(errors.StateUnusable, match=r"approvals\.db was made"):
        state.check(tmp_path, [])


def test_sessions_that_are_gone_are_told_with_the_sandboxes_that_run(tmp_path: Path) -> None:
    state.check(tmp_path, [])
    with pytest.raises(errors.StateUnusable, match="2 sandboxes still run") as caught:
        state.check(tmp_path, ["sb-a", "sb-b"])
    assert "k8e gateway repair" in caught.value.hint
    (repaired,) = state.repair(tmp_path)
    assert (repaired.name, repaired.kept, repaired.rows) == ("sessions.db", "", 0)
    state.check(tmp_path, ["sb-a"])
    assert state.repair(tmp_path) == []


def test_the_approver_and_deleted_keys_do_not_depend_on_a_second_file(tmp_path: Path) -> None:
    approvals, keys = (
        SqliteApprovalStore(tmp_path / "approvals.db"),
        SqliteKeyStore(tmp_path / "keys.db"),
    )
    approvals.set_approver(b"salt", b"hash")
    keys.insert(Key(0, "ci", frozenset({Role.AGENT}), make.NOW, 0), b"digest")
    keys.revoke("ci", make.NOW)
    copies = tmp_path / "copies"
    copies.mkdir()
    for name in ("approvals.db", "keys.db"):  # as after a crash that took the files beside them
        shutil.copy(tmp_path / name, copies / name)
    approvals.close()
    keys.close()
    found = SqliteApprovalStore(copies / "approvals.db")
    assert found.approver().value == (b"salt", b"hash")
    found.close()
    known = SqliteKeyStore(copies / "keys.db")
    assert (known.listing(), len(known.revoked())) == ([], 1)
    known.close()


def test_repair_saves_the_rows_of_a_database_whose_index_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    make.make_sessions(path)
    with contextlib.closing(sqlite3.connect(path)) as made:
        query = "SELECT rootpage FROM sqlite_master WHERE name='by_owner'"
        page = int(made.execute(query).fetchone()[0])
    data = path.read_bytes()
    path.write_bytes(data[: 4096 * (page - 1)] + b"\xff" * 4096 + data[4096 * page :])
    damaged = path.read_bytes()
    (repaired,) = state.repair(tmp_path)
    assert (repaired.rows, repaired.lost) == (3, "")
    check_sessions(path)
    assert (tmp_path / repaired.kept).read_bytes() == damaged
    assert path.stat().st_mode & 0o777 == 0o600


def test_repair_saves_keys_of_an_older_release_with_what_they_own(tmp_path: Path) -> None:
    path = restore("keys", "1", tmp_path)
    with contextlib.closing(sqlite3.connect(path)) as made:
        for name in ("laptop", "boss"):
            query = (
                "INSERT INTO keys (name, hash, roles, created_at, expires_at) VALUES (?,?,?,1,0)"
            )
            made.execute(query, (name, name.encode(), "agent"))
        made.commit()
        query = "SELECT rootpage FROM sqlite_master WHERE name='by_key'"
        page = int(made.execute(query).fetchone()[0])
    data = path.read_bytes()
    path.write_bytes(data[: 4096 * (page - 1)] + b"\xff" * 4096 + data[4096 * page :])
    repaired = {item.name: item for item in state.repair(tmp_path)}["keys.db"]
    assert (repaired.rows, repaired.lost) == (4, "")
    store = SqliteKeyStore(path)
    owners = {key.name: key.owner for key in store.listing()}
    assert owners == {name: f"key:{name}" for name in ("ci", "laptop", "boss")}
    store.close()


def test_repair_of_nonsense_gives_an_empty_database(tmp_path: Path) -> None:
    path = tmp_path / "keys.db"
    path.write_bytes(b"nonsense" * 1000)
    repaired = {item.name: item for item in state.repair(tmp_path)}
    assert (repaired["keys.db"].rows, repaired["keys.db"].lost != "") == (0, True)
    assert (tmp_path / repaired["keys.db"].kept).read_bytes() == b"nonsense" * 1000
    store = SqliteKeyStore(path)
    assert store.listing() == []
    store.close()


def test_a_disk_that_fails_is_not_taken_for_a_damaged_database(tmp_path: Path) -> None:
    (tmp_path / "keys.db").mkdir()
    (tmp_path / "keys.db" / "x").touch()
    with pytest.raises(errors.StateUnusable, match="cannot be used"):
        state.repair(tmp_path)
