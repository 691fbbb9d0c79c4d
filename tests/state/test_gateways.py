"""Gateways that find older, newer, damaged or no state, while sandboxes run."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Generator
from pathlib import Path

import pytest

from k8e import settings
from k8e.conformance import traces
from k8e.gateway import app
from tests.docs.documents import ROOT
from tests.sessions.gateways import Client, Gateways, eventually
from tests.state import make

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="the local runtimes need root"),
    pytest.mark.timeout(120),
]
SMALL = {"memory": 64 << 20, "disk": 16 << 20}
ADDED = ("deadline", "rebinding", "ending")
"""Columns that the release before did not have."""


@pytest.fixture(scope="module")
def gateways() -> Generator[Gateways]:
    gateways = Gateways(K8E_POOL_MAX="0")
    gateways.start().call("doctor")
    yield gateways
    gateways.close()


@pytest.fixture
def client(gateways: Gateways) -> Client:
    return gateways.connect() if not gateways.died else gateways.start()


def sandbox(gateways: Gateways, session_id: str) -> str:
    return gateways.sandboxes()[session_id]


def is_running(sandbox_id: str) -> bool:
    return len(traces.processes(sandbox_id)) > 0


def settled(gateways: Gateways) -> Path:
    """The database of sessions, with everything in one file; no gateway runs."""
    path = gateways.data / "sessions.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path


def make_older(gateways: Gateways, sandbox_id: str) -> None:
    """Have the state as the release before wrote it."""
    with contextlib.closing(sqlite3.connect(settled(gateways), isolation_level=None)) as database:
        for column in ADDED:
            database.execute(f"ALTER TABLE sessions DROP COLUMN {column}")
        database.execute("PRAGMA user_version=3")
    older = (make.FIXTURES / "sessions-3.sql").read_text("utf-8")
    assert not any(column in older for column in ADDED)
    file = gateways.run_dir / "sandboxes" / sandbox_id / "sandbox.json"
    record = json.loads(file.read_text())
    known = json.loads((make.FIXTURES / "sandbox-0b.json").read_text())
    file.write_text(json.dumps({name: record[name] for name in known}))


@pytest.mark.parametrize("runtime", ["gvisor", "container"])
def test_sandboxes_of_the_release_before_live_on(
    gateways: Gateways, client: Client, runtime: str
) -> None:
    session_id = client.create(runtime=runtime, limits=SMALL, lifetime=500)
    client.shell(session_id, "echo kept > file")
    call = {"op": "exec", "session": {"id": session_id}, "id": "run", "background": True}
    script = "echo begin; until test -e go; do sleep 0.02; done; echo end; exit 7"
    client.receive(client.open({**call, "argv": ["bash", "-c", script]}))
    before = client.session(session_id)
    gateways.kill()
    make_older(gateways, sandbox(gateways, session_id))
    client = gateways.start()
    assert client.session(session_id) == before
    assert client.shell(session_id, "cat file; touch go") == "kept\n"
    said, end = client.output(
        client.open({"op": "attach", "session": {"id": session_id}, "id": "run"})
    )
    assert (said, end["code"]) == (b"begin\nend\n", 7)
    client.call("destroy_session", session_id=session_id)
    assert gateways.traces(sandbox(gateways, session_id)) == []


@pytest.fixture
def older() -> Generator[Gateways]:
    """Folders for gateways of two releases; which runtimes work here is known already."""
    gateways = Gateways(K8E_POOL_MAX="0")
    gateways.start().call("doctor")
    gateways.kill()
    yield gateways
    gateways.close()


@pytest.mark.parametrize("runtime", ["gvisor", "container"])
def test_a_running_guest_of_an_earlier_release_is_adopted_and_used(
    older: Gateways, runtime: str
) -> None:
    (fixture,) = make.FIXTURES.glob("guest-*.json.xz")
    flag, today = older.program
    use = f"from tests.state import make_guest; make_guest.use({fixture.stem[:-5]!r})"
    older.program = [flag, f"import sys; sys.path.append({str(ROOT)!r}); {use}; {today}"]
    client = older.start()
    session_id = client.create(runtime=runtime, limits={"memory": 256 << 20})
    client.shell(session_id, "echo kept > file")
    whose = {"session": {"id": session_id}}
    script = "echo begin; until test -e go; do sleep 0.02; done; echo end; exit 7"
    call = {"op": "exec", **whose, "id": "run", "background": True}
    client.receive(client.open({**call, "argv": ["bash", "-c", script]}))
    older.program = [flag, today]
    client = older.restart()
    other = client.create(runtime=runtime, limits=SMALL)
    assert len(list((older.data / "guest").glob("guest-*.pyc"))) == 2
    # What was there: its files, its programs, and what they said meanwhile.
    assert client.shell(session_id, "cat file; touch go") == "kept\n"
    said, end = client.output(client.open({"op": "attach", **whose, "id": "run"}))
    assert (said, end["code"]) == (b"begin\nend\n", 7)
    # What is new: code, a terminal, lists, a signal, a pause.
    python = {"op": "exec", **whose, "language": "python", "code": b"print(6 * 7)"}
    assert client.output(client.open(python))[0] == b"42\n"
    terminal = {"op": "exec", **whose, "argv": ["tty"], "tty": [24, 80], "output": "ring"}
    assert b"/dev/pts/" in client.output(client.open(terminal))[0]
    assert client.call("stat", **whose, path="file")["size"] == 5
    assert client.call("execs", **whose)["execs"]
    endless = {**call, "id": "endless", "argv": ["sleep", "600"]}
    client.receive(client.open(endless))
    assert client.call("processes", **whose)["processes"]
    client.call("signal", **whose, id="endless", terminate=True)
    client.call("pause_session", session_id=session_id)
    client.call("resume_session", session_id=session_id)
    assert client.shell(session_id, "cat file") == client.shell(other, "echo kept")
    sandboxes = older.sandboxes()
    for known in (session_id, other):
        client.call("destroy_session", session_id=known)
        assert older.traces(sandboxes[known]) == []


def test_nothing_of_a_newer_release_is_touched(gateways: Gateways, client: Client) -> None:
    session_id = client.create(runtime="container", limits=SMALL)
    sandbox_id = sandbox(gateways, session_id)
    gateways.kill()
    file = gateways.run_dir / "sandboxes" / sandbox_id / "sandbox.json"
    record = file.read_text()
    file.write_text(record.replace('"format": 1', '"format": 2'))
    told = gateways.refused()
    assert "newer k8e" in told["message"]
    file.write_text(record)
    path = settled(gateways)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        database.execute("PRAGMA user_version=999")
    told = gateways.refused()
    assert (told["code"], "newer k8e" in told["message"]) == ("state_unusable", True)
    assert is_running(sandbox_id)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(f"PRAGMA user_version={version}")
    client = gateways.start()
    assert client.shell(session_id, "echo works") == "works\n"
    client.call("destroy_session", session_id=session_id)


def test_a_damaged_database_costs_no_sandbox(gateways: Gateways, client: Client) -> None:
    session_id = client.create(runtime="container", limits=SMALL)
    sandbox_id = sandbox(gateways, session_id)
    gateways.kill()
    path = settled(gateways)
    whole = path.read_bytes()
    for damage in (whole[: len(whole) // 2], b"", b"nonsense" * 1000):
        path.write_bytes(damage)
        told = gateways.refused()
        assert told["code"] == "state_unusable"
        assert str(path) in told["message"]
        assert "k8e gateway repair" in told["hint"]
        assert path.read_bytes() == damage
        assert is_running(sandbox_id)
    path.write_bytes(whole)
    client = gateways.start()
    assert client.shell(session_id, "echo works") == "works\n"
    client.call("destroy_session", session_id=session_id)


def test_what_repair_cannot_save_is_removed_and_the_rest_goes_on(
    gateways: Gateways, client: Client
) -> None:
    kept, lost = (client.create(runtime="container", limits=SMALL) for _ in range(2))
    sandboxes = gateways.sandboxes()
    gateways.kill()
    path = settled(gateways)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("DELETE FROM sessions WHERE session_id=?", (lost,))
        (page,) = database.execute(
            "SELECT rootpage FROM sqlite_master WHERE name='by_owner'"
        ).fetchone()
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = path.read_bytes()
    path.write_bytes(data[: 4096 * (page - 1)] + b"\xff" * 4096 + data[4096 * page :])
    assert "damaged" in gateways.refused()["message"]
    environ = {"K8E_DATA_DIR": str(gateways.data), "K8E_RUN_DIR": str(gateways.run_dir)}
    (repaired,) = app.repair(settings.load(environ))
    assert repaired["database"] == "sessions.db"
    client = gateways.start()
    assert client.shell(kept, "echo works") == "works\n"
    eventually(lambda: not gateways.traces(sandboxes[lost]), "the end of what nobody owns")
    client.call("destroy_session", session_id=kept)
