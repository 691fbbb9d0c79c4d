"""Numbered output and its readers, without any process."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k8e.guest.streams import BUFFER, CHUNK_COST, ExecOutput, OutputReader
from k8e.guest.wire import CHUNK, ERR, OUT, SEQ

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # busy hosts


class Sink:
    """What a reader sends, checked for gaps in its numbers."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, int, bytes]] = []

    def send(self, kind: int, body: bytes) -> None:
        assert len(body) - SEQ.size <= CHUNK
        self.frames.append((kind, SEQ.unpack_from(body)[0], body[SEQ.size :]))

    def bytes_of(self, kind: int) -> bytes:
        return b"".join(data for found, _, data in self.frames if found == kind)

    @property
    def size(self) -> int:
        return sum(len(data) for _, _, data in self.frames)

    def check_numbers(self) -> None:
        expected = self.frames[0][1] if self.frames else 0
        for _, seq, data in self.frames:
            assert seq == expected
            expected += len(data)


def attach(
    output: ExecOutput, start: int = 0, credit: int = 1 << 30
) -> tuple[OutputReader, Sink, list[int]]:
    sink = Sink()
    ends: list[int] = []
    reader = OutputReader(output, sink, start=start, credit=credit)
    reader.on_end = lambda: ends.append(reader.next)
    output.readers.append(reader)
    reader.pump()
    return reader, sink, ends


def test_streams_stay_apart_and_numbers_count_over_both() -> None:
    output = ExecOutput(ring=False, limit=0)
    _, sink, _ = attach(output)
    for kind, data in ((OUT, b"one"), (ERR, b"two"), (OUT, b"three")):
        output.add(kind, data)
    assert sink.frames == [(OUT, 0, b"one"), (ERR, 3, b"two"), (OUT, 6, b"three")]
    assert output.end == 11


def test_the_end_is_told_once_and_only_after_everything_was_read() -> None:
    output = ExecOutput(ring=False, limit=0)
    reader, sink, ends = attach(output, credit=4)
    output.add(OUT, b"0123456789")
    output.finish()
    assert sink.bytes_of(OUT) == b"0123"
    assert ends == []
    reader.credit(100)
    assert sink.bytes_of(OUT) == b"0123456789"
    assert ends == [10]
    assert output.readers == []


def test_a_reader_that_comes_at_the_end_gets_what_is_added_to_the_newest_chunk() -> None:
    output = ExecOutput(ring=False, limit=0)
    output.add(OUT, b"before")
    _, sink, ends = attach(output, start=6)
    output.add(OUT, b" and after")
    output.finish()
    assert sink.frames == [(OUT, 6, b" and after")]
    assert ends == [16]


def test_a_reader_of_nothing_is_told_the_end_at_once() -> None:
    output = ExecOutput(ring=False, limit=0)
    output.finish()
    _, sink, ends = attach(output)
    assert (sink.frames, ends) == ([], [0])


def test_a_late_reader_gets_everything_that_is_kept() -> None:
    output = ExecOutput(ring=False, limit=0)
    output.add(OUT, b"before ")
    _, sink, _ = attach(output)
    output.add(OUT, b"after")
    assert sink.bytes_of(OUT) == b"before after"


def test_a_reader_that_comes_back_goes_on_inside_a_chunk() -> None:
    output = ExecOutput(ring=False, limit=0)
    output.add(OUT, b"0123456789")
    reader, sink, _ = attach(output, start=7)
    assert sink.frames == [(OUT, 7, b"789")]
    assert not reader.lost


def test_a_reader_from_beyond_the_end_gets_only_what_is_new() -> None:
    output = ExecOutput(ring=False, limit=0)
    output.add(OUT, b"old")
    _, sink, ends = attach(output, start=1000)
    output.finish()
    assert sink.frames == []
    assert len(ends) == 1


