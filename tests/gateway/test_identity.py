"""Loopback callers are told apart by the uid that owns their socket."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import NamedTuple

import pytest

from k8e.gateway import identity
from tests.gateway import serving

STRANGER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")

# Connects as another user; says its port; lives until its stdin ends, then closes as it is told.
CONNECT = """
import os, socket, struct, sys
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
client = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print(client.getsockname()[1], flush=True)
sys.stdin.read()
"""
CALL = """
import os, sys, grpc
from k8e._generated import sandbox_pb2 as pb, sandbox_pb2_grpc as pb_grpc
address, uid = sys.argv[1], int(sys.argv[2])
root = sys.stdin.buffer.read()
os.setgroups([]); os.setgid(uid); os.setuid(uid)
stub = pb_grpc.SandboxServiceStub(grpc.secure_channel(address, grpc.ssl_channel_credentials(root)))
for work in (lambda: stub.ListSessions(pb.ListSessionsRequest(), timeout=20),
             lambda: list(stub.ExecStream(pb.ExecRequest(command="id"), timeout=20)),
             lambda: list(stub.Run(iter([pb.RunFrame(kind=1, channel=1)]), timeout=20)),
             lambda: stub.PollRun(pb.PollRunRequest(), timeout=20)):
    try:
        work()
        print("OK")
    except grpc.RpcError as error:
        print(error.code().name, error.details())
"""

Lookup = Callable[[identity.TcpEnd, identity.TcpEnd], int | None]
LOOKUPS: dict[str, Lookup] = {
    "netlink": identity._ask_kernel,  # pyright: ignore[reportPrivateUsage]
    "proc": identity._search_tables,  # pyright: ignore[reportPrivateUsage]
    "either": identity.owner,
}


def endpoint(name: tuple[str, int]) -> identity.TcpEnd:
    return identity.TcpEnd(ipaddress.ip_address(name[0]), name[1])


class Pair(NamedTuple):
    """A connection over the loopback, as our server sees it."""

    client: socket.socket
    served: socket.socket
    caller: identity.TcpEnd
    listening_on: identity.TcpEnd


@contextlib.contextmanager
def connected(host: str, dial: str = "") -> Generator[Pair]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        address = server.getsockname()[:2]
        with socket.create_connection((dial or host, address[1])) as client:
            served, peer = server.accept()
            with served:
                yield Pair(client, served, endpoint(peer[:2]), endpoint(address))


@contextlib.contextmanager
def stranger(port: int) -> Generator[tuple[int, subprocess.Popen[str]]]:
    """A connection of another user, and the process that holds it."""
    with subprocess.Popen(
        [sys.executable, "-c", CONNECT, str(port), str(STRANGER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield int(process.stdout.readline()), process
        finally:
            process.stdin.close()


@pytest.mark.parametrize("lookup", LOOKUPS.values(), ids=LOOKUPS)
@pytest.mark.parametrize(
    ("host", "dial"), [("127.0.0.1", ""), ("::1", ""), ("127.0.0.1", "::ffff:127.0.0.1")]
)
def test_the_owner_of_a_connection_is_found(lookup: Lookup, host: str, dial: str) -> None:
    with connected(host, dial) as pair:
        assert lookup(pair.caller, pair.listening_on) == os.geteuid()


@needs_root
@pytest.mark.parametrize("lookup", LOOKUPS.values(), ids=LOOKUPS)
def test_another_users_connection_has_that_user_as_owner(lookup: Lookup) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        listening_on = endpoint(server.getsockname())
        with stranger(listening_on.port) as (port, _):
            caller = identity.TcpEnd(listening_on.address, port)
            assert lookup(caller, listening_on) == STRANGER


@needs_root
@pytest.mark.parametrize("lookup", LOOKUPS.values(), ids=LOOKUPS)
def test_a_socket_that_its_process_has_left_has_no_owner(lookup: Lookup) -> None:
    """The kernel reports such sockets with uid 0, which must not pass for root."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        listening_on = endpoint(server.getsockname())
        with stranger(listening_on.port) as (port, process):
            served, _ = server.accept()
            caller = identity.TcpEnd(listening_on.address, port)
            process.communicate(timeout=5)
            with served:
                assert served.recv(1) == b""
                assert lookup_or_none(lookup, caller, listening_on) is None
            # Our side closed as well: what is left is in TIME_WAIT.
            assert lookup_or_none(lookup, caller, listening_on) is None


