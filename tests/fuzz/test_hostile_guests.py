"""A guest that says anything at all can neither crash, block nor grow the gateway.

A program of ours sits in the place of the guest, on the real link of a real session. It knows the
key, as somebody would who is root in the sandbox and has taken the guest over.
"""

from __future__ import annotations

import statistics
import struct
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import grpc
import pytest

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from k8e.guest import wire
from tests.fuzz.gateways import MOST_GROWTH, MOST_SECONDS, Caller, Gateway, Impostor, quiet

MIB = 1 << 20
SOME = 256 << 10
TINY = b"".join(wire.frame(wire.OUT, 1, wire.SEQ.pack(n) + b"x") for n in range(2000))


@contextmanager
def victim(gateway: Gateway, **exec_fields: object) -> Generator[tuple[str, Caller, Impostor, int]]:
    """A session whose guest is taken over, and a client that waits for a command in it."""
    session_id = gateway.create()
    with Impostor(gateway, session_id) as impostor, gateway.connect() as client:
        client.begin(op="exec", session={"id": session_id}, argv=["true"], **exec_fields)
        yield session_id, client, impostor, impostor.call("exec")


def numbered(seq: int, data: bytes) -> bytes:
    return wire.SEQ.pack(seq) + data


BREACHES: dict[str, Callable[[int], bytes]] = {
    "a length of four gigabytes": lambda channel: wire.HEADER.pack(0xFFFFFFFF, wire.OUT, channel),
    "a frame of no kind": lambda channel: wire.frame(251, channel, b"x"),
    "a call of its own": lambda channel: wire.frame(wire.CALL, channel, wire.pack({"op": "stop"})),
    "more output than its credit": lambda channel: b"".join(
        wire.frame(wire.OUT, channel, numbered(n << 18, bytes(1 << 18))) for n in range(5)
    ),
    "output of nothing": lambda channel: wire.frame(wire.ERR, channel, numbered(0, b"")),
    "two answers": lambda channel: wire.frame(wire.RESULT, channel, wire.pack({})) * 2,
    "a value of a megabyte": lambda channel: wire.frame(wire.RESULT, channel, bytes(MIB)),
    "credit for nothing": lambda channel: wire.frame(wire.CREDIT, channel, b"\xff" * 4),
    "the end of something else": lambda channel: wire.frame(wire.END, channel),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_ends_the_session_and_says_why(
    gateway: Gateway, neighbour: str, breach: str
) -> None:
    with quiet(gateway, neighbour):
        with victim(gateway) as (session_id, client, impostor, channel):
            impostor.socket.sendall(BREACHES[breach](channel))
            _, body = client.until(wire.ERROR)
            told = wire.unpack_dict(body)
            assert told["code"] == "sandbox_died", told
            assert "broke the protocol" in told["message"]
        assert "broke the protocol" in gateway.ended(session_id)
    assert not gateway.sandbox(session_id).exists()


NONSENSE = {
    "nothing": b"",
    "garbage": b"\xff" * 300,
    "a list": wire.pack([1, 2]),
    "nested deeply": b"l\0\0\0\1" * 4000 + b"N",
    "a hundred thousand values": wire.pack([None] * 100_000),
    "a huge dict": wire.pack({f"k{n}": n for n in range(10_000)}),
    "no text": wire.pack({"code": "\udcff\udc80", "status": b"\xff", "message": "\udcff"}),
    "huge numbers": wire.pack({"code": (1 << 63) - 1, "duration_ms": -(1 << 63), "seq": 1 << 62}),
    "infinite": b"d\0\0\0\1s\0\0\0\4code" + struct.pack("!Bd", 102, float("inf")),
    "denials of its own": wire.pack({"code": 0, "status": "completed", "denials": [7, "x", {}]}),
}


@pytest.mark.parametrize("kind", [wire.RESULT, wire.EXIT, wire.ERROR])
def test_answers_that_mean_nothing_reach_only_who_asked(
    gateway: Gateway, neighbour: str, kind: int
) -> None:
    with quiet(gateway, neighbour):
        session_id = gateway.create()
        with Impostor(gateway, session_id) as impostor, gateway.connect() as client:
            for body in NONSENSE.values():
                client.begin(op="exec", session={"id": session_id}, argv=["true"])
                channel = impostor.call("exec")
                if kind == wire.EXIT:
                    impostor.result(channel, id="x")
                impostor.send(kind, channel, body)
                client.until(kind)
                impostor.send(wire.EXIT, channel, wire.pack({"code": 0}))
        gateway.destroy(session_id)


def test_output_in_single_bytes_holds_nobody_up(gateway: Gateway, neighbour: str) -> None:
    """The client reads and grants more, so that it goes on for as long as the guest likes."""
    with quiet(gateway, neighbour), victim(gateway) as (session_id, client, impostor, channel):
        impostor.result(channel, id="x")
        stop = threading.Event()

        def drink() -> None:
            taken = 0
            while not stop.is_set():
                kind, number, body = client.receive()
                if kind == wire.OUT:
                    taken += len(body) - wire.SEQ.size
                if taken > 100_000:
                    client.send(wire.CREDIT, number, wire.CREDIT_BODY.pack(taken))
                    taken = 0

        frames = TINY.replace(
            wire.HEADER.pack(9, wire.OUT, 1), wire.HEADER.pack(9, wire.OUT, channel)
        )
        reader = threading.Thread(target=drink, daemon=True)
        writer = threading.Thread(target=impostor.push, args=(frames, 2.0), daemon=True)
        reader.start()
        writer.start()
        times: list[float] = []
        with gateway.connect() as caller:
            while writer.is_alive():
                times.append(caller.run(neighbour, "true"))
        assert len(times) > 3
        assert statistics.median(times) < MOST_SECONDS
        stop.set()
        impostor.send(wire.OUT, channel, numbered(0, b"last"))
        reader.join(10)
        gateway.destroy(session_id)


@pytest.mark.parametrize("kinds", [(wire.OUT,), (wire.OUT, wire.ERR)])
def test_single_bytes_for_a_client_that_does_not_read_fill_no_memory(
    gateway: Gateway, neighbour: str, kinds: tuple[int, ...]
) -> None:
    with quiet(gateway, neighbour) as before, victim(gateway) as (session_id, _, impostor, channel):
        impostor.result(channel, id="x")
        bodies = [numbered(n, b"x") for n in range(len(kinds))]
        pattern = b"".join(map(wire.frame, kinds, [channel] * len(kinds), bodies))
        sent = 0
        while sent < MIB - 4096:  # its credit
            impostor.socket.sendall(pattern * 1000)
            sent += 1000 * len(kinds)
        with gateway.connect() as caller:
            assert caller.run(neighbour, "true") < MOST_SECONDS
        assert gateway.memory() < before.memory + MOST_GROWTH
        gateway.destroy(session_id)


def test_a_transcript_in_single_bytes_is_put_together_in_time(
    gateway: Gateway, neighbour: str
) -> None:
    """Who gathers output for an answer does so without copying it again for each byte."""
    with quiet(gateway, neighbour), gateway.channel() as channel:
        session_id = gateway.create()
        with Impostor(gateway, session_id) as impostor:
            asked = pb.GetTranscriptRequest(session_id=f"{session_id}.x", limit=SOME)
            stub = pb_grpc.SandboxServiceStub(channel)
            transcript = stub.GetTranscript.future(asked, timeout=30)
            number = impostor.call("attach")
            impostor.result(number, id="x", code=None, seq=SOME, duration_ms=1, status="running")
            for start in range(0, SOME, 1024):
                impostor.socket.sendall(
                    b"".join(
                        wire.frame(wire.OUT + n % 2, number, numbered(n, b"x"))
                        for n in range(start, start + 1024)
                    )
                )
            with gateway.connect() as caller:
                assert caller.run(neighbour, "true") < MOST_SECONDS
            assert transcript.result().next_offset == SOME
        gateway.destroy(session_id)


def test_numbers_beyond_all_messages_are_the_guests_failure(
    gateway: Gateway, neighbour: str
) -> None:
    with quiet(gateway, neighbour), gateway.channel() as channel:
        session_id = gateway.create()
        with Impostor(gateway, session_id) as impostor:
            asked = pb.GetTranscriptRequest(session_id=f"{session_id}.x", limit=10)
            stub = pb_grpc.SandboxServiceStub(channel)
            transcript = stub.GetTranscript.future(asked, timeout=30)
            number = impostor.call("attach")
            impostor.result(number, id="x", code=None, seq=MIB, duration_ms=1, status="running")
            impostor.send(wire.OUT, number, numbered((1 << 64) - 1, bytes(10)))
            assert transcript.code() is grpc.StatusCode.UNAVAILABLE
        gateway.destroy(session_id)


def test_answers_that_nobody_asked_for_end_the_session(gateway: Gateway, neighbour: str) -> None:
    with quiet(gateway, neighbour):
        session_id = gateway.create()
        with Impostor(gateway, session_id) as impostor:
            strays = b"".join(wire.frame(wire.EXIT, 77 + n, b"x") for n in range(5000))
            began = time.monotonic()
            assert not impostor.push(strays, 15.0)
            assert time.monotonic() - began < 15
        assert "what nobody asked" in gateway.ended(session_id)


def test_a_guest_that_never_answers_is_given_up(gateway: Gateway, neighbour: str) -> None:
    with quiet(gateway, neighbour):
        with victim(gateway) as (session_id, client, _, _):
            assert wire.unpack_dict(client.until(wire.ERROR)[1])["code"] == "sandbox_died"
        assert gateway.ended(session_id) == "its guest stopped answering"


def test_a_guest_that_answers_a_ping_with_an_error_is_given_up(
    gateway: Gateway, neighbour: str
) -> None:
    with quiet(gateway, neighbour):
        with victim(gateway) as (session_id, client, impostor, _):
            told = wire.pack({"code": "ENOENT", "message": "no ping"})
            impostor.send(wire.ERROR, impostor.call("ping"), told)
            assert wire.unpack_dict(client.until(wire.ERROR)[1])["code"] == "sandbox_died"
        assert gateway.ended(session_id) == "its guest stopped answering"


def test_half_frames_and_slow_bytes_are_waited_for_by_nobody_else(
    gateway: Gateway, neighbour: str
) -> None:
    with quiet(gateway, neighbour):
        with victim(gateway) as (session_id, client, impostor, channel):
            begun = wire.frame(wire.RESULT, channel, wire.pack({"id": "x" * 200}))
            with gateway.connect() as caller:
                for byte in begun[:-1]:
                    impostor.socket.sendall(bytes([byte]))
                assert caller.run(neighbour, "true") < MOST_SECONDS
            assert wire.unpack_dict(client.until(wire.ERROR)[1])["code"] == "sandbox_died"
        assert gateway.ended(session_id) == "its guest stopped answering"


def test_links_that_come_and_go_leave_nothing(gateway: Gateway, neighbour: str) -> None:
    with quiet(gateway, neighbour):
        session_id = gateway.create()
        with Impostor(gateway, session_id) as impostor:
            for _ in range(100):
                impostor.dial().close()
            strangers = [impostor.connect() for _ in range(50)]
            with gateway.connect() as caller:
                assert caller.run(neighbour, "true") < MOST_SECONDS
            for stranger in strangers:
                stranger.close()
        gateway.destroy(session_id)


def test_a_guest_that_does_not_read_is_asked_no_more(gateway: Gateway, neighbour: str) -> None:
    """A client and a guest that work together cannot leave their bytes with the gateway."""
    with quiet(gateway, neighbour):
        session_id = gateway.create()
        with Impostor(gateway, session_id), gateway.connect() as client:
            code = b"#" + bytes(4 * MIB)
            refused = b""
            for _ in range(20):
                client.begin(
                    op="exec", session={"id": session_id}, code=code, language="python", timeout=60
                )
            _, refused = client.until(wire.ERROR)
            assert "does not read" in str(wire.unpack_dict(refused)["message"])
            assert gateway.memory() < 400 * MIB
            gateway.destroy(session_id)


def test_nothing_of_all_this_was_a_surprise(gateway: Gateway) -> None:
    assert gateway.complaints() == []
