"""Contexts against their programs: what these say and print is bounded, whatever they do."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Generator
from typing import Any

import pytest

from k8e.guest import context_runs, contexts, loop, wire
from k8e.guest.wire import EXIT, HELLO, OUT, SHOW, WireError

# The edges of a context are not public: its program is at the other end of them.
# pyright: reportPrivateUsage=false
RESULT: dict[str, Any] = {"data": {"text/plain": "1"}, "main": False, "left_out": []}
PIPE_MOST = 1 << 20


class Stand(contexts.Context):
    """A context whose program is the test; a cell runs in it."""

    def __init__(self) -> None:
        super().__init__(loop.Loop(), "c", "python", "/")
        self._control, self.theirs = socket.socketpair()
        self._control.setblocking(False)
        self.printed, self.prints = os.pipe2(os.O_NONBLOCK)
        self._streams = {self.printed: OUT}
        self.state = "ready"
        self.cell = context_runs.CellExec(self._loop, "e", {"code": b"1"}, self)
        self.add(self.cell)

    def print_all(self) -> int:
        """Fill the pipe; how much that was."""
        count = 0
        while True:
            try:
                count += os.write(self.prints, bytes(4096))
            except BlockingIOError:
                return count

    def say(self, kind: int, number: int, value: dict[str, Any]) -> None:
        self._on_message(kind, number, value)

    def close(self) -> None:
        for fd in [*self._streams, self.prints]:
            os.close(fd)
        self.theirs.close()
        if self._control is not None:
            self._control.close()


@pytest.fixture
def context() -> Generator[Stand]:
    stand = Stand()
    yield stand
    stand.close()


def test_results_do_not_make_the_guest_hold_all_that_is_printed(context: Stand) -> None:
    for _ in range(100):
        context.print_all()
        context.say(SHOW, 1, RESULT)
    most = contexts.DRAINED_AHEAD + contexts.DRAINED * contexts.PIPE_READ
    assert context.cell.output.held < 2 * most


def test_a_result_comes_after_what_was_printed_before_it(context: Stand) -> None:
    while not context.cell.output.full:
        context.print_all()
        context._drain(contexts.DRAINED)
    os.write(context.prints, b"before")
    context.say(SHOW, 1, RESULT)
    kept = context.cell.output
    number = kept.locate(kept.end - 1)
    shown, text = kept.chunk(number), kept.chunk(number - 1)
    assert shown is not None
    assert shown[1] == SHOW
    assert text is not None
    assert text[2].endswith(b"before")


def test_at_its_end_a_cell_gets_all_that_the_largest_pipe_holds(context: Stand) -> None:
    fcntl.fcntl(context.prints, 1031, PIPE_MOST)  # F_SETPIPE_SZ
    count = context.print_all()
    assert count == PIPE_MOST
    context.say(EXIT, 1, {"code": 0})
    assert (context.cell.code, context.cell.output.end) == (0, count)


@pytest.mark.parametrize(("kind", "number"), [(EXIT, 7), (HELLO, 0)])
def test_words_that_mean_nothing_read_nothing(context: Stand, kind: int, number: int) -> None:
    context.print_all()
    context.say(kind, number, {"code": 0})
    assert (context.cell.code, context.cell.output.end) == (None, 0)


def test_a_program_that_takes_no_answers_gets_no_more_of_them(context: Stand) -> None:
    def ask_for_ever() -> None:
        for _ in range(1_000_000):
            context.say(SHOW, 1, {**RESULT, "waits": True})
            context.cell.output.ring = True

    with pytest.raises(WireError, match="takes no answers"):
        ask_for_ever()
    assert len(context._outgoing) < 2 * contexts.UNTAKEN_MOST


def test_code_that_is_taken_in_pieces_arrives_as_it_is(context: Stand) -> None:
    code = os.urandom(1 << 20)
    sent = wire.frame(wire.CALL, 2, code)
    taken = context.theirs.recv(1 << 20)
    context._tell(sent)
    while context._outgoing:
        taken += context.theirs.recv(1 << 20)
        context._flush()
    taken += context.theirs.recv(1 << 20)
    assert taken.endswith(sent)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (SHOW, {"data": {"a": [None] * 100_000}}),
        (SHOW, {"data": {}, "main": [None] * 100_000}),
        (SHOW, {**{f"k{n}": None for n in range(9)}, "data": {}}),
        (EXIT, {"code": [None] * (context_runs.MAX_WORD + 1)}),
        (HELLO, {"": bytes(context_runs.MAX_WORD)}),
    ],
)
def test_a_million_tiny_values_are_refused_unread(
    kind: int, value: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(context_runs, "unpack_dict")
    with pytest.raises(WireError):
        context_runs.FramedTalk([]).feed(wire.frame(kind, 1, wire.pack(value)))


def test_what_programs_say_is_read() -> None:
    shown = {**RESULT, "waits": True}
    said = wire.frame(SHOW, 1, wire.pack(shown)) + wire.frame(EXIT, 1, wire.pack({"code": 3}))
    assert context_runs.FramedTalk([]).feed(said) == [(SHOW, 1, shown), (EXIT, 1, {"code": 3})]


class Asked:
    """A channel: what is said on it."""

    handler: Any = None

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []

    def send(self, kind: int, body: bytes) -> None:
        assert kind == wire.RESULT
        self.said.append(wire.unpack_dict(body))


def interrupted(stand: Stand) -> dict[str, Any]:
    """What whoever interrupts the context is told at once."""
    table = contexts.Contexts(stand._loop, None)
    table._by_id["c"] = stand
    channel = Asked()
    table.operations()["interrupt_context"](channel, {"id": "c"})
    (told,) = channel.said
    return told


def test_an_interrupt_while_a_context_starts_ends_the_first_cell_in_line(context: Stand) -> None:
    context.cell.end(0)
    context.state = "starting"
    first, second = (
        context_runs.CellExec(context._loop, name, {"code": b"1"}, context) for name in "ab"
    )
    context.add(first)
    context.add(second)
    told = interrupted(context)
    assert (told["interrupted"], told["stopped"], told["waiting"]) == (True, True, 1)
    assert (first.code, second.code) == (130, None)
    assert first.error is not None
    assert first.error["name"] == "KeyboardInterrupt"
    context.say(HELLO, 0, {})
    assert context.current is second


def test_an_interrupt_of_a_context_that_has_nothing_to_do_is_told_as_such(context: Stand) -> None:
    context.cell.end(0)
    told = interrupted(context)
    assert (told["interrupted"], told["stopped"]) == (False, True)
