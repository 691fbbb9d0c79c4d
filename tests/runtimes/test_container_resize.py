"""Folders in memory of a running sandbox get other sizes; links on the way lead nowhere."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from pathlib import Path

import pytest

from k8e.model import MIB, Limits
from k8e.runtimes import container, mounts
from k8e.runtimes.bundle import MemoryFolder, memory_folders
from k8e.system import start_time

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@pytest.fixture
def folder(tmp_path: Path) -> Generator[Path]:
    place = tmp_path / "place"
    place.mkdir()
    mounts.mount("tmpfs", place, "tmpfs", mounts.MS_NOSUID | mounts.MS_NODEV, "size=1048576")
    yield place
    mounts.unmount(place)


def size_of(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_blocks * found.f_frsize


def resize(path: Path, size: int = 4 * MIB) -> None:
    folders = [MemoryFolder(str(path), size, "1777", False)]
    container.resize_folders(os.getpid(), start_time(os.getpid()), folders)


def test_a_process_that_is_another_one_by_now_is_left_alone(folder: Path) -> None:
    started = start_time(os.getpid()) - 1
    with pytest.raises(ProcessLookupError):
        container.resize_folders(os.getpid(), started, [])


def test_a_folder_grows_and_shrinks_and_keeps_its_files(folder: Path) -> None:
    (folder / "file").write_text("kept")
    for size in (8 * MIB, 2 * MIB):
        resize(folder, size)
        assert size_of(folder) == size
    assert (folder / "file").read_text() == "kept"


def test_a_link_on_the_way_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(OSError, match="resizing failed") as raised:
        resize(tmp_path / "link")
    assert raised.value.errno in (errno.ELOOP, errno.ENOTDIR)
    assert size_of(folder) == MIB


def test_what_is_no_mount_in_memory_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "inner").mkdir()
    with pytest.raises(OSError, match="resizing failed"):
        resize(folder / "inner")
    other = tmp_path / "other"
    other.mkdir()
    before = size_of(other)
    with pytest.raises(OSError, match=r"no folder in memory|resizing failed"):
        resize(other)
    assert size_of(other) == before


def test_all_folders_together_leave_room_for_programs() -> None:
    limits = Limits(memory=80 * MIB)
    assert sum(item.size for item in memory_folders(limits)) == 70 * MIB
