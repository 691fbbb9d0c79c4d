"""Inputs: nonsense of every kind, and good things that were damaged a little."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from k8e.guest import wire

TEXTS = st.sampled_from(
    [
        "",
        "x",
        "..",
        "../../etc/passwd",
        "/",
        "\0",
        "\udcff",
        "é" * 40,
        "a" * 5000,
        "none",
        "*",
        "-1",
    ]
) | st.text(max_size=20)
NUMBERS = (
    st.sampled_from([0, -1, 1, 1 << 31, 1 << 32, (1 << 63) - 1, -(1 << 63)])
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats()
)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS | st.binary(max_size=40)
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4)
    ),
    max_leaves=8,
)


def fields(
    names: Sequence[str], values: st.SearchStrategy[Any] = ANYTHING
) -> st.SearchStrategy[Any]:
    """A mapping with some keys that mean something."""
    return st.dictionaries(st.sampled_from(names) | TEXTS, values, max_size=6)


@st.composite
def damaged(draw: st.DrawFn, good: bytes) -> bytes:
    """``good`` with bytes changed, left out, doubled or put in."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        end = draw(st.integers(at, min(len(data), at + 40)))
        data[at:end] = draw(st.binary(max_size=12) | st.just(bytes(data[at:end]) * 2))
    return bytes(data)


@st.composite
def frames(draw: st.DrawFn, kinds: list[int], channels: int) -> tuple[int, int, bytes]:
    """A frame as somebody would send who knows the protocol and means no good."""
    kind = draw(st.sampled_from(kinds) | st.integers(0, 255))
    channel = draw(st.integers(0, channels) | st.just(0xFFFFFFFF))
    packed = ANYTHING.map(_packed)
    numbers = st.sampled_from([0, 1, 1 << 32, (1 << 64) - 1]).map(wire.SEQ.pack)
    body = draw(
        st.binary(max_size=30)
        | packed
        | st.tuples(numbers, st.binary(max_size=30)).map(b"".join)
        | st.integers(0, 0xFFFFFFFF).map(wire.CREDIT_BODY.pack)
    )
    return kind, channel, body


def _packed(value: Any) -> bytes:
    try:
        return wire.pack(value)
    except (UnicodeEncodeError, OverflowError):
        return b"N"
