"""``k8e sandbox snapshot``, and what ``create`` and ``run`` can begin a session with."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.cli.terminals import Terminal
from tests.places import NewPlace, Place

MANIFEST = """
entries:
  - dir: {path: src/empty}
  - file:
      path: bin/hello
      mode: "0755"
      content: |
        #!/bin/sh
        echo hello from $0
  - type: file
    path: /workspace/data.bin
    content_base64: AP8=
"""
LOOK = "stat -c '%n %a %F' bin/hello src/empty data.bin; bin/hello; od -An -tx1 data.bin"
LOOKED = (
    "bin/hello 755 regular file\nsrc/empty 755 directory\ndata.bin 644 regular file\n"
    "hello from bin/hello\n 00 ff\n"
)


@pytest.fixture
def manifest(tmp_path: Path) -> str:
    path = tmp_path / "manifest.yaml"
    path.write_text(MANIFEST)
    return str(path)


@pytest.fixture
def own(place: Place, runtime: str) -> Generator[str]:
    """A session that nobody else has left anything in."""
    made = place.json("sandbox", "create", "--runtime", runtime)["session_id"]
    yield made
    place.json("sandbox", "destroy", made)


def keys(line: bytes) -> list[str]:
    return re.findall(r'"(\w+)":', line.decode())


def test_a_life_of_a_snapshot_in_k8e_s_words(new_place: NewPlace, runtime: str) -> None:
    place = new_place()
    made = place.json("sandbox", "create", "--runtime", runtime)["session_id"]
    assert place.json("sandbox", "snapshot", "list") == {"snapshots": []}
    place.json("sandbox", "write", made, "a", stdin=b"\0\xff")
    saved = place.cli("sandbox", "snapshot", "save", made, "first")
    assert keys(saved.stdout) == ["file_count", "name", "ok", "size_bytes"]
    told = json.loads(saved.stdout)
    assert (told["file_count"], told["name"], told["ok"], saved.stderr) == (1, "first", True, b"")
    (listed,) = place.json("sandbox", "snapshot", "list")["snapshots"]
    assert set(listed) == {"created_at", "file_count", "name", "size_bytes"}
    assert listed["size_bytes"] == told["size_bytes"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", listed["created_at"])
    place.json("sandbox", "destroy", made)
    again = ["sandbox", "snapshot", "restore", "first", "--runtime", runtime, "--tenant", "team"]
    done = place.cli(*again, "--label", "a=b", "--lifetime", "600")
    assert keys(done.stdout) == ["pod_ip", "restored_from", "session_id", "tenant_id"]
    restored = json.loads(done.stdout)
    assert (restored["restored_from"], restored["tenant_id"]) == ("first", "team")
    found = place.json("sandbox", "get", restored["session_id"])
    assert (found["labels"], found["tenant_id"]) == ({"a": "b"}, "team")
    assert place.cli("sandbox", "read", "--raw", restored["session_id"], "a").stdout == b"\0\xff"
    assert place.json("sandbox", "snapshot", "delete", "first") == {"ok": True}
    assert "not found" in place.error("sandbox", "snapshot", "restore", "first")
    assert place.json("sandbox", "snapshot", "list") == {"snapshots": []}


def test_a_taken_name_says_how_to_replace_it(place: Place, own: str) -> None:
    place.json("sandbox", "snapshot", "save", own, "taken")
    assert "--replace" in place.error("sandbox", "snapshot", "save", own, "taken")
    place.json("sandbox", "snapshot", "save", own, "taken", "--replace")
    place.json("sandbox", "snapshot", "delete", "taken")


def test_progress_is_shown_on_a_terminal_and_gone_in_the_end(place: Place, own: str) -> None:
    place.json("sandbox", "run", "--session-id", own, "head -c 80M /dev/urandom > big")
    with Terminal(place, "sandbox", "snapshot", "save", own, "shown") as terminal:
        shown = terminal.until(b'"size_bytes"')
        assert terminal.end() == 0
    assert b"MiB/s" in shown
    assert b"\r\x1b[K{" in shown
    with Terminal(
        place, "sandbox", "snapshot", "restore", "shown", "--session-id", "x"
    ) as terminal:
        shown = terminal.until(b'"tenant_id"')
        assert terminal.end() == 0
    assert re.search(rb"\[#+ *\] +\d+%", shown)
    place.json("sandbox", "destroy", "x")
    place.json("sandbox", "snapshot", "delete", "shown")


# Manifests.


def test_create_makes_what_the_manifest_says(place: Place, runtime: str, manifest: str) -> None:
    create = ["sandbox", "create", "--runtime", runtime, "--manifest"]
    for source, stdin in ((manifest, b""), ("-", MANIFEST.encode())):
        told = place.json(*create, source, stdin=stdin)
        assert told["entries_materialized"] == 3
        done = place.json("sandbox", "run", "--session-id", told["session_id"], LOOK)
        assert (done["stdout"], done["stderr"]) == (LOOKED, "")
        place.json("sandbox", "destroy", told["session_id"])


def test_a_run_uses_the_standing_session_that_was_made_with_the_same(
    new_place: NewPlace, runtime: str, manifest: str, tmp_path: Path
) -> None:
    place = new_place()
    flags = ["--runtime", runtime, "--manifest", manifest]
    first = place.json("sandbox", "run", *flags, LOOK)
    assert first["stdout"] == LOOKED
    assert place.json("sandbox", "status")["session_id"] == first["session_id"]
    place.json("sandbox", "run", "echo changed > data.bin")
    again = place.json("sandbox", "run", *flags, "cat data.bin")
    assert (again["session_id"], again["stdout"]) == (first["session_id"], "changed\n")
    plain = place.json("sandbox", "run", "true")
    assert plain["session_id"] == first["session_id"], "whoever asks for nothing gets it as it is"
    other = tmp_path / "other.yaml"
    other.write_text(MANIFEST + "  - dir: more\n")
    told = place.error("sandbox", "run", "--manifest", str(other), "true")
    assert "was made with other content" in told
    assert f"k8e sandbox destroy {first['session_id']}" in told
    background = place.json("sandbox", "run", "--background", *flags, "true")
    assert background["session_id"] == first["session_id"]


def test_content_is_not_for_a_session_that_is_there(
    place: Place, session_id: str, manifest: str
) -> None:
    run = ["sandbox", "run", "--manifest", manifest, "true"]
    assert "cp FOLDER" in place.error(*run, "--session-id", session_id)
    assert session_id in place.error(*run, K8E_SANDBOX_SESSION_ID=session_id)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("entries: [", "is not YAML"),
        ("entries: {a: b}", "no list of entries"),
        ("- dir: {path: a}\n- 5", "manifest entry 2"),
        ("things: []", "no list of entries"),
        ("entries: []\nmore: 1", "no list of entries"),
        ("!!python/object/apply:os.system [id]", "is not YAML"),
        ("[" * 5000, "is not YAML"),
        ("\0", "is not YAML"),
        ("entries: [{file: {path: ../x}}]", "below /workspace"),
        ("entries: [{file: {path: x, mode: 0644}}]", 'like "0755"'),
        ("entries: [{gitRepo: {path: x, repo: 'git@a:b'}}]", "ssh needs a key"),
        ("a: &a [x]\nb: &b [*a,*a]\nentries: [*b]", "no list of entries"),
    ],
)
def test_a_manifest_that_is_none_is_explained(
    place: Place, tmp_path: Path, text: str, expected: str
) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(text)
    for command in (["create"], ["run", "true"]):
        assert expected in place.error("sandbox", *command, "--manifest", str(path))


def test_flags_that_do_not_fit_are_refused(place: Place, tmp_path: Path) -> None:
    assert "need --git-repo" in place.error("sandbox", "create", "--git-ref", "main")
    assert "need --git-repo" in place.error("sandbox", "run", "true", "--git-path", "x")
    assert "https://" in place.error("sandbox", "create", "--git-repo", "ssh://a/b")
    assert "the ref" in place.error(
        "sandbox", "create", "--git-repo", "https://a/b", "--git-ref=--upload-pack=id"
    )
    missing = str(tmp_path / "none.yaml")
    assert "No such file" in place.error("sandbox", "create", "--manifest", missing)
    assert "is for create" in place.error("sandbox", "run", "true", "--manifest", "-")
    large = tmp_path / "large.yaml"
    large.write_text("#" * (5 << 20))
    assert "longer than" in place.error("sandbox", "create", "--manifest", str(large))


def test_what_cannot_be_made_fails_the_creation_as_a_whole(place: Place, runtime: str) -> None:
    text = b"[{file: {path: a, content: x}}, {file: {path: a/b, content: y}}]"
    create = ["sandbox", "create", "--runtime", runtime, "--session-id", "half", "--manifest", "-"]
    told = place.error(*create, stdin=text)
    assert "manifest entry 2 (file 'a/b'): " in told
    found = place.json("sandbox", "get", "half")
    assert (found["phase"], found["ended_reason"][:16]) == ("ended", "creation failed:")
