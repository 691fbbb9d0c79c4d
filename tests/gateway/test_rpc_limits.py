"""Limits that a program met, over gRPC."""

from __future__ import annotations

from k8e._generated import sandbox_pb2 as pb
from k8e.gateway import rpc_contexts, rpc_service
from k8e.guest import wire
from k8e.model import MIB, Limits
from k8e.sessions.limiting import describe, describe_timeout

EXIT = {"code": 1, "status": "completed", "duration_ms": 3}
MET = describe(Limits(disk=8 * MIB), "disk")


def test_the_end_of_a_program_names_the_limits_that_it_met() -> None:
    end = rpc_service._ending(wire.pack({**EXIT, "limits": [MET]}))  # pyright: ignore[reportPrivateUsage]
    assert end.limits == [pb.ReachedLimit(limit="disk", value=8 * MIB, message=str(MET["message"]))]
    assert rpc_service._ending(wire.pack(EXIT)).limits == []  # pyright: ignore[reportPrivateUsage]


def test_seconds_of_a_time_out_are_rounded_up() -> None:
    met = [describe_timeout(0.5), describe_timeout(3)]
    end = rpc_service._ending(wire.pack({**EXIT, "limits": met}))  # pyright: ignore[reportPrivateUsage]
    assert [(item.limit, item.value) for item in end.limits] == [("timeout", 1), ("timeout", 3)]


def test_the_end_of_a_run_in_a_context_does_too() -> None:
    told = {**EXIT, "execution_count": 1, "context_state": "ready", "limits": [MET]}
    assert [item.limit for item in rpc_contexts._end(told).limits] == ["disk"]  # pyright: ignore[reportPrivateUsage]
