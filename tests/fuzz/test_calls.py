"""Every call of the gateway with nonsense for arguments: answered, or refused, and in time."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import grpc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from k8e.gateway.rpc.service import RPCS
from k8e.gateway.service import OPERATIONS as GATEWAY_OPERATIONS
from k8e.guest import wire
from k8e.sessions.operations import OPERATIONS
from tests.fuzz import messages
from tests.fuzz.gateways import MOST_GROWTH, MOST_SECONDS, PATIENCE, Caller, Gateway, quiet
from tests.fuzz.running import fuzz
from tests.fuzz.values import fields, frames

CLIENT_KINDS = [
    wire.CALL,
    wire.STDIN,
    wire.STDIN_END,
    wire.CREDIT,
    wire.CANCEL,
    wire.DATA,
    wire.END,
]
LEFT_OUT = {
    "stop",  # ends the gateway, which is what it is for
    "doctor",  # takes seconds, and looks at nothing that it is sent
    "pull_image",  # asks whatever host it is told to
    "create_session",  # has a test of its own: half of what is asked for can be had
}
CALLS = sorted(set(GATEWAY_OPERATIONS) - LEFT_OUT)
NAMES = (
    "session_id tenant id argv code language env cwd timeout window path port host hosts add "
    "remove name template recipe ttl roles lifetime limit approval_id approved action reason "
    "secret snapshot progress ended layers data seq output tty stdin background mode append depth "
    "target signal rows cols grace to kind spec offset since_ns context"
).split()
SPEC = (
    "tenant runtime session_id request_id env labels limits lifetime idle_timeout allowed_hosts "
    "snapshot manifest template rootfs warm"
).split()
WAITS = {"ConfirmAction", "TerminalStream", "Run"}
"""Calls that are answered when somebody else does something."""
SURPRISES = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)


@pytest.fixture(scope="module")
def stubs(gateway: Gateway) -> Generator[dict[str, Any]]:
    """What makes each call of the interface, with bytes for messages."""
    with gateway.channel() as channel:
        found: dict[str, Any] = {}
        for name, method in messages.METHODS.items():
            path = f"/{messages.SERVICE.full_name}/{name}"
            if method.client_streaming:
                found[name] = channel.stream_stream(path)
            elif method.server_streaming:
                found[name] = channel.unary_stream(path)
            else:
                found[name] = channel.unary_unary(path)
        yield found


def outcome(work: Any) -> grpc.StatusCode:
    try:
        answer = work()
        if hasattr(answer, "cancel"):
            for _ in answer:
                break
            answer.cancel()
    except grpc.RpcError as error:
        call: Any = error
        return call.code()
    return grpc.StatusCode.OK


def test_every_rpc_answers_whatever_it_is_sent(
    gateway: Gateway, neighbour: str, stubs: dict[str, Any]
) -> None:
    own = messages.TEXTS | st.sampled_from([neighbour, f"{neighbour}.x", neighbour.upper()])
    # Sandboxes take long to make, and one that is paused answers nothing.
    names = sorted(set(messages.METHODS) - {"CreateSession", "RunSubAgent", "DestroySession"})

    @fuzz(150)
    @given(st.sampled_from(names), st.data())
    def attempt(name: str, data: st.DataObject) -> None:
        method = messages.METHODS[name]
        asked = data.draw(messages.of_message(method.input_type, own))
        if name == "PauseSession":
            asked["session_id"] = "nobody"
        sent = messages.build(method.input_type.name, asked).SerializeToString()
        request: Any = iter([sent]) if method.client_streaming else sent
        seconds = 0.3 if name in WAITS else PATIENCE
        status = outcome(lambda: stubs[name](request, timeout=seconds))
        assert status not in SURPRISES, (name, asked, gateway.complaints()[-2:])
        assert status is not grpc.StatusCode.DEADLINE_EXCEEDED or name in WAITS, (name, asked)

    outcome(lambda: stubs["Exec"](b"", timeout=PATIENCE))  # what names no session gets this one
    before = gateway.memory()
    attempt()
    with gateway.connect() as caller:
        assert caller.run(neighbour, "true") < MOST_SECONDS
    assert gateway.memory() < before + MOST_GROWTH
    assert gateway.complaints() == []


def test_bytes_that_are_no_message_are_refused(gateway: Gateway, stubs: dict[str, Any]) -> None:
    @fuzz(80)
    @given(st.sampled_from(sorted(messages.METHODS)), st.binary(min_size=1, max_size=60))
    def attempt(name: str, sent: bytes) -> None:
        method = messages.METHODS[name]
        with contextlib.suppress(Exception):  # it may be a message after all
            messages.build(method.input_type.name, {}).MergeFromString(sent)
            return
        request: Any = iter([sent]) if method.client_streaming else sent
        status = outcome(lambda: stubs[name](request, timeout=PATIENCE))
        if RPCS[name].declared(GATEWAY_OPERATIONS).public:  # its request is not read
            assert status is grpc.StatusCode.OK
            return
        # Some calls are refused before anybody looks at what they say.
        assert status in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED)

    attempt()
    assert gateway.complaints() == []


# Frames.


def answered(caller: Caller, channel: int) -> bool:
    """Whether a call got its answer; False if the connection was ended instead."""
    try:
        while True:
            kind, number, _ = caller.receive()
            if number == channel and kind in (wire.RESULT, wire.ERROR):
                return True
    except ConnectionError:
        return False


def test_every_call_of_a_local_client_is_answered(gateway: Gateway, neighbour: str) -> None:
    @fuzz(200)
    @given(st.sampled_from(CALLS), fields(NAMES), st.booleans())
    @example("extend_session", {"lifetime": float("inf")}, True)
    @example("extend_session", {"lifetime": 1e308}, True)
    @example("events", {"limit": (1 << 63) - 1}, True)
    def attempt(op: str, call: dict[str, Any], ours: bool) -> None:
        call = {**call, "op": op}
        call.pop("session", None)
        if ours and op not in ("destroy_session", "pause_session", "run_subagent"):
            call["session_id"] = neighbour
        with gateway.connect() as caller:
            assert answered(caller, caller.begin(**call)), call

    with quiet(gateway, neighbour):
        attempt()
    assert gateway.complaints() == []


def test_every_operation_on_a_guest_is_answered(gateway: Gateway, neighbour: str) -> None:
    """What the gateway lets through, the true guest answers, and goes on living."""

    @fuzz(200)
    @given(st.sampled_from(sorted(OPERATIONS)), fields(NAMES), st.lists(frames(CLIENT_KINDS, 1)))
    def attempt(op: str, call: dict[str, Any], more: list[tuple[int, int, bytes]]) -> None:
        call = {**call, "op": op, "session": {"id": neighbour}}
        with gateway.connect() as caller:
            channel = caller.begin(**call)
            assert answered(caller, channel), call
            with contextlib.suppress(ConnectionError):
                for kind, _, body in more:
                    caller.send(kind, channel, body)

    with quiet(gateway, neighbour):
        attempt()
    assert gateway.complaints() == []


def test_sessions_that_cannot_be_are_refused(gateway: Gateway, neighbour: str) -> None:
    @fuzz(60)
    @given(fields(SPEC))
    def attempt(spec: dict[str, Any]) -> None:
        spec = {**spec, "runtime": "no-such-runtime"}  # whatever else is right: none is made
        with gateway.connect() as caller:
            caller.begin(op="create_session", spec=spec)
            assert caller.until(wire.RESULT, wire.ERROR)[0] == wire.ERROR

    with quiet(gateway, neighbour):
        attempt()
    assert gateway.complaints() == []
