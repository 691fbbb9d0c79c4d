"""What sandboxes that share a workspace share on the host, and how frozen ones are ended."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

from k8e.model import Limits
from k8e.runtimes import cgroups, mounts
from k8e.runtimes.host import SandboxRecord

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


def test_a_record_of_before_is_read(tmp_path: Path) -> None:
    record = SandboxRecord("sb-a", "container", Limits(), 5, workspace_of="sb-parent")
    folder = tmp_path / "sb-a"
    folder.mkdir()
    record.save(folder)
    assert SandboxRecord.load(folder) == record
    file = folder / "sandbox.json"
    file.write_text(file.read_text().replace(', "workspace_of": "sb-parent"', ""))
    found = SandboxRecord.load(folder)
    assert found is not None
    assert found.workspace_of == ""


@pytest.fixture
def folders(tmp_path: Path) -> Generator[tuple[Path, Path]]:
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source, target):
        folder.mkdir()
    mounts.mount("tmpfs", source, "tmpfs", mounts.MS_NOSUID | mounts.MS_NODEV)
    yield source, target
    mounts.unmount(target)
    mounts.unmount(source)


@needs_root
def test_a_bound_folder_is_the_same_file_system_with_the_same_restrictions(
    folders: tuple[Path, Path],
) -> None:
    source, target = folders
    mounts.bind(source, target)
    (source / "file").write_text("x")
    assert (target / "file").read_text() == "x"
    flags = os.statvfs(target).f_flag
    assert flags & os.ST_NOSUID
    assert flags & os.ST_NODEV
    mounts.unmount(target)
    assert (source / "file").read_text() == "x"
    assert list(target.iterdir()) == []


@needs_root
def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc")
    (tmp_path / "target").mkdir()
    with pytest.raises(OSError, match=r"directory|symbolic"):
        mounts.bind(tmp_path / "link", tmp_path / "target")
    assert mounts.mounts_below(tmp_path) == []


@needs_root
@pytest.mark.skipif(cgroups.is_unified(), reason="on v2 a killed process dies frozen")
def test_a_frozen_process_is_killed(tmp_path: Path) -> None:
    sandbox_id = f"sb-test{os.getpid()}"
    group = cgroups.ROOT / "freezer" / cgroups.PARENT / sandbox_id
    group.mkdir(parents=True)
    program = subprocess.Popen(["sleep", "1000"])
    try:
        (group / "cgroup.procs").write_text(str(program.pid))
        (group / "freezer.state").write_text("FROZEN")
        program.kill()
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(0.2)
        cgroups.end_frozen(sandbox_id)
        assert program.wait(10) == -9
    finally:
        (group / "freezer.state").write_text("THAWED")
        program.kill()
        program.wait(10)
        cgroups.remove(sandbox_id)
    assert not group.exists()


def test_what_is_not_frozen_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    group = tmp_path / "freezer" / cgroups.PARENT / "sb-a"
    group.mkdir(parents=True)
    (group / "freezer.state").write_text("THAWED\n")
    (group / "cgroup.procs").write_text(f"{os.getpid()}\n")
    cgroups.end_frozen("sb-a")
    cgroups.end_frozen("sb-unknown")
