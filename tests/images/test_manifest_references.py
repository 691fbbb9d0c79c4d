"""What names an image, and what does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e import errors
from k8e.images import manifest

DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("localhost/a", "localhost/a:latest"),
        ("registry.example:5000/team/tools:1.2", "registry.example:5000/team/tools:1.2"),
        (f"h.example/a@{DIGEST}", f"h.example/a:latest@{DIGEST}"),
        (f"h.example/a:v1@{DIGEST}", f"h.example/a:v1@{DIGEST}"),
        ("H.Example/a__b/c--d", "h.example/a__b/c--d:latest"),
        ("[::1]:5000/a", "[::1]:5000/a:latest"),
    ],
)
def test_a_reference_is_read_as_a_whole(text: str, whole: str) -> None:
    assert str(manifest.parse_reference(text)) == whole


def test_without_a_host_the_default_registry_is_meant() -> None:
    assert str(manifest.parse_reference("team/tools", "r.example")) == "r.example/team/tools:latest"
    assert str(manifest.parse_reference("tools:1", "r.example:5000")) == "r.example:5000/tools:1"


def test_without_any_host_the_error_says_how_to_set_one() -> None:
    with pytest.raises(errors.InvalidRequest, match="in which registry") as caught:
        manifest.parse_reference("tools:1")
    assert "K8E_DEFAULT_REGISTRY" in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/a",
        "h.example/",
        "h.example/A",
        "h.example/a:",
        "h.example/a:b c",
        "h.example/../a",
        "h.example/a//b",
        "h.example:0/a",
        "h.example:99999/a",
        "h.example/a@sha256:12",
        "h.example/a@md5:" + "0" * 64,
        "h.example/a?x=1",
        "h.example/a#b",
        "user@h.example/a",
        "http://h.example/a",
        "h_.example.com:80:80/a",
        "h.example/" + "a" * 600,
    ],
)
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        manifest.parse_reference(text, "r.example")


@given(st.text(alphabet="ab.:/@-_[]%?#\\ \n0A", max_size=40))
def test_whatever_is_accepted_says_the_same_when_it_is_read_again(text: str) -> None:
    try:
        found = manifest.parse_reference(text, "r.example")
    except errors.InvalidRequest:
        return
    assert manifest.parse_reference(str(found)) == found
    assert not set(str(found)) & set("%?#\\ \n")
