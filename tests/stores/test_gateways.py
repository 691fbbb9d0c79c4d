"""Real gateways on one database: sandboxes, kills, and a database that goes away."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from k8e import errors
from k8e.guest import wire
from tests.sessions.gateways import Client, Gateways, eventually
from tests.stores import servers
from tests.stores.servers import PostgresServer

SMALL = {"cpus": 0.5, "memory": 256 << 20, "disk": 16 << 20}
LEASES = 600.0, 12.0
"""Of both gateways: the first one has all the time to come back, the second soon looks for it."""


@pytest.fixture(scope="module")
def own() -> Generator[PostgresServer]:
    """A server that tests may stop."""
    if servers.programs() is None:
        pytest.skip("PostgreSQL is not installed (Debian: postgresql)")
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def database(own: PostgresServer) -> str:
    return own.create()


@pytest.fixture
def pair(own: PostgresServer, database: str) -> Generator[list[Gateways]]:
    """Two gateways with folders of their own, on one new database."""
    if os.geteuid() != 0:
        pytest.skip("the local runtimes need root")
    url = own.url(database)
    made = [
        Gateways(
            K8E_DATABASE_URL=url,
            K8E_GATEWAY_LEASE=str(lease),
            K8E_POOL_TOTAL="0",
            K8E_RUNTIME="container",
        )
        for lease in LEASES
    ]
    try:
        yield made
    finally:
        for gateways in made:
            gateways.close()


def reason(client: Client, session_id: str) -> str:
    found = client.session(session_id)
    return str(found["ended_reason"]) if found["phase"] == "ended" else ""


def listed(client: Client) -> list[str]:
    return [item["session_id"] for item in client.call("list_sessions")["sessions"]]


def test_twenty_creations_of_one_request_over_two_gateways_make_one_session(
    pair: list[Gateways],
) -> None:
    one, two = (gateways.start() for gateways in pair)
    spec: dict[str, Any] = {"request_id": "once", "limits": SMALL}

    def create(number: int) -> str:
        return pair[number % 2].connect().create(**spec)

    with ThreadPoolExecutor(20) as threads:
        found = set(threads.map(create, range(20)))
    (session_id,) = found
    assert listed(one) == listed(two) == [session_id]
    shells = dict.fromkeys((one, two), "")
    for client in shells:
        try:
            shells[client] = client.shell(session_id, "echo here")
        except errors.SessionElsewhere as error:
            shells[client] = error.message
    here, elsewhere = sorted(shells.values(), key=len)
    assert here == "here\n"
    assert f"session {session_id} runs on gateway " in elsewhere
    status = one.call("status")
    assert len(status["gateways"]) == 2, "each hears of the other"
    assert "not-shown" not in str(status)
    for gateways in pair:
        assert "not-shown" not in gateways.log()
    # The gateway has the session's SQLite neither: it reads none where PostgreSQL is set.
    assert not (pair[0].data / "sessions.db").exists()


def test_a_killed_gateway_adopts_its_sessions_and_one_that_stays_away_loses_them(
    own: PostgresServer, database: str, pair: list[Gateways]
) -> None:
    one, two = (gateways.start() for gateways in pair)
    mine, theirs = one.create(limits=SMALL), two.create(limits=SMALL)
    one.shell(mine, "echo kept > /workspace/file")
    one = pair[0].restart()
    assert one.shell(mine, "cat /workspace/file") == "kept\n"
    pair[0].kill()
    name = (pair[0].data / "gateway.id").read_text().strip()
    own.sql(f"UPDATE gateways SET lease = 0 WHERE gateway_id = '{name}'", database)
    why = eventually(lambda: reason(two, mine), "the end of what the dead gateway had")
    assert "did not renew its lease" in why
    assert two.shell(theirs, "echo goes on") == "goes on\n"
    assert reason(two, theirs) == ""
    one = pair[0].start()
    assert reason(one, mine) == why
    with pytest.raises(errors.SessionNotFound, match="did not renew its lease"):
        one.shell(mine, "true")
    assert listed(one) == [theirs]


def test_programs_run_on_while_the_database_is_away(
    own: PostgresServer, pair: list[Gateways]
) -> None:
    client = pair[0].start()
    mine = client.create(limits=SMALL)
    argv = ["/bin/bash", "-c", "echo begun; read line; echo got $line"]
    running = client.open({"op": "exec", "session": {"id": mine}, "argv": argv, "stdin": True})
    client.output(running, until=b"begun")
    own.stop(at_once=True)
    try:
        assert client.shell(mine, "echo still here") == "still here\n"
        assert client.session(mine)["phase"] == "active"
        with pytest.raises(errors.StoreUnreachable, match="does not answer"):
            client.create(limits=SMALL)
    finally:
        own.start()
    client.send(wire.STDIN, running, b"a line\n")
    seen, ended = client.output(running)
    assert (seen.strip(), ended["code"]) == (b"got a line", 0)

    def create() -> str:
        try:
            return client.create(limits=SMALL)
        except errors.StoreUnreachable:
            return ""

    made = eventually(create, "a session after the database is back")
    assert client.shell(made, "echo new") == "new\n"
    assert reason(client, mine) == ""


def test_sqlalchemy_is_not_imported_without_a_database() -> None:
    names = "sqlalchemy", "alembic", "psycopg", "k8e.postgres"
    program = f"import sys, k8e.gateway.app; print([n for n in {names!r} if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, check=True, timeout=120
    )
    assert done.stdout.strip() == b"[]"
