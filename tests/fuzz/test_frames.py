"""Frames in both directions: what guests send, what clients send, and the values inside."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from k8e import errors, link
from k8e._generated import sandbox_pb2 as pb
from k8e.gateway import frames as gateway_frames
from k8e.gateway.rpc import runs
from k8e.guest import wire
from k8e.sessions.exchange import FrameQueue, GuestExchange
from k8e.sessions.operations import Course, Operation
from tests.fuzz.running import fuzz
from tests.fuzz.values import damaged, frames

GUEST_KINDS = [
    wire.RESULT,
    wire.ERROR,
    wire.OUT,
    wire.ERR,
    wire.SHOW,
    wire.EXIT,
    wire.DATA,
    wire.END,
    wire.CREDIT,
]
OPERATIONS = ["exec", "attach", "read", "write", "list", "connect", "ping", "stat"]
KEY = b"k" * link.KEY_SIZE


# Values.


@fuzz(400)
@given(st.binary(max_size=400) | damaged(wire.pack({"op": "exec", "argv": ["a", None, 1.5, b"x"]})))
@example(b"l\0\0\0\1" * 20_000 + b"N")
@example(b"d\xff\xff\xff\xff")
@example(b"d\0\0\0\1s\xff\xff\xff\xffN")
def test_bytes_are_a_value_or_a_wire_error(data: bytes) -> None:
    try:
        value = wire.unpack(data)
    except wire.WireError:
        return
    assert wire.unpack(wire.pack(value), len(data)) == value or value != value


@pytest.mark.parametrize("item", [b"N", b"F", b"l\0\0\0\0", b"d\0\0\0\0", b"s\0\0\0\0"])
@pytest.mark.parametrize("shape", ["flat", "in pieces"])
def test_no_value_takes_long_to_read(item: bytes, shape: str) -> None:
    """However it is cut: its parts are counted, not those of one list."""
    inner = b"l" + wire.CREDIT_BODY.pack(1000) + item * 1000
    if shape == "flat":
        data = b"l" + wire.CREDIT_BODY.pack(1 << 20) + item * (1 << 20)
    else:
        data = b"l" + wire.CREDIT_BODY.pack(2000) + inner * 2000
    began = time.thread_time()
    with pytest.raises(wire.WireError):
        wire.unpack(data)
    assert time.thread_time() - began < 1


@fuzz(40)
@given(st.lists(frames(GUEST_KINDS, 3), max_size=12), st.data())
def test_frames_are_the_same_however_they_are_cut_and_taken(
    sent: list[tuple[int, int, bytes]], data: st.DataObject
) -> None:
    stream = b"".join(wire.frame(*item) for item in sent)
    splitter, found = wire.Splitter(wire.MAX_REPLY), list[tuple[int, int, bytes]]()
    at = 0
    while at < len(stream):
        end = data.draw(st.integers(at + 1, len(stream)))
        left: bytes | memoryview | None = stream[at:end]
        while left is not None:
            taken, left = splitter.take(left, data.draw(st.integers(1, 3)))
            found += taken
        at = end
    assert found == sent


@fuzz(100)
@given(st.lists(st.none() | frames(GUEST_KINDS, 3), max_size=40))
def test_what_waits_comes_out_as_it_went_in(steps: list[tuple[int, int, bytes] | None]) -> None:
    waiting, model = FrameQueue(), list[tuple[int, int, bytes]]()
    for step in steps:
        if step is not None:
            waiting.put(*step)
            model.append(step)
        elif model:
            assert waiting.next_size() == len(wire.frame(*model[0]))
            assert waiting.take() == model.pop(0)
        assert bool(waiting) == bool(model)
        assert waiting.size == sum(len(wire.frame(*item)) for item in model)


@fuzz(60)
@given(st.lists(frames(GUEST_KINDS, 3), max_size=30), st.integers(0, 5))
def test_a_grpc_stream_carries_all_frames_in_order_and_ends_after_them(
    sent: list[tuple[int, int, bytes]], large: int
) -> None:
    async def play() -> None:
        outgoing = runs._Outgoing()  # pyright: ignore[reportPrivateUsage]
        sent.extend((wire.OUT, 1, bytes(20_000)) for _ in range(large))
        for item in sent:
            outgoing.send(*item)
        outgoing.end(None)
        found: list[tuple[int, int, bytes]] = []
        while isinstance(message := await outgoing.get(), pb.RunFrame):
            found += [(item.kind, item.channel, item.body) for item in (message, *message.rest)]
        assert message is None
        assert found == sent

    asyncio.run(play())


def test_many_single_bytes_go_in_messages_that_take_no_time_to_make() -> None:
    async def play() -> None:
        outgoing = runs._Outgoing()  # pyright: ignore[reportPrivateUsage]
        for _ in range(5000):
            outgoing.send(wire.OUT, 1, bytes(9))
        sizes: list[int] = []
        while sum(sizes) < 5000:
            message = await outgoing.get()
            assert isinstance(message, pb.RunFrame)
            sizes.append(1 + len(message.rest))
        assert 100 < max(sizes) < 1000

    asyncio.run(play())


# Guests.


class Transport:
    """What the link writes to, and how it is told to stop."""

    def __init__(self) -> None:
        self.closed = False
        self.paused = False
        self.written = 0

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True

    def writelines(self, parts: list[bytes]) -> None:
        self.written += sum(map(len, parts))

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int) -> None: ...

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


async def linked() -> tuple[link.Link, Transport, list[str]]:
    """A link whose guest has proved itself, and what it was found to do wrong."""
    breaches: list[str] = []
    made = link.Link(KEY, lambda _: None, lambda _: None, on_breach=breaches.append)
    transport = Transport()
    made.connection_made(cast("asyncio.Transport", transport))
    nonces: list[bytes] = []
    transport.writelines = lambda parts: nonces.append(parts[1][:16])
    made.data_received(wire.frame(wire.HELLO, 0, bytes(16)))
    made.data_received(wire.frame(wire.PROOF, 0, wire.proof(KEY, nonces[0], b"guest")))
    del transport.writelines
    return made, transport, breaches


class Ending(Course):
    """Writes down with which frame each operation ended."""

    def __init__(self, kinds: list[int]) -> None:
        self._kinds = kinds

    def after_answer(self, operation: Operation, kind: int, body: bytes) -> None:
        self._kinds.append(kind)


@fuzz(100)
@given(
    st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=4),
    st.lists(frames(GUEST_KINDS, 5), max_size=25),
    st.binary(max_size=20),
)
def test_a_guest_that_says_anything_is_heard_or_cut_off(
    asked: list[str], said: list[tuple[int, int, bytes]], last: bytes
) -> None:
    async def play() -> None:
        made, transport, breaches = await linked()
        heard: list[int] = []
        done: list[int] = []
        for op in asked:
            operation = Operation(op, lambda kind, body: heard.append(len(body)), Ending(done))
            operation.attach(made.open({"op": op, "window": 200}, operation.receive, lambda: None))
        made.data_received(b"".join(wire.frame(*item) for item in said) + last)
        for _ in range(2 + len(said)):  # the turns that it takes
            await asyncio.sleep(0)
        assert not transport.paused
        assert transport.closed == bool(breaches)
        assert len(done) <= len(asked)
        made.connection_lost(None)

    asyncio.run(play())


class Guest:
    """An operation's other end, which answers with whatever it was given."""

    def __init__(self, op: str, said: list[tuple[int, bytes]]) -> None:
        self._op, self._said = op, said

    async def open(self, call: dict[str, Any], on_frame: link.FrameSink) -> Operation:
        operation = Operation(self._op, on_frame)
        for kind, body in self._said:
            try:
                operation.receive(kind, body)
            except wire.WireError:
                operation.fail(errors.SandboxDied("a breach"))
        if not operation.done:
            operation.fail(errors.SandboxDied("over"))
        return operation


