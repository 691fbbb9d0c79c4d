"""How many values a JSON text has, told before it is read."""

# What JSON holds has no static type.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e import json_size
from k8e.json_size import MAX_VALUES, JsonSize

TRICKY = st.text(alphabet='a\\"[{,\n', max_size=8)
VALUES = st.recursive(
    st.one_of(TRICKY, st.integers(), st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(TRICKY, inner, max_size=4)
    ),
    max_leaves=30,
)


def expected(value: Any) -> int:
    """Strings, lists, mappings and commas."""
    if isinstance(value, str):
        return 1
    if not isinstance(value, dict | list):
        return 0
    items: list[Any] = [*value, *value.values()] if isinstance(value, dict) else [*value]
    return 1 + max(0, len(value) - 1) + sum(map(expected, items))


@given(VALUES, st.integers(1, 9))
def test_values_are_counted_however_the_text_is_cut(value: Any, piece: int) -> None:
    text = json.dumps(value).encode()
    size = JsonSize()
    for start in range(0, len(text), piece):
        size.feed(text[start : start + piece])
    assert size.values == expected(value)


@pytest.mark.parametrize("bomb", [b"[],", b'"",', b"1,", b'{"":', b"["])
def test_a_text_of_many_values_is_too_large_whatever_they_are(bomb: bytes) -> None:
    assert json_size.is_too_large(bomb * (MAX_VALUES + 1))


def test_a_long_text_of_few_values_is_not_too_large() -> None:
    assert not json_size.is_too_large(json.dumps({"code": 'a = [1, "b"]\n' * 100_000}).encode())
