"""Tokens as text."""

from __future__ import annotations

import pytest

from k8e import errors
from k8e.distro import tokens

PIN = "ab" * 32
BARE = "abcdef.0123456789abcdef"


def test_a_token_is_read_as_it_was_written() -> None:
    token = tokens.Token(PIN, BARE)
    assert tokens.parse(f"{token}\n") == token
    assert token.id == "abcdef"


@pytest.mark.parametrize(
    "text", ["", BARE, f"K10{PIN}::server:password", f"K10{PIN[:-1]}::{BARE}", f"K10{PIN}::{BARE}0"]
)
def test_a_malformed_token_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(errors.InvalidRequest) as refused:
        tokens.parse(text)
    assert BARE not in str(refused.value)
    assert "node-token" in refused.value.hint


def test_a_server_takes_a_token_with_and_without_a_pin() -> None:
    assert tokens.bare(BARE) == tokens.bare(f"K10{PIN}::{BARE}") == BARE
    with pytest.raises(errors.InvalidRequest, match="6 and 16"):
        tokens.bare("secret")


def test_new_tokens_differ_and_are_well_formed() -> None:
    made = {tokens.bare(tokens.new_bare()) for _ in range(100)}
    assert len(made) == 100


@pytest.mark.parametrize(
    ("text", "seconds"), [("30m", 1800), ("24h", 86400), ("7d", 604800), ("5s", 5), ("0", 0)]
)
def test_lifetimes(text: str, seconds: int) -> None:
    assert tokens.parse_lifetime(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "0h", "1w", "-1h", "1.5h"])
def test_what_is_no_lifetime_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="is no lifetime"):
        tokens.parse_lifetime(text)
