"""Host names: which are names at all, and which are the same."""

from __future__ import annotations

import time

import pytest

from k8e import errors
from k8e.egress.policy import (
    normalise,
    parse_rule,
)

# Names.


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("example.org", "example.org"),
        ("EXAMPLE.Org", "example.org"),
        ("example.org.", "example.org"),
        ("  example.org\n", "example.org"),
        ("localhost", "localhost"),
        ("_dmarc.example.org", "_dmarc.example.org"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("XN--BCHER-KVA.example", "xn--bcher-kva.example"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("BÜCHER.example", "xn--bcher-kva.example"),
        ("例え.テスト", "xn--r8jz45g.xn--zckzah"),
        ("例え。テスト", "xn--r8jz45g.xn--zckzah"),
        ("\uff45xample.org", "example.org"),
        ("a" * 63 + ".org", "a" * 63 + ".org"),
        ("3com.example", "3com.example"),
    ],
)
def test_names_are_compared_in_one_form(text: str, name: str) -> None:
    assert normalise(text) == name
    assert normalise(name) == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        ".",
        "..",
        ".org",
        "a..org",
        "example.org..",
        "-a.org",
        "a-.org",
        "a b.org",
        "a\tb.org",
        "a\nb.org",
        "a\0b.org",
        "a/b.org",
        "a@b.org",
        "a%b.org",
        "a\\.org",
        '"a".org',
        "{a}.org",
        "a;b.org",
        "*.org",
        "[::1]",
        "a" * 64 + ".org",
        "a." * 127 + "aa",
        "ü" * 64 + ".org",
        "ü..org",
        "a\u00ad\u200b.\u200b",
        "\ud800.org",
    ],
)
def test_what_is_no_host_name_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        normalise(text)


@pytest.mark.parametrize("text", ["ü" * 200_000, "ü." * 100_000, "a." * 500_000, "." * 1_000_000])
def test_a_long_name_is_refused_quickly_and_with_a_short_message(text: str) -> None:
    began = time.process_time()
    with pytest.raises(errors.InvalidRequest) as caught:
        parse_rule(text)
    assert time.process_time() - began < 2
    assert len(caught.value.message) < 300
