"""The transcript of a session: all that its programs print, numbered, bounded, without secrets."""

from __future__ import annotations

from typing import Any

from k8e.guest import wire
from k8e.guest.streams import BUFFER, ExecOutput
from k8e.guest.transcript import Transcript


class Channel:
    """Takes frames as a link would."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, bytes]] = []
        self.handler: Any = None
        self.closed = False

    def send(self, kind: int, body: bytes = b"", **_: object) -> None:
        self.frames.append((kind, body))

    def close(self) -> None:
        self.closed = True

    @property
    def printed(self) -> bytes:
        kinds = (wire.OUT, wire.ERR)
        return b"".join(body[wire.SEQ.size :] for kind, body in self.frames if kind in kinds)

    @property
    def told(self) -> dict[str, Any]:
        return wire.unpack_dict(self.frames[0][1])

    @property
    def end(self) -> dict[str, Any] | None:
        kind, body = self.frames[-1]
        return wire.unpack_dict(body) if kind == wire.EXIT else None


def program(transcript: Transcript, name: str) -> ExecOutput:
    output = ExecOutput(ring=False, limit=0)
    transcript.begin(name, output)
    return output


def read(transcript: Transcript, **spec: int) -> Channel:
    channel = Channel()
    transcript.attach(channel, spec)
    return channel


def test_nothing_ran_so_there_is_nothing_and_it_is_the_end() -> None:
    found = read(Transcript())
    assert (found.told["seq"], found.told["code"], found.printed) == (0, 0, b"")
    assert found.end is not None


def test_programs_that_run_at_once_are_in_the_order_in_which_they_print() -> None:
    transcript = Transcript()
    one, two = program(transcript, "1"), program(transcript, "2")
    one.add(wire.OUT, b"a")
    two.add(wire.ERR, b"b")
    one.add(wire.OUT, b"c")
    assert read(transcript).printed == b"abc"
    assert read(transcript, seq=1).printed == b"bc"
    transcript.end("1", 0)
    assert read(transcript).end is None, "the other one runs"
    transcript.end("2", 3)
    found = read(transcript).end
    assert found is not None
    assert found["code"] == 3


def test_who_follows_gets_what_comes_and_the_end() -> None:
    transcript = Transcript()
    output = program(transcript, "1")
    follower, leaver = read(transcript), read(transcript)
    leaver.handler.on_frame(wire.CANCEL, b"")
    output.add(wire.OUT, b"later")
    transcript.end("1", 0)
    assert (follower.printed, follower.closed) == (b"later", True)
    assert leaver.printed == b""
    again = program(transcript, "2")
    again.add(wire.OUT, b" more")
    assert follower.printed == b"later"
    assert read(transcript).printed == b"later more"


def test_a_slow_reader_holds_no_program_up_and_takes_no_memory() -> None:
    transcript = Transcript()
    output = program(transcript, "1")
    slow = read(transcript, window=1)
    for _ in range(64):
        assert output.copy is not None
        output.copy(wire.OUT, b"x" * 65536)
    assert slow.printed == b"x"
    kept = read(transcript, window=1 << 30).printed
    assert BUFFER // 2 < len(kept) <= BUFFER


def test_secrets_are_hidden_also_where_they_come_in_pieces() -> None:
    transcript = Transcript()
    transcript.hide(["hunter2!", "abc", "hunter2!-and-more"])
    output = program(transcript, "1")
    output.add(wire.OUT, b"it is hunter2!, abc, ")
    output.add(wire.OUT, b"hunter2!-and-more")
    output.add(wire.ERR, b"hunt")
    output.add(wire.ERR, b"er2!.")
    transcript.end("1", 0)
    found = read(transcript).printed
    assert found == b"it is ********, abc, " + b"*" * 17 + b"********.", "abc is no secret"


def test_no_way_to_cut_a_secret_into_pieces_tells_a_part_of_it() -> None:
    text = b"<tokenton>token-2< tok toke tokenton>tokent"
    for size in range(1, len(text) + 1):
        transcript = Transcript()
        transcript.hide(["tokenton", "token-2", "tokent"])
        output = program(transcript, "1")
        for at in range(0, len(text), size):
            output.add(wire.OUT, text[at : at + size])
        waiting = read(transcript).printed
        transcript.end("1", 0)
        printed = read(transcript).printed
        assert printed.startswith(waiting)
        assert printed == b"<********>*******< tok toke ********>******", size


def test_what_only_looks_like_the_beginning_of_a_secret_is_told_in_the_end() -> None:
    transcript = Transcript()
    transcript.hide(["x" * 5000])
    output = program(transcript, "1")
    output.add(wire.OUT, b"x" * 100)
    assert read(transcript).printed == b""
    output.add(wire.OUT, b"y")
    assert read(transcript).printed == b"x" * 100 + b"y"
    output.add(wire.OUT, b"x")
    transcript.end("1", 0)
    assert read(transcript).printed == b"x" * 100 + b"yx"
    output = program(transcript, "2")
    output.add(wire.OUT, b"x" * 5001)
    assert b"x" not in read(transcript, seq=102).printed


def test_results_of_contexts_are_not_in_it() -> None:
    transcript = Transcript()
    output = program(transcript, "1")
    output.add(wire.SHOW, b"a record")
    assert read(transcript).printed == b""