def lookup_or_none(
    lookup: Lookup, caller: identity.TcpEnd, listening_on: identity.TcpEnd
) -> int | None:
    try:
        return lookup(caller, listening_on)
    except OSError:  # how netlink alone says that there is none
        return None


@pytest.mark.parametrize("lookup", LOOKUPS.values(), ids=LOOKUPS)
def test_a_reset_connection_has_no_owner(lookup: Lookup) -> None:
    with connected("127.0.0.1") as pair:
        linger = struct.pack("ii", 1, 0)
        pair.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        pair.client.close()
        assert lookup_or_none(lookup, pair.caller, pair.listening_on) is None


@pytest.mark.parametrize("lookup", LOOKUPS.values(), ids=LOOKUPS)
def test_a_listener_on_the_callers_port_is_not_the_caller(lookup: Lookup) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        caller, listening_on = endpoint(other.getsockname()), endpoint(server.getsockname())
        assert lookup_or_none(lookup, caller, listening_on) is None


def test_without_netlink_the_tables_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(identity, "_ask_kernel", refuse)
    with connected("127.0.0.1") as pair:
        assert identity.owner(pair.caller, pair.listening_on) == os.geteuid()


def test_without_both_nobody_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(identity, "_ask_kernel", refuse)
    monkeypatch.setattr(identity, "_TABLES", (Path("/nowhere"),))
    with (
        connected("127.0.0.1") as pair,
        pytest.raises(identity.UnknownPeer, match="could not be found"),
    ):
        identity.identify_peer(pair.caller, pair.listening_on)


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("127.0.0.1", "127.0.0.1:5"),
        ("::1", "[::1]:5"),
        ("::ffff:127.0.0.1", "127.0.0.1:5"),
        ("fe80::1%eth0", "[fe80::1]:5"),
    ],
)
def test_ends_of_connections_are_understood(host: str, known: str) -> None:
    assert str(identity.endpoint(host, 5)) == known


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "10.0.0.1", "::ffff:10.0.0.1"])
@pytest.mark.parametrize("dialled", ["127.0.0.1", "192.0.2.2", "::1"])
def test_callers_from_elsewhere_are_not_known_by_uid(host: str, dialled: str) -> None:
    with pytest.raises(identity.UnknownPeer, match="need an API key"):
        identity.identify_peer(identity.endpoint(host, 5), identity.endpoint(dialled, 50051))


def test_our_own_user_is_the_local_principal_and_no_approver() -> None:
    with connected("127.0.0.1") as pair:
        principal = identity.identify_peer(pair.caller, pair.listening_on)
    assert principal == identity.LOCAL
    assert sorted(principal.roles) == ["admin", "agent"]


def call_as(uid: int, running: serving.Running) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", CALL, running.address, str(uid)],
        input=running.ca.read_bytes(),
        capture_output=True,
        timeout=50,
        check=True,
    )
    return done.stdout.decode().splitlines()


@needs_root
def test_every_kind_of_call_of_another_user_is_refused(running: serving.Running) -> None:
    said = call_as(STRANGER, running)
    assert len(said) == 4
    for line in said:
        assert line.startswith("UNAUTHENTICATED"), line
        assert f"does not serve uid {STRANGER}" in line


@needs_root
def test_the_same_program_as_root_is_served(running: serving.Running) -> None:
    said = call_as(0, running)
    assert said[0] == "OK"
    assert not any("UNAUTHENTICATED" in line for line in said)
