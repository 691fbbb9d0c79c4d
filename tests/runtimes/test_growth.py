"""What workspaces may take of a disk: no more together than there is, and for each its part."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Generator
from io import RawIOBase
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e import disk
from k8e.runtimes import mounts
from k8e.runtimes.growth import FLOOR, GROWING, Growth, Usage, Workspace, level, share_out
from k8e.runtimes.workspaces import Workspaces

MIB = 1 << 20
GIB = 1 << 30


def workspace(name: str, *, used: int = 0, free: int = GIB, recent: float = 0) -> Workspace:
    usage = Usage(backed=used, used=used, free=free, debt=0)
    return Workspace(
        sandbox_id=name,
        image="/nonexistent",
        target="/nonexistent",
        size=GIB,
        node="/nonexistent",
        device=0,
        least=4096,
        block=4096,
        usage=usage,
        recent=recent,
    )


def test_where_there_is_enough_for_all_nobody_is_bounded() -> None:
    found = [workspace("a"), workspace("b", used=GIB // 2, free=GIB // 2)]
    assert share_out(found, 2 * GIB) == {"a": GIB, "b": GIB // 2}


def test_one_that_takes_everything_leaves_each_other_its_floor() -> None:
    hog = workspace("hog", used=10 * GIB, free=10 * GIB, recent=GIB)
    others = [workspace(f"other-{number}") for number in range(3)]
    assert share_out([hog, *others], 3 * FLOOR) == {
        "hog": 0,
        **{item.sandbox_id: FLOOR for item in others},
    }


def test_most_of_what_is_short_goes_to_the_one_that_grows() -> None:
    room = 1000 * MIB
    found = share_out([workspace("a", recent=100 * GROWING), workspace("b")], room)
    assert found["b"] >= FLOOR
    assert found["a"] > 3 * found["b"]


def test_where_there_is_less_than_all_floors_each_gets_the_same() -> None:
    found = [workspace(f"w{number}") for number in range(4)]
    assert set(share_out(found, FLOOR).values()) == {FLOOR // 4}
    assert set(share_out(found, -FLOOR).values()) == {0}


sizes = st.integers(0, 4 * GIB)


@given(
    st.lists(st.tuples(sizes, sizes, st.floats(0, 4 * GIB)), max_size=12),
    st.integers(-GIB, 16 * GIB),
)
def test_nobody_gets_more_than_it_can_hold_nor_all_of_them_more_than_there_is(
    many: list[tuple[int, int, float]], room: int
) -> None:
    found = [
        workspace(f"w{number}", used=used, free=free, recent=recent)
        for number, (used, free, recent) in enumerate(many)
    ]
    grants = share_out(found, room)
    assert sum(grants.values()) <= max(0, room)
    for item in found:
        assert 0 <= grants[item.sandbox_id] <= item.usage.free
    wanted = sum(item.usage.free for item in found)
    assert sum(grants.values()) >= min(max(0, room), wanted) - 64 * len(found)


def test_shares_are_kept() -> None:
    assert level({"a": 100, "b": 100}, 90, {"a": 2, "b": 1}) == {"a": 60, "b": 30}
    assert level({"a": 10, "b": 100}, 90) == {"a": 10, "b": 80}
    assert level({}, 90) == {}


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting an image needs root")


def write(file: RawIOBase) -> None:
    file.writelines(bytes(MIB) for _ in range(256))


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[Path]:
    """A folder on a disk of its own of 640 MiB."""
    image, folder = tmp_path / "disk.img", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(640 * MIB)
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    argv = ["mkfs.ext4", "-q", "-F", "-m", "0", str(image)]
    subprocess.run(argv, check=True, capture_output=True, timeout=60, env={"PATH": path})
    folder.mkdir()
    mounts.mount_image(image, folder, 0)
    yield folder
    mounts.unmount(folder)


@needs_root
def test_the_kernel_holds_a_workspace_to_what_it_was_given(
    tmp_path: Path, small_disk: Path
) -> None:
    target = tmp_path / "mounted"
    target.mkdir()
    kept = disk.space(small_disk).free - 40 * MIB
    growth = Growth(small_disk, lambda: kept)
    workspaces = Workspaces(small_disk / "images", growth=growth)
    workspaces.mount("sb-one", target, size=256 * MIB, owner=0)
    try:
        assert growth.is_bounded("sb-one")
        with (
            (target / "file").open("wb", buffering=0) as file,
            pytest.raises(OSError, match=os.strerror(errno.ENOSPC)),
        ):
            write(file)
        assert (target / "file").stat().st_size <= 40 * MIB
        assert growth.share().held == ("sb-one",)
        (target / "file").unlink()
    finally:
        mounts.unmount(target)
    # Whatever its device is now, it is not ours to bound.
    assert growth.share().held == ()
    workspaces.remove("sb-one")
    assert len(growth) == 0


@needs_root
def test_bounds_of_a_gateway_before_us_are_known_and_lifted_where_there_is_room(
    tmp_path: Path,
) -> None:
    target = tmp_path / "mounted" / "sb-one" / "slot"
    target.mkdir(parents=True)
    short = Growth(tmp_path, lambda: disk.space(tmp_path).free - 40 * MIB)
    Workspaces(tmp_path / "images", growth=short).mount("sb-one", target, size=256 * MIB, owner=0)
    try:
        bounded = os.statvfs(target).f_bavail
        roomy = Workspaces(tmp_path / "images")
        roomy.adopt(tmp_path / "mounted")
        assert not roomy.growth.is_bounded("sb-one")
        assert os.statvfs(target).f_bavail > 4 * bounded
    finally:
        mounts.unmount(target)


def write_again(folder: Path, turn: int) -> None:
    """Replace a third of what may be there, as far as there is room."""
    path = folder / f"turn-{turn % 3}"
    block = os.urandom(MIB)
    try:
        with path.open("wb", buffering=0) as file:
            file.writelines(block for _ in range(120))
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        path.unlink()


@needs_root
@pytest.mark.timeout(300)
def test_however_often_files_are_replaced_the_disk_stays_free_though_nobody_looks(
    tmp_path: Path, small_disk: Path
) -> None:
    kept = 64 * MIB
    growth = Growth(small_disk, lambda: kept)
    workspaces = Workspaces(small_disk / "images", growth=growth)
    targets = [tmp_path / name for name in ("sb-one", "sb-two")]
    try:
        for target in targets:
            target.mkdir()
            workspaces.mount(target.name, target, size=2 * GIB, owner=0)
        growth.share()
        for turn in range(7):
            for target in targets:
                write_again(target, turn)
            assert disk.space(small_disk).free > kept
        for target in targets:  # nothing has failed, and what is free is given to who asks
            for path in target.iterdir():
                path.unlink()
        growth.share()
        assert disk.space(small_disk).free > 500 * MIB
        assert all(growth.is_bounded(target.name) for target in targets)
        assert growth.share().promised > 400 * MIB
        assert [list(target.iterdir()) for target in targets] == [[], []]
    finally:
        for target in targets:
            mounts.unmount(target)


@needs_root
def test_a_bound_that_is_lifted_gives_a_workspace_all_that_it_may_hold(
    tmp_path: Path, small_disk: Path
) -> None:
    target = tmp_path / "mounted"
    target.mkdir()
    keep = [disk.space(small_disk).free - 40 * MIB]
    growth = Growth(small_disk, lambda: keep[0])
    Workspaces(small_disk / "images", growth=growth).mount(
        "sb-one", target, size=256 * MIB, owner=0
    )
    try:
        assert os.statvfs(target).f_bavail * 4096 <= 40 * MIB
        keep[0] = 0
        growth.share()
        assert not growth.is_bounded("sb-one")
        with (target / "file").open("wb", buffering=0) as file:
            file.writelines(bytes(MIB) for _ in range(200))
        assert list(target.iterdir()) == [target / "file"]
    finally:
        mounts.unmount(target)
