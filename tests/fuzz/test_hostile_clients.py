"""Clients that send anything, or nothing, hold up nobody else and leave nothing behind."""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import time

import grpc
import pytest

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from k8e.guest import wire
from tests.fuzz.gateways import MOST_GROWTH, MOST_SECONDS, PATIENCE, Gateway, quiet

MIB = 1 << 20


def served(gateway: Gateway, neighbour: str) -> bool:
    with gateway.connect() as caller:
        return caller.run(neighbour, "true") < MOST_SECONDS


# The unix socket.


def test_ten_thousand_tiny_frames_are_nothing(gateway: Gateway, neighbour: str) -> None:
    with quiet(gateway, neighbour), gateway.connect() as caller:
        caller.socket.sendall(wire.frame(wire.STDIN_END, 9) * 10_000)
        caller.socket.sendall(wire.frame(wire.CREDIT, 9, bytes(4)) * 10_000)
        assert caller.call(op="status")["pid"] == gateway.pid
        assert served(gateway, neighbour)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(wire.HEADER.pack(wire.MAX_REQUEST + 1, wire.CALL, 1), id="too long"),
        pytest.param(wire.frame(wire.CALL, 1, b"\xff" * 50), id="no value"),
        pytest.param(wire.frame(wire.CALL, 1, b"l\0\0\0\1" * 5000 + b"N"), id="nested deeply"),
        pytest.param(wire.frame(wire.CALL, 1, wire.pack([{}])), id="a list"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 9, id="another protocol"),
    ],
)
def test_who_does_not_speak_the_protocol_is_cut_off(
    gateway: Gateway, neighbour: str, data: bytes
) -> None:
    with quiet(gateway, neighbour), gateway.connect() as caller:
        caller.socket.sendall(data)
        assert caller.was_cut_off()


def test_a_million_values_hold_nobody_up(gateway: Gateway, neighbour: str) -> None:
    """Sixteen megabytes of them took five seconds to read, and everybody else waited."""
    many = b"l" + wire.CREDIT_BODY.pack(15 * MIB) + b"N" * (15 * MIB)
    many = b"d\0\0\0\1s\0\0\0\4argv" + many
    with quiet(gateway, neighbour), gateway.connect() as caller:
        caller.socket.sendall(wire.HEADER.pack(len(many), wire.CALL, 1))
        caller.socket.sendall(many)
        began = time.monotonic()
        assert served(gateway, neighbour)
        assert caller.was_cut_off()
        assert time.monotonic() - began < MOST_SECONDS


def test_lengths_without_bytes_take_no_memory(gateway: Gateway, neighbour: str) -> None:
    with quiet(gateway, neighbour) as before, contextlib.ExitStack() as stack:
        for _ in range(50):
            caller = stack.enter_context(gateway.connect())
            caller.socket.sendall(wire.HEADER.pack(wire.MAX_REQUEST, wire.CALL, 1) + bytes(1000))
        assert served(gateway, neighbour)
        assert gateway.memory() < before.memory + MOST_GROWTH


@pytest.mark.parametrize("kind", [wire.STDIN_END, wire.CREDIT])
def test_what_comes_before_its_operation_is_bounded(
    gateway: Gateway, neighbour: str, kind: int
) -> None:
    body = bytes(4) if kind == wire.CREDIT else b""
    with quiet(gateway, neighbour) as before, gateway.connect() as caller:
        caller.begin(op="doctor", fresh=True)  # takes seconds, and has no use for these
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                caller.socket.sendall(wire.frame(kind, 1, body) * 5000)
        assert caller.was_cut_off()
        assert gateway.memory() < before.memory + MOST_GROWTH


def test_answers_that_are_not_read_are_bounded(gateway: Gateway, neighbour: str) -> None:
    """A client that asks without end and reads nothing is not heard any more."""
    with quiet(gateway, neighbour) as before, gateway.connect() as caller:
        caller.socket.settimeout(1.0)
        ask = b"".join(
            wire.frame(wire.CALL, n, wire.pack({"op": "metrics"})) for n in range(1, 1000)
        )
        with contextlib.suppress(TimeoutError, ConnectionError):
            for _ in range(100):
                caller.socket.sendall(ask)
        assert served(gateway, neighbour)
        assert gateway.memory() < before.memory + MOST_GROWTH


