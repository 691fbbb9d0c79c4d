"""Run carries the unix socket's frames over gRPC."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from k8e.guest import wire
from tests.gateway.serving import Frames, Running, failing
from tests.gateway.test_rpc import ended

Stub = pb_grpc.SandboxServiceStub
MIB = 1 << 20


@pytest.fixture
def frames(channel: grpc.Channel) -> Iterator[Frames]:
    with Frames(channel) as frames:
        yield frames


def output(frames: list[pb.RunFrame], kind: int) -> bytes:
    return b"".join(frame.body[wire.SEQ.size :] for frame in frames if frame.kind == kind)


def test_the_gateway_itself_answers(frames: Frames, running: Running) -> None:
    frames.ask(7, op="status")
    answer = frames.result(7)
    assert answer["pid"] == running.pid


def test_a_program_gets_stdin_and_gives_output_and_exit(frames: Frames, session: str) -> None:
    argv = ["sh", "-c", "cat; echo bad >&2; exit 9"]
    frames.ask(1, op="exec", argv=argv, stdin=True, session={"id": session})
    assert frames.result(1)["session_id"] == session
    frames.send(wire.STDIN, 1, b"\xff\0 raw")
    frames.send(wire.STDIN_END, 1)
    got = frames.until(wire.EXIT)
    assert output(got, wire.OUT) == b"\xff\0 raw"
    assert output(got, wire.ERR) == b"bad\n"
    assert wire.unpack_dict(got[-1].body)["code"] == 9


def test_one_stream_serves_many_operations_one_after_the_other(
    frames: Frames, session: str
) -> None:
    for number in range(1, 30):
        argv = ["echo", str(number)]
        frames.ask(number, op="exec", argv=argv, session={"id": session})
        got = frames.until(wire.EXIT)
        assert {frame.channel for frame in got} == {number}
        assert output(got, wire.OUT) == f"{number}\n".encode()


def test_one_stream_serves_many_operations_at_once(frames: Frames, session: str) -> None:
    frames.ask(1, op="exec", argv=["cat"], stdin=True, session={"id": session})
    frames.result(1)
    frames.ask(2, op="exec", argv=["echo", "second"], session={"id": session})
    got = frames.until(wire.EXIT)
    assert {frame.channel for frame in got} == {2}
    frames.send(wire.STDIN_END, 1)
    assert frames.until(wire.EXIT)[-1].channel == 1


def test_a_channel_is_free_again_when_its_operation_ended(frames: Frames, session: str) -> None:
    for _ in range(3):
        frames.ask(1, op="stat", path="/workspace", session={"id": session})
        assert frames.result(1)["type"] == "dir"
        frames.ask(1, op="write", path="again", session={"id": session})
        upload(frames, 1, b"x")
        frames.ask(1, op="read", path="again", session={"id": session})
        assert list(download(frames, 1)) == [b"x"]


def test_errors_come_as_frames_and_leave_the_stream_open(frames: Frames, session: str) -> None:
    frames.ask(1, op="read", path="missing", session={"id": session})
    error = frames.until(wire.ERROR)[-1]
    assert wire.unpack_dict(error.body)["code"] == "ENOENT"
    frames.ask(2, op="read", path="x", session={"id": "nobodys"})
    error = frames.until(wire.ERROR)[-1]
    assert wire.unpack_dict(error.body)["code"] == "session_not_found"
    frames.ask(3, op="status")
    assert frames.result(3)


def upload(frames: Frames, channel: int, data: bytes) -> None:
    """Send as a client must: no more than there is credit for."""
    frames.result(channel)
    room, at = wire.WINDOW, 0
    while at < len(data):
        part = data[at : at + min(wire.CHUNK, room)]
        if not part:
            room += wire.CREDIT_BODY.unpack(frames.until(wire.CREDIT)[-1].body)[0]
            continue
        frames.send(wire.DATA, channel, part)
        room -= len(part)
        at += len(part)
    frames.send(wire.END, channel)
    frames.until(wire.RESULT)


def download(frames: Frames, channel: int) -> Iterator[bytes]:
    frames.result(channel)
    while (frame := frames.receive()).kind == wire.DATA:
        yield frame.body
        frames.send(wire.CREDIT, channel, wire.CREDIT_BODY.pack(len(frame.body)))
    assert frame.kind == wire.END


def test_files_above_any_message_size_pass_and_memory_stays(
    frames: Frames, session: str, running: Running
) -> None:
    data = hashlib.shake_128(b"k8e").digest(MIB) * 100
    before = resident(running.pid)
    frames.ask(1, op="write", path="hundred", session={"id": session})
    upload(frames, 1, data)
    frames.ask(2, op="read", path="hundred", session={"id": session})
    got = hashlib.sha256()
    for part in download(frames, 2):
        got.update(part)
    assert got.digest() == hashlib.sha256(data).digest()
    assert resident(running.pid) - before < 40 * MIB
    frames.ask(3, op="remove", path="hundred", session={"id": session})
    frames.result(3)


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_a_client_that_leaves_kills_what_asked_for_it(
    channel: grpc.Channel, stub: Stub, session: str, how: str
) -> None:
    with Frames(channel) as frames:
        argv = ["sh", "-c", f"echo $$ > run-{how}; echo up; sleep 300"]
        call = {"op": "exec", "argv": argv, "kill_on_disconnect": True}
        frames.ask(1, **call, session={"id": session})
        frames.until(wire.OUT)
        if how == "close":
            frames.close()
            assert list(frames.call) == []
        else:
            frames.call.cancel()
    assert ended(stub, session, f"run-{how}")


@pytest.mark.parametrize(
    ("kind", "body", "text"),
    [
        (99, b"", "frames of kind 99"),
        (wire.RESULT, b"", "frames of kind 16"),
        (wire.CREDIT, b"12345", "malformed credit"),
        (wire.CALL, wire.pack({}), "cannot be opened"),
    ],
)
def test_a_client_that_misuses_an_open_channel_is_told(
    frames: Frames, session: str, kind: int, body: bytes, text: str
) -> None:
    call = {"op": "exec", "argv": ["sleep", "300"], "kill_on_disconnect": True}
    frames.ask(1, **call, session={"id": session})
    frames.result(1)
    frames.send(kind, 1, body)
    failed = failing(lambda: list(frames.call))
    assert failed.status is grpc.StatusCode.INVALID_ARGUMENT
    assert text in failed.details


@pytest.mark.parametrize(
    ("body", "text"),
    [(b"Z\0\0\0\0", "unknown tag"), (wire.pack([1]), "a dict"), (bytes(17 * MIB), "more than")],
    ids=["value", "type", "size"],
)
def test_a_malformed_call_ends_the_stream(frames: Frames, body: bytes, text: str) -> None:
    frames.send(wire.CALL, 1, body)
    failed = failing(lambda: list(frames.call))
    assert failed.status is grpc.StatusCode.INVALID_ARGUMENT
    assert text in failed.details


def test_a_client_that_sends_beyond_its_credit_is_told(channel: grpc.Channel, session: str) -> None:
    with Frames(channel) as frames:
        frames.ask(1, op="exec", argv=["sleep", "300"], stdin=True, session={"id": session})
        frames.result(1)
        for _ in range(8):
            frames.send(wire.STDIN, 1, bytes(wire.CHUNK))
        failed = failing(lambda: list(frames.call))
    assert failed.status is grpc.StatusCode.INVALID_ARGUMENT
    assert "credit" in failed.details


def test_a_time_out_is_named_as_the_limit_that_ended_a_run(frames: Frames, session: str) -> None:
    for number, (script, code) in enumerate(
        [("sleep 60", 143), ("trap 'exit 0' TERM; while :; do sleep 0.01; done", 0)], 1
    ):
        argv = ["/bin/bash", "-c", script]
        frames.ask(number, op="exec", argv=argv, timeout=0.5, session={"id": session})
        end = wire.unpack_dict(frames.until(wire.EXIT)[-1].body)
        assert (end["status"], end["code"]) == ("timed_out", code)
        assert [(item["limit"], item["value"]) for item in end["limits"]] == [("timeout", 0.5)]
    call = {"op": "exec", "code": b"import time; time.sleep(60)", "context": "slow"}
    frames.ask(3, **call, make_context="python", timeout=0.5, session={"id": session})
    end = wire.unpack_dict(frames.until(wire.EXIT)[-1].body)
    assert [(item["limit"], item["value"]) for item in end["limits"]] == [("timeout", 0.5)]
    frames.ask(4, op="remove_context", id="slow", session={"id": session})
    frames.result(4)


@pytest.fixture
def terse(frames: Frames) -> Iterator[str]:
    """A session whose programs may print 4 KiB."""
    spec = {"runtime": "container", "limits": {"output": 4096}}
    frames.ask(900, op="create_session", spec=spec)
    session_id = str(frames.result(900)["session"]["session_id"])
    yield session_id
    frames.ask(900, op="destroy_session", session_id=session_id)
    frames.result(900)


def printing(frames: Frames, session_id: str, size: int, **call: object) -> pb.RunFrame:
    """The last frame of a program that prints ``size`` random bytes."""
    argv = ["head", "-c", str(size), "/dev/urandom"]
    frames.ask(1, op="exec", argv=argv, session={"id": session_id}, **call)
    return frames.until(wire.EXIT, wire.ERROR)[-1]


def test_no_client_lifts_the_output_limit_of_its_session(frames: Frames, terse: str) -> None:
    for most in (1 << 62, 4097):
        refused = printing(frames, terse, 100_000, most_output=most)
        assert refused.kind == wire.ERROR
        told = wire.unpack_dict(refused.body)
        assert told["code"] == "limit_exceeded"
        assert "the limit output of the session is 4096 bytes" in told["message"]
    for fields in ({}, {"most_output": 0}, {"most_output": 4096}, {"most_output": 100}):
        ended = wire.unpack_dict(printing(frames, terse, 100_000, **fields).body)
        assert (ended["status"], ended["limits"][0]["limit"]) == ("killed", "output")
        assert ended["seq"] <= 4096
    assert wire.unpack_dict(printing(frames, terse, 4000).body)["code"] == 0


def test_the_gateways_own_programs_are_not_bound_by_it(frames: Frames, terse: str) -> None:
    argv = ["sh", "-c", "head -c 100000 /dev/urandom > random"]
    frames.ask(1, op="exec", argv=argv, session={"id": terse})
    frames.until(wire.EXIT)
    frames.ask(2, op="save_snapshot", session_id=terse, name="of-a-terse-one")
    assert frames.result(2)["size_bytes"] > 100_000
    frames.ask(3, op="delete_snapshot", name="of-a-terse-one")
    frames.result(3)
