"""Trees that want to break out of where they are copied to, told by a sandbox that lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from k8e import Copied, SandboxClient, errors
from k8e.client import trees
from k8e.client.operations import Operation
from k8e.client.requests import Content
from k8e.client.results import Chunk, FileEntry
from k8e.guest import wire


class Liar(SandboxClient):
    """A client whose sandbox lists what it likes."""

    def __init__(self, *entries: FileEntry, kind: str = "dir") -> None:
        super().__init__()
        self._entries = entries
        self._kind = kind

    def _call(self, operation: Operation[Any], source: Content | None = None) -> Any:
        asked = _asked(operation)
        if asked["op"] == "list":
            return list(self._entries)
        if asked.get("follow"):
            return FileEntry(asked["path"], self._kind, 0, 0o777, 0)
        return next(item for item in self._entries if item.path == asked["path"])

    def _stream(self, operation: Operation[Any], source: Content | None = None) -> Any:
        yield Chunk(b"evil")


def _asked(operation: Operation[Any]) -> dict[str, Any]:
    """What an operation would send."""
    return wire.unpack_dict(bytes(next(operation).body))


def entry(path: str, kind: str = "file", target: str = "") -> FileEntry:
    return FileEntry(f"/workspace/t/{path}", kind, 4, 0o777, 0, target)


def receive(liar: Liar, target: Path, path: str = "t") -> Copied:
    return liar.download("s", path, target, on_skip=dict[str, str]().__setitem__)


@pytest.mark.parametrize(
    "path",
    ["../evil", "a/../../evil", "", "./x", "a//x", "x/", "x\0y", "n" * 256, "../t2/evil"],
)
def test_a_name_that_is_no_name_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(errors.GuestFailed, match="names a file"):
        receive(Liar(entry("a", "dir"), entry(path)), tmp_path / "t")
    assert [item.name for item in tmp_path.iterdir()] == ["t"]


def test_a_file_that_was_not_asked_for_is_refused(tmp_path: Path) -> None:
    for path in ("/etc/evil", "/workspace/tt/evil", "/workspace/t"):
        with pytest.raises(errors.GuestFailed, match="not asked for"):
            receive(Liar(FileEntry(path, "file", 4, 0o644, 0)), tmp_path / "t")


def test_a_file_below_a_link_is_not_written_through_it(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    # A link of the same name that the sandbox lists first, or that is there already.
    with pytest.raises(errors.InvalidRequest, match="cannot be entered"):
        receive(Liar(entry("l", "link", "../outside"), entry("l/evil")), tmp_path / "t")
    (tmp_path / "t2").mkdir()
    (tmp_path / "t2/l").symlink_to(outside)
    with pytest.raises(errors.InvalidRequest, match="cannot be entered"):
        receive(Liar(entry("l", "dir"), entry("l/evil")), tmp_path / "t2", "t/.")
    assert list(outside.iterdir()) == []


def test_a_file_takes_the_place_of_a_link_and_leaves_its_target(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "t").mkdir()
    (tmp_path / "t/f").symlink_to(tmp_path / "mine")
    receive(Liar(entry("f")), tmp_path / "t", "t/.")
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / "t/f").is_symlink()
    assert (tmp_path / "t/f").read_text() == "evil"


def test_no_copied_file_runs_as_its_owner(tmp_path: Path) -> None:
    receive(Liar(FileEntry("/workspace/t/f", "file", 4, 0o6777, 0)), tmp_path / "t")
    assert (tmp_path / "t/f").stat().st_mode & 0o7000 == 0


@pytest.mark.parametrize(
    ("place_of_link", "target", "inside"),
    [
        ("l", "file", True),
        ("l", "./a/b", True),
        ("a/l", "../file", True),
        ("a/b/l", "../../c/d", True),
        ("l", "/etc/passwd", False),
        ("l", "..", False),
        ("l", "../t/file", False),
        ("a/l", "../../x", False),
        ("a/l", "b/../..", False),
        ("a/b/l", "s/..", False),
        ("l", "", False),
    ],
)
def test_links_stay_inside(place_of_link: str, target: str, inside: bool) -> None:
    assert trees.stays_inside(tuple(place_of_link.split("/")), target) is inside