def test_a_thousand_operations_that_their_client_leaves_are_ended(
    gateway: Gateway, neighbour: str
) -> None:
    with quiet(gateway, neighbour):
        caller = gateway.connect()
        for _ in range(300):
            caller.begin(op="connect", session={"id": neighbour}, host="localhost", port=9)
            caller.begin(op="list", session={"id": neighbour}, path="/usr", depth=50)
        caller.socket.close()


# TLS and gRPC.


def dial(gateway: Gateway) -> socket.socket:
    host, _, port = gateway.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def answered(gateway: Gateway) -> bool:
    """Whether a new client is served, in time."""
    began = time.monotonic()
    with gateway.channel() as channel:
        stub = pb_grpc.SandboxServiceStub(channel)
        stub.ListSessions(pb.ListSessionsRequest(), timeout=PATIENCE)
    return time.monotonic() - began < MOST_SECONDS


def test_who_says_nothing_before_tls_is_given_up(gateway: Gateway, neighbour: str) -> None:
    with quiet(gateway, neighbour), contextlib.ExitStack() as stack:
        silent = [stack.enter_context(dial(gateway)) for _ in range(40)]
        slow = stack.enter_context(dial(gateway))
        slow.sendall(b"\x16\x03\x01\x02")
        assert answered(gateway)
        assert all(item.recv(1) == b"" for item in (*silent, slow))


def test_more_strangers_than_there_is_room_for_go_away_again(
    gateway: Gateway, neighbour: str
) -> None:
    with quiet(gateway, neighbour):
        with contextlib.ExitStack() as stack:
            strangers = [stack.enter_context(dial(gateway)) for _ in range(200)]
            for stranger in strangers:
                with contextlib.suppress(ConnectionError):
                    assert stranger.recv(1) == b""
        assert answered(gateway)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="silence"),
        pytest.param(b"\0" * 500, id="zeroes"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 300, id="broken HTTP/2"),
        pytest.param(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" * 3000, id="settings"
        ),
        pytest.param(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
            + (b"\0\0\x08\6\0\0\0\0\0" + bytes(8)) * 3000,
            id="pings",
        ),
    ],
)
def test_who_speaks_tls_and_then_nonsense_disturbs_nobody(
    gateway: Gateway, neighbour: str, data: bytes
) -> None:
    context = ssl.create_default_context(cafile=str(gateway.ca))
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    with quiet(gateway, neighbour), contextlib.ExitStack() as stack:
        for _ in range(10):
            plain = stack.enter_context(dial(gateway))
            secured = stack.enter_context(context.wrap_socket(plain))
            with contextlib.suppress(OSError):
                secured.sendall(data)
        assert answered(gateway)
        assert served(gateway, neighbour)


def test_huge_metadata_is_refused(gateway: Gateway, neighbour: str) -> None:
    with quiet(gateway, neighbour), gateway.channel() as channel:
        stub = pb_grpc.SandboxServiceStub(channel)
        for size in (20_000, 200_000, 3_000_000):
            with pytest.raises(grpc.RpcError) as failed:
                stub.ListSessions(
                    pb.ListSessionsRequest(),
                    metadata=(("authorization", "x" * size),),
                    timeout=PATIENCE,
                )
            assert failed.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        many = tuple((f"x-{n}", "y" * 50) for n in range(5000))
        with pytest.raises(grpc.RpcError):
            stub.ListSessions(pb.ListSessionsRequest(), metadata=many, timeout=PATIENCE)
        assert answered(gateway)


def test_calls_that_are_cancelled_at_once_leave_nothing(gateway: Gateway, neighbour: str) -> None:
    with quiet(gateway, neighbour), gateway.channel() as channel:
        stub = pb_grpc.SandboxServiceStub(channel)
        asked = pb.ExecRequest(session_id=neighbour, command="sleep 5")
        for _ in range(200):
            stub.Exec.future(asked, timeout=PATIENCE).cancel()
        assert answered(gateway)


def test_streams_that_say_nothing_are_no_burden(gateway: Gateway, neighbour: str) -> None:
    with quiet(gateway, neighbour), gateway.channel() as channel:
        stub = pb_grpc.SandboxServiceStub(channel)
        never = queue.SimpleQueue[pb.RunFrame | None]()
        waiting = [stub.Run(iter(never.get, None)) for _ in range(20)]
        assert answered(gateway)
        for call in waiting:
            call.cancel()
            never.put(None)


def test_nothing_of_all_this_was_a_surprise(gateway: Gateway) -> None:
    assert gateway.complaints() == []