def test_a_blocking_output_is_full_until_somebody_acknowledges() -> None:
    output = ExecOutput(ring=False, limit=0)
    reader, _, _ = attach(output, credit=BUFFER // 2)
    while not output.full:
        output.add(OUT, bytes(8192))
    assert BUFFER <= output.held < BUFFER + 8192 + CHUNK_COST
    reader.credit(BUFFER // 2)
    assert not output.full


def test_a_blocking_output_without_any_reader_fills_up_and_keeps_its_oldest_bytes() -> None:
    output = ExecOutput(ring=False, limit=0)
    output.add(OUT, b"first")
    while not output.full:
        output.add(OUT, bytes(8192))
    assert output.start == 0


def test_a_ring_never_fills_and_keeps_the_newest_bytes() -> None:
    output = ExecOutput(ring=True, limit=0)
    for number in range(1000):
        output.add(OUT, b"%07d\n" % number * 512)
        assert not output.full
        assert output.held <= BUFFER + 4096 + CHUNK_COST
    output.finish()
    reader, sink, ends = attach(output)
    assert reader.lost
    assert sink.bytes_of(OUT).endswith(b"0000999\n")
    assert sink.size >= BUFFER // 2
    assert ends == [output.end]


def test_a_reader_that_the_ring_overtook_says_so_and_goes_on_with_what_is_left() -> None:
    output = ExecOutput(ring=True, limit=0)
    reader, sink, _ = attach(output, credit=100)
    for _ in range(300):
        output.add(OUT, bytes(8192))
    reader.credit(1 << 30)
    assert reader.lost
    assert sink.size < output.end
    assert sink.frames[-1][1] + len(sink.frames[-1][2]) == output.end


def test_single_bytes_are_joined_and_counted_with_their_overhead() -> None:
    output = ExecOutput(ring=True, limit=0)
    for _ in range(4000):
        output.add(OUT, b"x")
    assert output.held < 3 * CHUNK_COST + 4000
    for _ in range(20_000):
        output.add(OUT, b"o")
        output.add(ERR, b"e")
    assert output.held <= BUFFER + 4096 + CHUNK_COST


def test_each_stream_has_its_own_limit_and_the_rest_is_reported() -> None:
    output = ExecOutput(ring=False, limit=10)
    _, sink, _ = attach(output)
    output.add(OUT, b"0123456789")
    assert not output.truncated
    output.add(OUT, b"more")
    output.add(ERR, b"err")
    assert output.truncated
    assert (sink.bytes_of(OUT), sink.bytes_of(ERR)) == (b"0123456789", b"err")


@patient
@given(
    st.lists(st.tuples(st.sampled_from([OUT, ERR]), st.binary(min_size=1, max_size=9000))),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20_000))),
    st.lists(st.integers(0, 30_000), min_size=1, max_size=3),
)
def test_every_reader_gets_every_byte_in_order_whatever_the_credit(
    written: list[tuple[int, bytes]], credits_: list[tuple[int, int]], starts: list[int]
) -> None:
    output = ExecOutput(ring=False, limit=0)
    readers = [attach(output, start=min(start, 0), credit=1) for start in starts]
    given_credit = iter(credits_)
    for kind, data in written:
        output.add(kind, data)
        who, count = next(given_credit, (0, 1))
        readers[who % len(readers)][0].credit(count)
    output.finish()
    for reader, sink, ends in readers:
        while not ends:
            reader.credit(50_000)
        sink.check_numbers()
        for kind in (OUT, ERR):
            assert sink.bytes_of(kind) == b"".join(data for found, data in written if found == kind)
        assert not reader.lost


def test_a_flood_is_cut_at_its_limit_and_told_once() -> None:
    output = ExecOutput(ring=False, limit=0, most=10)
    told: list[int] = []
    output.on_flood = lambda: told.append(output.total)
    _, sink, _ = attach(output)
    output.add(OUT, b"0123456")
    assert not told
    output.add(ERR, b"789abc")
    output.add(OUT, b"def")
    assert told == [13]
    assert (sink.bytes_of(OUT), sink.bytes_of(ERR)) == (b"0123456", b"789")
    assert output.truncated
    assert output.total == 16


def test_what_is_dropped_counts_as_printed() -> None:
    output = ExecOutput(ring=True, limit=2, most=10)
    told: list[int] = []
    output.on_flood = lambda: told.append(output.total)
    for _ in range(4):
        output.add(OUT, b"xxx")
    assert told == [12]
    assert output.end == 2


def test_the_last_complaints_are_kept() -> None:
    output = ExecOutput(ring=False, limit=1)
    output.add(OUT, b"not this")
    output.add(ERR, b"a" * 5000)
    output.add(ERR, b"the end")
    assert len(output.complaints) == 2048
    assert output.complaints.endswith(b"aaathe end")