@fuzz(80)
@given(st.sampled_from(OPERATIONS), st.lists(frames(GUEST_KINDS, 0), max_size=12))
def test_an_exchange_ends_with_an_answer_or_an_error_of_ours(
    op: str, said: list[tuple[int, int, bytes]]
) -> None:
    async def play() -> None:
        guest = Guest(op, [(kind, body) for kind, _, body in said])
        async with asyncio.timeout(5) as patience:
            try:
                async with GuestExchange(guest.open, {"op": op}) as exchange:
                    await exchange.result()
                    while exchange._frames:  # pyright: ignore[reportPrivateUsage]
                        await exchange.receive()
            except (errors.K8eError, OSError):
                pass
        assert not patience.expired()

    asyncio.run(play())


# Clients.


def test_the_bounds_of_what_waits_are_what_they_say() -> None:
    early = gateway_frames.Early()
    pending = gateway_frames.PendingChannel(early)
    for _ in range(5000):
        pending.send(wire.STDIN, b"x")  # joined
    for _ in range(gateway_frames.MAX_EARLY_FRAMES - 1):
        pending.send(wire.STDIN_END, b"")
    with pytest.raises(errors.InvalidRequest):
        pending.send(wire.STDIN_END, b"")
    assert pending.leave()[0] == (wire.STDIN, b"x" * 5000)
    assert early.size == 0
    for _ in range(64):
        gateway_frames.PendingChannel(early).send(wire.DATA, bytes(1 << 20))
    with pytest.raises(errors.InvalidRequest):
        gateway_frames.PendingChannel(early).send(wire.DATA, b"x")
