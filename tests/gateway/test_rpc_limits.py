"""Limits that a program met, over gRPC."""

from __future__ import annotations

import pytest

from k8e import errors
from k8e._generated import sandbox_pb2 as pb
from k8e.gateway.rpc import contexts, server, service
from k8e.guest import wire
from k8e.model import MIB, Limits
from k8e.sessions.limits import describe, describe_timeout

EXIT = {"code": 1, "status": "completed", "duration_ms": 3}
MET = describe(Limits(disk=8 * MIB), "disk")


def test_the_end_of_a_program_names_the_limits_that_it_met() -> None:
    end = service._ending(wire.pack({**EXIT, "limits": [MET]}))  # pyright: ignore[reportPrivateUsage]
    assert end.limits == [pb.ReachedLimit(limit="disk", value=8 * MIB, message=str(MET["message"]))]
    assert service._ending(wire.pack(EXIT)).limits == []  # pyright: ignore[reportPrivateUsage]


def test_seconds_of_a_time_out_are_rounded_up() -> None:
    met = [describe_timeout(0.5), describe_timeout(3)]
    end = service._ending(wire.pack({**EXIT, "limits": met}))  # pyright: ignore[reportPrivateUsage]
    assert [(item.limit, item.value) for item in end.limits] == [("timeout", 1), ("timeout", 3)]


def test_the_end_of_a_run_in_a_context_does_too() -> None:
    told = {**EXIT, "execution_count": 1, "context_state": "ready", "limits": [MET]}
    assert [item.limit for item in contexts._end(told).limits] == ["disk"]  # pyright: ignore[reportPrivateUsage]


def test_a_message_of_too_many_items_is_refused_before_it_is_read() -> None:
    many = server.MAX_FIELDS + 1
    read = server.reading(pb.CreateSessionRequest)
    for bomb in (
        pb.CreateSessionRequest(allowed_hosts=["a.example"] * many),
        pb.CreateSessionRequest(env={f"a{n}": "" for n in range(many)}),
    ):
        with pytest.raises(errors.InvalidRequest, match="more than"):
            read(bomb.SerializeToString())


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_large_and_broken_messages_are_left_to_the_parser(cut: int) -> None:
    large = pb.WriteFileRequest(session_id="a", path="b", content="\u00ff" * (1 << 20))
    data = large.SerializeToString()
    if not cut:
        assert server.reading(pb.WriteFileRequest)(data) == large
        return
    with pytest.raises(errors.InvalidRequest, match="this is no WriteFileRequest"):
        server.reading(pb.WriteFileRequest)(data[:-cut])
