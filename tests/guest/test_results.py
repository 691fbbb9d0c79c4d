"""Records of results: put together from pieces, and read without trust."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.guest import results, streams, wire
from k8e.guest.wire import WireError

RECORD = {"data": {"text/plain": "a", "image/png": b"b"}, "main": True, "left_out": ["x/y"]}


@given(st.lists(st.integers(1, 30)))
def test_a_record_is_the_same_however_it_was_cut(cuts: list[int]) -> None:
    data = results.pack_record(wire.pack(RECORD)) * 2
    reading = results.ShowRecords()
    found: list[dict[str, Any]] = []
    at = 0
    for size in [*cuts, len(data)]:
        if piece := data[at : at + size]:
            found += reading.feed(100 + at, piece)
            at += len(piece)
    assert found == [RECORD, RECORD]


def test_a_record_that_was_lost_in_part_is_left_out() -> None:
    data = results.pack_record(wire.pack(RECORD))
    reading = results.ShowRecords()
    assert reading.feed(0, data[:10]) == []
    assert reading.feed(5000, data) == [RECORD]


@given(st.binary(max_size=60))
def test_bytes_that_are_no_record_are_an_error_of_the_wire(data: bytes) -> None:
    with pytest.raises(WireError):
        results.read_record(data)


@pytest.mark.parametrize(
    "value",
    [
        {"data": {"a": 1}, "main": True, "left_out": []},
        {"data": {"a": ["x"]}, "main": True, "left_out": []},
        {"data": {str(n): "" for n in range(33)}, "main": True, "left_out": []},
        {"main": True, "data": {}, "left_out": []},
        {"data": {}, "main": 1, "left_out": []},
        {"data": {}, "main": True, "left_out": [5]},
        {"data": {}, "main": True, "left_out": [None] * 70_000},
    ],
)
def test_what_is_not_a_result_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        results.read_record(wire.pack(value))


def test_a_record_that_says_to_be_huge_is_refused_before_it_comes() -> None:
    with pytest.raises(WireError, match="large"):
        results.ShowRecords().feed(0, b"\xff\xff\xff\xff")


def test_a_limit_of_output_cuts_no_record_and_joins_none() -> None:
    kept = streams.ExecOutput(ring=False, limit=10)
    kept.add(wire.SHOW, b"x" * 100)
    kept.add(wire.SHOW, b"y" * 100)
    kept.add(wire.OUT, b"z" * 100)
    assert [(chunk[1], len(chunk[2])) for n in range(3) if (chunk := kept.chunk(n))] == [
        (wire.SHOW, 100),
        (wire.SHOW, 100),
        (wire.OUT, 10),
    ]
