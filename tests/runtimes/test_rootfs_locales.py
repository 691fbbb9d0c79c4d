"""Locales of the host, put together for sandboxes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from k8e.runtimes import rootfs
from tests.places import Place

needs_tools = pytest.mark.skipif(
    shutil.which("localedef") is None or not (rootfs.PLACE / rootfs.OURS).is_dir(),
    reason="this host has no localedef, or no C.UTF-8 in files",
)


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """What a host may have: C.UTF-8, and another one."""
    found = tmp_path / "host"
    shutil.copytree(rootfs.PLACE / rootfs.OURS, found / rootfs.OURS)
    (found / "other").mkdir()
    (found / "other" / "LC_TIME").write_bytes(b"x")
    return found


@needs_tools
def test_the_archive_has_the_locale_of_sandboxes_and_the_others_stay(
    host: Path, tmp_path: Path
) -> None:
    made = rootfs.archive(tmp_path / "made", host)
    assert made is not None
    names = {path.name for path in made.iterdir()}
    assert names == {rootfs.OURS, "other", "locale-archive"}
    assert b"C.utf8" in (made / "locale-archive").read_bytes()
    assert {path.stat().st_mode & 0o777 for path in made.rglob("*") if path.is_file()} == {0o644}
    assert [path.name for path in (tmp_path / "made").iterdir()] == [made.name]


@needs_tools
def test_it_is_made_once_and_again_when_the_host_changes(
    host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = rootfs.archive(tmp_path / "made", host)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", None)  # whoever would use it fails
        assert rootfs.archive(tmp_path / "made", host) == made
    (host / "other" / "LC_TIME").write_bytes(b"xy")
    assert rootfs.archive(tmp_path / "made", host) not in (made, None)


def test_a_host_without_the_locale_or_with_too_many_or_without_the_tool_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = tmp_path / "host"
    assert rootfs.archive(tmp_path / "made", host) is None
    (host / rootfs.OURS).mkdir(parents=True)
    (host / rootfs.OURS / "LC_CTYPE").write_bytes(b"no locale at all")
    assert rootfs.archive(tmp_path / "made", host) is None, "localedef refuses it"
    assert list((tmp_path / "made").iterdir()) == [], "and nothing is left of the attempt"
    monkeypatch.setattr(rootfs, "MOST_BYTES", 3)
    assert rootfs.archive(tmp_path / "other", host) is None


@needs_tools
def test_programs_in_sandboxes_speak_utf8_by_one_file(place: Place, session_id: str) -> None:
    script = "locale charmap; ls /usr/lib/locale"
    done = place.json("sandbox", "run", "--session-id", session_id, script)
    lines = str(done["stdout"]).splitlines()
    assert lines[0] == "UTF-8"
    assert {"C.utf8", "locale-archive"} <= set(lines)
