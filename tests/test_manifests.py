"""What a manifest may say, in which spellings, and how much."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e import errors, manifests
from k8e.manifests import DIR, FILE, GIT, Entry
from k8e.model import SessionSpec

URL = "https://git.test/repo.git"


def one(item: Any) -> Entry:
    (found,) = manifests.from_json([item]).entries
    return found


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"file": {"path": "a/b", "content": "x"}}, Entry(FILE, "a/b", content=b"x")),
        ({"type": "file", "path": "./a//b"}, Entry(FILE, "a/b")),
        ({"file": {"path": "/workspace/a", "content": b"\0\xff"}}, Entry(FILE, "a", b"\0\xff")),
        ({"file": {"path": "a", "content_base64": "AP8="}}, Entry(FILE, "a", b"\0\xff")),
        ({"file": {"path": "a", "mode": "0755"}}, Entry(FILE, "a", mode=0o755)),
        ({"file": {"path": "a", "mode": "600"}}, Entry(FILE, "a", mode=0o600)),
        ({"dir": {"path": "d/"}}, Entry(DIR, "d")),
        ({"dir": "d"}, Entry(DIR, "d")),
        ({"type": "directory", "path": "d"}, Entry(DIR, "d")),
        ({"gitRepo": {"path": "r", "repo": URL}}, Entry(GIT, "r", repo=URL, ref="HEAD")),
        ({"git_repo": {"path": ".", "url": URL}}, Entry(GIT, ".", repo=URL, ref="HEAD")),
        (
            {"type": "gitRepo", "path": "r", "repo": URL, "ref": "v1.0"},
            Entry(GIT, "r", repo=URL, ref="v1.0"),
        ),
    ],
)
def test_sensible_spellings_are_understood(item: Any, expected: Entry) -> None:
    assert one(item) == expected


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ("a", "no entry"),
        ({}, "no entry"),
        ({"file": {"path": "a"}, "dir": {"path": "b"}}, "no entry"),
        ({"type": "socket", "path": "a"}, "no entry"),
        ({"type": ["file"], "path": "a"}, "no entry"),
        ({"file": {"path": "a", "owner": "root"}}, "owner"),
        ({"file": {}}, "path is missing"),
        ({"file": {"path": 5}}, "path is missing"),
        ({"file": {"path": "../a"}}, "below /workspace"),
        ({"file": {"path": "a/../../b"}}, "below /workspace"),
        ({"file": {"path": "/etc/passwd"}}, "below /workspace"),
        ({"file": {"path": "/workspaces/x"}}, "below /workspace"),
        ({"file": {"path": "a\0b"}}, "below /workspace"),
        ({"file": {"path": "a" * 5000}}, "below /workspace"),
        ({"file": {"path": "a/"}}, "not that of a file"),
        ({"file": {"path": "/workspace"}}, "not that of a file"),
        ({"file": {"path": "a", "content": 5}}, "content is not text"),
        ({"file": {"path": "a", "content_base64": "!"}}, "not base64"),
        ({"file": {"path": "a", "content_base64": 7}}, "not base64"),
        ({"file": {"path": "a", "content": "", "content_base64": ""}}, "both"),
        ({"file": {"path": "a", "mode": 420}}, "mode"),
        ({"file": {"path": "a", "mode": "0999"}}, "mode"),
        ({"file": {"path": "a", "mode": "4755"}}, "mode"),
        ({"file": {"path": "a", "mode": "w"}}, "mode"),
        ({"gitRepo": {"path": "r"}}, "repo"),
        ({"gitRepo": {"path": "r", "repo": "git@git.test:a/b"}}, "https://"),
        ({"gitRepo": {"path": "r", "repo": "ssh://git.test/a"}}, "https://"),
        ({"gitRepo": {"path": "r", "repo": "file:///etc"}}, "https://"),
        ({"gitRepo": {"path": "r", "repo": "ext::sh -c id"}}, "https://"),
        ({"gitRepo": {"path": "r", "repo": "--upload-pack=id"}}, "https://"),
        ({"gitRepo": {"path": "r", "repo": "https://"}}, "https://"),
        ({"gitRepo": {"path": "r", "repo": "https://a b/"}}, "https://"),
        ({"gitRepo": {"path": "r", "repo": "https://a\n/"}}, "https://"),
        ({"gitRepo": {"path": "r", "repo": "https://[x/"}}, "https://"),
        ({"gitRepo": {"path": "r", "repo": URL, "ref": "--upload-pack=id"}}, "ref"),
        ({"gitRepo": {"path": "r", "repo": URL, "ref": "a:b"}}, "ref"),
        ({"gitRepo": {"path": "r", "repo": URL, "ref": "+main"}}, "ref"),
        ({"gitRepo": {"path": "r", "repo": URL, "ref": "a..b"}}, "ref"),
        ({"gitRepo": {"path": "r", "repo": URL, "ref": 1}}, "ref"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_number(item: Any, reason: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="manifest entry 2: ") as caught:
        manifests.from_json([{"dir": {"path": "d"}}, item])
    assert reason in str(caught.value)


@pytest.mark.parametrize("value", [5, {"entries": 5}, {"entries": [], "more": 1}, {}, b"x"])
def test_a_manifest_is_a_list_of_entries(value: Any) -> None:
    with pytest.raises(errors.InvalidRequest):
        manifests.from_json(value)


def test_limits_say_which_was_reached() -> None:
    folder = {"dir": {"path": "d"}}
    assert len(manifests.from_json([folder] * manifests.MAX_ENTRIES).entries) == 1000
    with pytest.raises(errors.LimitExceeded, match="1001 entries; the limit is 1000"):
        manifests.from_json([folder] * 1001)
    with pytest.raises(errors.LimitExceeded, match="bytes; the limit is 1048576"):
        manifests.from_json([{"file": {"path": "a", "content": "x" * (1 << 19)}}] * 2)


def test_equal_is_what_makes_the_same_files() -> None:
    asked = {"file": {"path": "a", "content": "x"}}
    made = manifests.from_json([asked])
    assert made == manifests.from_json(
        {"entries": [{"type": "file", "path": "./a", "content": "x"}]}
    )
    for key, value in (("content", "y"), ("path", "b"), ("mode", "0600")):
        assert made != manifests.from_json([{"file": {**asked["file"], key: value}}])
    assert not manifests.from_json([])


def test_a_stored_specification_keeps_the_digest_alone() -> None:
    spec = SessionSpec.from_json({"manifest": [{"file": {"path": "a", "content": "confidential"}}]})
    stored = spec.to_json()
    assert "confidential" not in str(stored)
    again = SessionSpec.from_json(stored, stored=True)
    assert again == spec
    assert again.manifest
    assert not again.manifest.entries


@given(
    st.recursive(
        st.none() | st.integers() | st.text() | st.binary(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from("file dir type path mode content repo ref".split()), inner
            )
        ),
    )
)
def test_nothing_that_a_client_sends_breaks_the_check(value: Any) -> None:
    try:
        found = manifests.from_json([value])
    except errors.K8eError:
        return
    for entry in found.entries:
        assert not entry.path.startswith("/")
        assert ".." not in entry.path.split("/")
