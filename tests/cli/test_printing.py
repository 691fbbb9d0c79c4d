"""What the command prints comes from sandboxes too, and may not act on a terminal."""

from __future__ import annotations

import json

import pytest

from k8e.cli import printing


@pytest.mark.parametrize(
    "text", ["\x1b[2J", "\x7f", "\x9b1m", "\x85", "\u202egnp", "\u2028", "\xad"]
)
def test_characters_that_act_or_hide_are_spelled_out_and_mean_the_same(text: str) -> None:
    told = printing.encode({"name": text})
    assert told.isprintable()
    assert json.loads(told) == {"name": text}


def test_other_characters_stay_as_they_are() -> None:
    assert printing.encode("naïve 日本 😀") == '"naïve 日本 😀"'
    assert json.loads(printing.encode("\udcff")) == "\udcff"
