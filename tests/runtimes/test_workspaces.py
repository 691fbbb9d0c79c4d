"""Workspace images: sparse, limited, mounted with the right owner, gone without a trace."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

from k8e import errors
from k8e.conformance import traces
from k8e.model import MIB
from k8e.runtimes import mounts, workspaces

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@pytest.fixture
def target(tmp_path: Path) -> Generator[Path]:
    folder = tmp_path / "target"
    folder.mkdir()
    yield folder
    mounts.unmount(folder)


def test_a_copy_has_the_same_bytes_and_the_same_holes(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy.img"
    with source.open("wb") as file:
        file.truncate(64 * MIB)
        for at in (0, 5 * MIB, 63 * MIB):
            file.seek(at)
            file.write(os.urandom(8192))
    workspaces._copy_sparse(source, copy)  # pyright: ignore[reportPrivateUsage]
    assert copy.read_bytes() == source.read_bytes()
    assert copy.stat().st_blocks * 512 < MIB
    assert copy.stat().st_mode & 0o777 == 0o600


def test_a_copy_of_nothing_but_holes_works(tmp_path: Path) -> None:
    source = tmp_path / "source"
    with source.open("wb") as file:
        file.truncate(MIB)
    workspaces._copy_sparse(source, tmp_path / "copy.img")  # pyright: ignore[reportPrivateUsage]
    assert (tmp_path / "copy.img").stat().st_size == MIB


@needs_root
def test_a_workspace_is_empty_limited_and_its_owners(tmp_path: Path, target: Path) -> None:
    found = workspaces.Workspaces(tmp_path / "images")
    found.mount("sb-x", target, size=8 * MIB, owner=12345)
    assert list(target.iterdir()) == []
    assert (target.stat().st_uid, target.stat().st_gid) == (12345, 12345)
    flags = os.statvfs(target).f_flag
    assert flags & os.ST_NOSUID
    assert flags & os.ST_NODEV
    with pytest.raises(OSError, match="No space left"):
        (target / "large").write_bytes(bytes(9 * MIB))
    assert found.names() == ["sb-x"]


@needs_root
def test_a_workspace_keeps_its_files_over_a_remount(tmp_path: Path, target: Path) -> None:
    found = workspaces.Workspaces(tmp_path / "images")
    found.mount("sb-x", target, size=8 * MIB, owner=0)
    (target / "kept").write_bytes(b"kept")
    mounts.unmount(target)
    assert list(target.iterdir()) == []
    found.mount("sb-x", target, size=8 * MIB, owner=0)
    assert (target / "kept").read_bytes() == b"kept"


@needs_root
def test_unmounting_frees_the_loop_device_and_removing_the_image(
    tmp_path: Path, target: Path
) -> None:
    found = workspaces.Workspaces(tmp_path / "images")
    found.mount("sb-x", target, size=8 * MIB, owner=0)
    assert len(traces.loop_devices(str(tmp_path))) == 1
    mounts.unmount(target)
    found.remove("sb-x")
    found.remove("sb-x")
    assert traces.loop_devices(str(tmp_path)) == []
    assert found.names() == []


@needs_root
def test_a_missing_mkfs_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspaces, "MKFS_SECONDS", 0)
    with pytest.raises(errors.RuntimeUnusable, match="making a workspace") as caught:
        workspaces.Workspaces(tmp_path / "images").mount("sb-x", tmp_path, size=8 * MIB, owner=0)
    assert "e2fsprogs" in caught.value.hint
    assert list((tmp_path / "images").iterdir()) == []


@needs_root
def test_mounts_are_listed_innermost_first_and_unmounted_whole(tmp_path: Path) -> None:
    outer = tmp_path / "with space"
    inner = outer / "inner"
    outer.mkdir()
    mounts.make_private_mount(outer)
    mounts.make_private_mount(outer)
    inner.mkdir()
    mounts.make_shared_mount(inner)
    mounts.make_shared_mount(inner)
    assert mounts.mounts_below(outer) == [inner, inner, outer]
    assert mounts.mounts_below(tmp_path / "with") == []
    for point in mounts.mounts_below(outer):
        mounts.unmount(point)
    mounts.unmount(outer)
    assert mounts.mounts_below(outer) == []


@needs_root
def test_a_mount_that_fails_says_what_and_where(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="mounting tmpfs failed"):
        mounts.mount("tmpfs", tmp_path / "nowhere", "tmpfs", 0)


def test_a_half_copied_image_is_known_and_removed(tmp_path: Path) -> None:
    found = workspaces.Workspaces(tmp_path)
    (tmp_path / "sb-x.tmp").touch()
    (tmp_path / "empty-8.ext4").touch()
    assert found.names() == ["sb-x"]
    found.remove("sb-x")
    assert [path.name for path in tmp_path.iterdir()] == ["empty-8.ext4"]


@needs_root
def test_what_a_killed_gateway_left_of_an_empty_image_is_swept_away(tmp_path: Path) -> None:
    found = workspaces.Workspaces(tmp_path)
    (tmp_path / "empty-8.1234.tmp").touch()
    (tmp_path / "empty-8.1234.mnt").mkdir()
    mounts.make_private_mount(tmp_path / "empty-8.1234.mnt")
    found.sweep()
    assert list(tmp_path.iterdir()) == []


@needs_root
def test_a_workspace_of_another_size_takes_the_place_of_an_unused_one(
    tmp_path: Path, target: Path
) -> None:
    # As in a container's slot: what lies beneath the workspace must stay mounted.
    mounts.mount("k8e-slot", target, "tmpfs", mounts.MS_NOSUID)
    (target / "beneath").touch()
    found = workspaces.Workspaces(tmp_path / "images")
    found.mount("sb-x", target, size=8 * MIB, owner=12345)
    found.replace("sb-x", target, size=16 * MIB, owner=12345)
    space = os.statvfs(target)
    assert 12 * MIB < space.f_blocks * space.f_frsize <= 16 * MIB
    assert target.stat().st_uid == 12345
    assert len(traces.loop_devices(str(tmp_path))) == 1
    mounts.unmount_top(target)
    assert (target / "beneath").exists()


@needs_root
def test_a_workspace_has_as_many_files_as_it_is_given(tmp_path: Path, target: Path) -> None:
    found = workspaces.Workspaces(tmp_path / "images")
    found.mount("sb-x", target, size=16 * MIB, owner=1, inodes=300)
    assert 290 <= os.statvfs(target).f_files <= 340
    mounts.unmount(target)
    # More than there is room for is no error: a file system of nothing but inodes helps nobody.
    found.mount("sb-y", target, size=8 * MIB, owner=1, inodes=1 << 30)
    assert os.statvfs(target).f_files <= 8 * MIB // workspaces.LEAST_PER_INODE + 64
    (target / "one").write_bytes(bytes(MIB))


@needs_root
def test_prepared_images_do_not_grow_in_number(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspaces, "KEEP_EMPTY", 2)
    found = workspaces.Workspaces(tmp_path)
    for number, inodes in enumerate((100, 200, 100, 300)):
        found.mount(f"sb-{number}", target, size=4 * MIB, owner=1, inodes=inodes)
        mounts.unmount(target)
    names = sorted(path.name for path in tmp_path.glob("empty-*"))
    assert names == ["empty-2-4194304-100.ext4", "empty-2-4194304-300.ext4"]


@needs_root
@pytest.mark.parametrize("is_renamed", [False, True])
def test_a_repaired_copy_that_nobody_mounted_yet_is_mounted(
    tmp_path: Path, target: Path, is_renamed: bool
) -> None:
    found = workspaces.Workspaces(tmp_path / "images")
    found.mount("sb-x", target, size=8 * MIB, owner=12345)
    (target / "mine").write_text("precious")
    mounts.unmount(target)
    if not is_renamed:  # as it is while the broken one still has the name
        image = found.image("sb-x")
        image.rename(image.with_suffix(".healed"))
        image.touch()
    found.finish_heal("sb-x", target)
    assert (target / "mine").read_text() == "precious"
    assert found.names() == ["sb-x"]
    found.remove("sb-x")


@needs_root
def test_an_image_of_an_older_release_is_shown_whole_whatever_its_sandbox_has_put_there(
    tmp_path: Path, target: Path
) -> None:
    found = workspaces.Workspaces(tmp_path)
    image = found.image("sb-x")
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    argv = ["mkfs.ext4", "-q", "-F", "-m", "0", str(image)]
    subprocess.run(argv, check=True, capture_output=True, timeout=60, env={"PATH": path})
    mounts.mount_image(image, target, 0)
    (target / workspaces.FILES).mkdir()
    (target / workspaces.BALLAST).write_text("mine")
    os.chown(target / workspaces.BALLAST, 1000, 1000)
    mounts.unmount(target)
    found.mount("sb-x", target, size=64 * MIB, owner=1000)
    assert (target / workspaces.BALLAST).read_text() == "mine"
    assert (target / "lost+found").exists()


@needs_root
def test_a_sandbox_sees_neither_ballast_nor_the_top_of_its_image(
    tmp_path: Path, target: Path
) -> None:
    found = workspaces.Workspaces(tmp_path)
    found.mount("sb-x", target, size=64 * MIB, owner=1000)
    assert list(target.iterdir()) == []
    assert not [path.name for path in tmp_path.iterdir() if path.suffix == ".mnt"]
    assert [point for point in mounts.mounts_below(tmp_path) if point != target] == []
