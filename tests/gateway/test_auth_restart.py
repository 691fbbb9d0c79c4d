"""Keys and certificates after a restart, and callers from another machine."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from k8e.conformance.lab.ports import free_port
from k8e.egress import namespaces
from k8e.guest import wire
from tests.gateway import serving
from tests.gateway.devices import Metadata, bearer, every_kind, log_in
from tests.gateway.serving import failing
from tests.places import NewPlace, Place, eventually

Status = grpc.StatusCode
HERE, THERE = "10.66.77.1", "10.66.77.2"
LOOPBACK = {
    "0.0.0.0": ["127.0.0.1:50051"],
    "[::]": ["127.0.0.1:50051", "[::1]:50051"],
}
"""Where the local user is known by uid, by what the gateway listens on."""


def running(place: Place) -> serving.Running:
    address = place.wait_for_grpc()
    return serving.Running(address, place.data / "tls/ca.crt", place.data, 0, place.folder)


def test_what_was_deleted_stays_deleted_though_the_gateway_is_killed(new_place: NewPlace) -> None:
    place = new_place(K8E_LISTEN=f"127.0.0.1:{free_port()}")
    keys: dict[str, Metadata] = {
        name: bearer(place.json("sandbox", "api-key", "create", name)["key"])
        for name in ("kept", "lost")
    }
    with running(place).channel() as channel:
        stub = pb_grpc.SandboxServiceStub(channel)
        devices = {name: log_in(stub, metadata) for name, metadata in keys.items()}
    place.json("sandbox", "api-key", "delete", "lost")
    place.kill_gateway()
    place.json("gateway", "--background")
    place.json("sandbox", "api-key", "create", "lost")
    with devices["lost"].channel(running(place)) as channel:
        for failed in every_kind(channel, ()):
            assert failed.status is Status.UNAUTHENTICATED
            assert failed.details == "key lost was deleted"
    with running(place).channel() as channel:
        for failed in every_kind(channel, keys["lost"]):
            assert failed.status is Status.UNAUTHENTICATED
        stub = pb_grpc.SandboxServiceStub(channel)
        stub.ListSessions(pb.ListSessionsRequest(), metadata=keys["kept"], timeout=30)
    with devices["kept"].channel(running(place)) as channel:
        stub = pb_grpc.SandboxServiceStub(channel)
        stub.ListSessions(pb.ListSessionsRequest(), timeout=30)


# Another machine: a gateway whose network namespace is joined to one of ours by a cable.

CALL = """
import json, sys
import grpc
from k8e._generated import sandbox_pb2 as pb, sandbox_pb2_grpc as pb_grpc
asked = json.load(sys.stdin)
credentials = grpc.ssl_channel_credentials(asked["ca"].encode())
with grpc.secure_channel(asked["address"], credentials) as channel:
    stub = pb_grpc.SandboxServiceStub(channel)
    metadata = [("authorization", "Bearer " + asked["key"])] if asked["key"] else []
    told = []
    frame = pb.RunFrame(kind=1, channel=1, body=bytes.fromhex(asked["call"]))
    for call in (
        lambda: stub.ListSessions(pb.ListSessionsRequest(), metadata=metadata, timeout=20),
        lambda: list(stub.ExecStream(pb.ExecRequest(command=" "), metadata=metadata, timeout=20)),
        lambda: next(stub.Run(iter([frame]), metadata=metadata, timeout=20)),
        lambda: stub.GetCACert(pb.GetCACertRequest(), timeout=20),
    ):
        try:
            call()
            told.append("OK")
        except grpc.RpcError as error:
            told.append(f"{error.code().name} {error.details()}")
print(json.dumps(told))
"""


def _ip(*arguments: str, path: Path | None = None) -> None:
    command = ["ip", *arguments]
    if path is not None:
        command = ["nsenter", f"--net={path}", *command]
    subprocess.run(command, check=True, timeout=20, capture_output=True)


@pytest.fixture
def machines() -> Iterator[tuple[Path, Path]]:
    """Two network namespaces of ours with a cable between them."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    with tempfile.TemporaryDirectory(prefix="k8e-two-") as folder:
        here, there = Path(folder, "here"), Path(folder, "there")
        namespaces.make(here)
        namespaces.make(there)
        try:
            _ip("link", "add", "cable", "type", "veth", "peer", "name", "far", path=here)
            # Moved by a descriptor: neither namespace has a name that ip knows.
            with open(there, "rb") as target:
                move = ["nsenter", f"--net={here}", "ip", "link", "set", "far", "netns"]
                move.append(f"/proc/self/fd/{target.fileno()}")
                subprocess.run(
                    move, check=True, timeout=20, pass_fds=[target.fileno()], capture_output=True
                )
            for path, name, address in ((here, "cable", HERE), (there, "far", THERE)):
                _ip("addr", "add", f"{address}/24", "dev", name, path=path)
                _ip("link", "set", name, "up", path=path)
                _ip("link", "set", "lo", "up", path=path)
            yield here, there
        finally:
            namespaces.unmount(here)
            namespaces.unmount(there)


