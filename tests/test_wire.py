"""Frames and packed values: what goes in comes out, and hostile bytes are only ever a WireError."""

from __future__ import annotations

import contextlib
import enum
import math
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k8e.guest import wire

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # busy hosts

TEXT = st.text(st.characters(exclude_categories=())).filter(
    lambda text: not any("\ud800" <= char <= "\udfff" for char in text)
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.binary()
    | TEXT
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=20,
)
FRAMES = st.lists(
    st.tuples(st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(max_size=300)), max_size=8
)


def depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)  # pyright: ignore[reportUnknownArgumentType]
    return 0


@patient
@given(VALUES.filter(lambda value: depth(value) <= wire.MAX_DEPTH))
def test_a_value_comes_back_as_it_was_packed(value: Any) -> None:
    again = wire.unpack(wire.pack(value))
    assert again == value
    assert type(again) is type(value)


@pytest.mark.parametrize("text", ["bad-\udcff-byte", "\udc80\udcff", "ü ✓ 🦊"])
def test_names_that_are_no_text_survive(text: str) -> None:
    assert wire.unpack(wire.pack({text: text})) == {text: text}


def test_infinity_and_nan_survive() -> None:
    assert wire.unpack(wire.pack(math.inf)) == math.inf
    assert math.isnan(wire.unpack(wire.pack(math.nan)))


class Word(enum.StrEnum):
    ONE = "one"


class Number(enum.IntEnum):
    TWO = 2


class Pair(NamedTuple):
    left: int
    right: float


def test_values_of_classes_beyond_ours_are_packed_as_what_they_are() -> None:
    again = wire.unpack(wire.pack({"a": Word.ONE, "b": Number.TWO, "c": Pair(1, 2.0)}))
    assert again == {"a": "one", "b": 2, "c": [1, 2.0]}
    assert wire.unpack(wire.pack(OrderedDict(x=Word.ONE))) == {"x": "one"}
    assert wire.unpack(wire.pack([Word.ONE, Number.TWO])) == ["one", 2]


def test_what_no_value_can_be_is_refused() -> None:
    stranges: list[Any] = [object(), {1: 2}, [{3}]]
    for strange in stranges:
        with pytest.raises(TypeError, match="cannot pack"):
            wire.pack(strange)


def test_a_tuple_is_packed_as_a_list_and_a_view_as_bytes() -> None:
    assert wire.unpack(wire.pack((1, memoryview(b"abc")))) == [1, b"abc"]


@patient
@given(st.binary(max_size=200))
def test_hostile_bytes_are_a_wire_error_or_a_value(data: bytes) -> None:
    with contextlib.suppress(wire.WireError):
        wire.unpack(data)


@patient
@given(VALUES, st.data())
def test_a_damaged_value_is_a_wire_error_or_another_value(value: Any, data: st.DataObject) -> None:
    packed = bytearray(wire.pack(value))
    at = data.draw(st.integers(0, len(packed) - 1))
    packed[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(wire.WireError):
        wire.unpack(bytes(packed))


@patient
@given(VALUES)
def test_a_shortened_or_lengthened_value_is_a_wire_error(value: Any) -> None:
    packed = wire.pack(value)
    for data in (packed[:-1], packed + b"N"):
        with pytest.raises(wire.WireError):
            wire.unpack(data)


def test_nesting_is_bounded_and_never_a_recursion_error() -> None:
    deep: Any = None
    for _ in range(wire.MAX_DEPTH):
        deep = [deep]
    assert wire.unpack(wire.pack(deep)) == deep
    with pytest.raises(wire.WireError, match="deep"):
        wire.unpack(wire.pack([deep]))
    with pytest.raises(wire.WireError, match="deep"):
        wire.unpack(b"l\0\0\0\1" * 100_000 + b"N")


def test_a_length_that_lies_costs_no_memory() -> None:
    for tag in b"sbld":
        with pytest.raises(wire.WireError, match="beyond"):
            wire.unpack(bytes([tag]) + b"\xff\xff\xff\xff" + b"x" * 10)


def test_a_dict_with_keys_that_are_no_text_is_refused() -> None:
    packed = b"d\0\0\0\1" + wire.pack(1) + wire.pack(2)
    with pytest.raises(wire.WireError, match="key"):
        wire.unpack(packed)


def test_what_is_not_a_dict_is_refused_where_one_is_due() -> None:
    for value in (None, [1], "text", 5):
        with pytest.raises(wire.WireError, match="dict"):
            wire.unpack_dict(wire.pack(value))


def test_what_cannot_be_packed_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="object"):
        wire.pack([object()])


@patient
@given(FRAMES, st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_frames_come_back_however_the_stream_is_cut(
    frames: list[tuple[int, int, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(wire.frame(*frame) for frame in frames)
    splitter = wire.Splitter(1000)
    found: list[tuple[int, int, bytes]] = []
    at = turn = 0
    while at < len(stream):
        step = cuts[turn % len(cuts)]
        found += splitter.feed(stream[at : at + step])
        at, turn = at + step, turn + 1
    assert found == frames


@patient
@given(st.binary(max_size=2000), st.integers(1, 100))
def test_a_hostile_stream_is_frames_or_a_wire_error(data: bytes, step: int) -> None:
    splitter = wire.Splitter(1000)
    with contextlib.suppress(wire.WireError):
        for at in range(0, len(data), step):
            for _, _, body in splitter.feed(data[at : at + step]):
                assert len(body) <= 1000


def test_an_oversized_frame_is_refused_by_its_header_alone() -> None:
    splitter = wire.Splitter(1000)
    header = wire.HEADER.pack(1001, 1, 1)
    assert splitter.feed(header[:-1]) == []
    with pytest.raises(wire.WireError, match="1001 bytes; the limit is 1000"):
        splitter.feed(header[-1:])


def test_a_frame_of_exactly_the_limit_is_taken() -> None:
    frame = (wire.DATA, 7, bytes(1000))
    assert wire.Splitter(1000).feed(wire.frame(*frame)) == [frame]


def test_a_proof_depends_on_key_nonce_and_role() -> None:
    proofs = {
        wire.proof(key, nonce, role)
        for key in (b"k" * 32, b"l" * 32)
        for nonce in (b"n" * 16, b"m" * 16)
        for role in (b"host", b"guest")
    }
    assert len(proofs) == 8
    assert all(len(proof) == 32 for proof in proofs)


def test_secrets_are_compared_by_value() -> None:
    assert wire.equal(b"abc", b"ab" + b"c")
    assert not wire.equal(b"abc", b"abd")
    assert not wire.equal(b"abc", b"")


def test_a_dict_is_extended_and_what_is_added_counts() -> None:
    packed = wire.extended(wire.pack({"a": 1, "b": "theirs"}), {"b": "ours", "c": None})
    assert wire.unpack(packed) == {"a": 1, "b": "ours", "c": None}
    assert wire.unpack(wire.extended(wire.pack({}), {"b": 2})) == {"b": 2}


def test_a_dict_that_would_swallow_what_is_added_is_refused() -> None:
    more = {"session_id": "ours"}
    tail = len(wire.pack(more)) - len(wire.pack({}))
    # It says that it has one item, and ends with a second that begins where ours would follow.
    forged = wire.pack({"session_id": "theirs"}) + wire.pack({"x": b""})[5:-4] + tail.to_bytes(4)
    for body in (forged, b"", b"d", wire.pack([1]), wire.pack({"a": 1})[:-1]):
        with pytest.raises(wire.WireError):
            wire.extended(body, more)
