"""What the command prints comes from sandboxes too, and may not act on a terminal."""

from __future__ import annotations

import json

import pytest

from k8e.cli import output


@pytest.mark.parametrize(
    "text", ["\x1b[2J", "\x7f", "\x9b1m", "\x85", "\u202egnp", "\u2028", "\xad"]
)
def test_characters_that_act_or_hide_are_spelled_out_and_mean_the_same(text: str) -> None:
    told = output.encode({"name": text})
    assert told.isprintable()
    assert json.loads(told) == {"name": text}


def test_other_characters_stay_as_they_are() -> None:
    assert output.encode("naïve 日本 😀") == '"naïve 日本 😀"'
    assert json.loads(output.encode("\udcff")) == "\udcff"


def test_columns_are_as_wide_as_their_widest_cells_and_colours_take_no_room() -> None:
    rows = [("NAME", "OK", "WHY"), ("a", "\x1b[32myes\x1b[0m", ""), ("long name", "no", "because")]
    assert list(output.table(rows)) == [
        "NAME       OK   WHY",
        "a          \x1b[32myes\x1b[0m",
        "long name  no   because",
    ]


def test_the_last_column_is_wrapped_below_itself() -> None:
    rows = [("a", "word " * 12)]
    assert list(output.table(rows, width=20)) == [
        "a  word word word word word word",
        "   word word word word word word",
    ]