def call_from(path: Path, address: str, ca: Path, key: str = "") -> list[str]:
    asked = {
        "address": address,
        "ca": ca.read_text(),
        "key": key,
        "call": wire.pack({"op": "status"}).hex(),
    }
    done = subprocess.run(
        ["nsenter", f"--net={path}", sys.executable, "-P", "-c", CALL],
        input=json.dumps(asked).encode(),
        stdout=subprocess.PIPE,
        timeout=90,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("listen", [HERE, "0.0.0.0", "[::]"])
def test_a_caller_from_another_machine_needs_a_key(
    machines: tuple[Path, Path], new_place: NewPlace, listen: str
) -> None:
    here, there = machines
    place = new_place(K8E_LISTEN=f"{listen}:50051", K8E_ADVERTISE_NAMES=f"{HERE},gw.example")
    gateway = subprocess.Popen(
        ["nsenter", f"--net={here}", sys.executable, "-P", "-m", "k8e", "gateway"],
        env=place.environ,
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually(lambda: place.cli("status").returncode == 0, 40)
        assert place.wait_for_grpc() == f"{listen}:50051"
        ca, address = place.data / "tls/ca.crt", f"{HERE}:50051"
        stranger = call_from(there, address, ca)
        for told in stranger[:3]:
            assert told.startswith("UNAUTHENTICATED callers from elsewhere need an API key"), told
        assert stranger[3] == "OK", "the CA is no secret"
        key: Any = place.json("sandbox", "api-key", "create", "far")["key"]
        welcome = call_from(there, address, ca, key)
        assert welcome[0] == "OK"
        assert welcome[1].startswith("INVALID_ARGUMENT the command is empty")
        assert welcome[2] == "OK"
        # The same user on the gateway's own machine, but not by loopback, is no local user.
        assert call_from(here, address, ca)[0].startswith("UNAUTHENTICATED")
        for address in LOOPBACK.get(listen, ()):
            assert call_from(here, address, ca)[0] == "OK", address
    finally:
        gateway.terminate()
        gateway.wait(40)


def test_a_stranger_s_uid_by_loopback_is_refused_but_with_a_key_served(
    new_place: NewPlace,
) -> None:
    place = new_place(K8E_LISTEN=f"127.0.0.1:{free_port()}")
    key = place.json("sandbox", "api-key", "create", "stranger")["key"]
    found = running(place)
    code = f"import os; os.setgid(65534); os.setuid(65534)\n{CALL}"
    for given, expected in (("", "UNAUTHENTICATED this gateway belongs to uid 0"), (key, "OK")):
        asked = {"address": found.address, "ca": found.ca.read_text(), "key": given, "call": "00"}
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            input=json.dumps(asked).encode(),
            stdout=subprocess.PIPE,
            timeout=50,
            check=True,
        )
        assert json.loads(done.stdout)[0].startswith(expected)


def test_a_name_that_is_no_name_is_told_at_start(new_place: NewPlace) -> None:
    place = new_place(K8E_LISTEN=f"127.0.0.1:{free_port()}", K8E_ADVERTISE_NAMES="a b")
    assert "K8E_ADVERTISE_NAMES" in place.cli("gateway").stderr.decode()


def test_a_new_name_makes_a_new_certificate_of_the_same_ca(new_place: NewPlace) -> None:
    place = new_place(K8E_LISTEN=f"127.0.0.1:{free_port()}")
    place.json("gateway", "--background")
    place.wait_for_grpc()
    ca = (place.data / "tls/ca.crt").read_bytes()
    place.json("gateway", "stop")
    place.environ["K8E_ADVERTISE_NAMES"] = "gw.example, 192.0.2.7"
    place.json("gateway", "--background")
    found = running(place)
    names = json.loads((place.data / "tls/server.json").read_text())["names"]
    assert {"gw.example", "192.0.2.7"} <= set(names)
    assert found.ca.read_bytes() == ca
    override = ("grpc.ssl_target_name_override", "gw.example")
    with found.channel(override) as channel:
        stub = pb_grpc.SandboxServiceStub(channel)
        stub.ListSessions(pb.ListSessionsRequest(), timeout=30)
    with found.channel(("grpc.ssl_target_name_override", "evil.example")) as channel:
        stub = pb_grpc.SandboxServiceStub(channel)
        failed = failing(lambda: stub.ListSessions(pb.ListSessionsRequest(), timeout=10))
        assert failed.status is Status.UNAVAILABLE


def test_what_a_key_left_whose_deletion_was_cut_short_is_removed_at_the_next_start(
    new_place: NewPlace,
) -> None:
    place = new_place(K8E_LISTEN=f"127.0.0.1:{free_port()}")
    made: dict[str, str] = {}
    for name in ("kept", "lost"):
        key: Metadata = bearer(place.json("sandbox", "api-key", "create", name)["key"])
        with running(place).channel() as channel:
            stub = pb_grpc.SandboxServiceStub(channel)
            asked = pb.CreateSessionRequest(runtime_class="container")
            made[name] = stub.CreateSession(asked, metadata=key, timeout=50).session_id
            stub.SnapshotPut(
                pb.SnapshotPutRequest(name=name, layers=["x"]), metadata=key, timeout=30
            )
    place.kill_gateway()
    with contextlib.closing(sqlite3.connect(place.data / "keys.db")) as database, database:
        database.execute("UPDATE keys SET revoked_at=1 WHERE name='lost'")
    place.json("gateway", "--background")
    with contextlib.closing(sqlite3.connect(place.data / "sessions.db")) as database:
        phases = dict(database.execute("SELECT session_id, phase FROM sessions").fetchall())
    assert phases == {made["kept"]: "active", made["lost"]: "ended"}
    with contextlib.closing(sqlite3.connect(place.data / "snapshots.db")) as database:
        assert database.execute("SELECT name FROM snapshots").fetchall() == [("kept",)]
