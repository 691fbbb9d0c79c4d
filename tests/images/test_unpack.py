"""Archives unpacked by the confined process, hostile ones first."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import stat
import tarfile
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from k8e import errors
from k8e.images import unpacker
from k8e.images.unpack import Unpacked, Unpackers
from tests.images.building import Archive, digest
from tests.places import eventually

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the images of root's gateway")

MOST_BYTES, MOST_ENTRIES = 1 << 20, 100
Unpack = Callable[[bytes], Unpacked]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "around/target"
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    return folder


@pytest.fixture
def unpack(target: Path) -> Unpack:
    def run(data: bytes) -> Unpacked:
        with open(target.parent.parent / "archive", "w+b") as file:
            file.write(data)
            file.seek(0)
            return Unpackers().unpack(file, target, MOST_BYTES, MOST_ENTRIES)

    return run


def refused(unpack: Unpack, archive: Archive) -> str:
    with pytest.raises(errors.ImageUnusable) as caught:
        unpack(archive.gzipped())
    return caught.value.message


def around(target: Path) -> set[str]:
    return {path.name for path in target.parent.iterdir()}


def test_files_folders_and_links_come_out_as_they_were(unpack: Unpack, target: Path) -> None:
    archive = Archive().folder("a").file("a/f", b"text", mode=0o755).link("l", "a/f")
    archive.hard_link("h", "a/f").file("deep/er/f", b"x")
    found = unpack(archive.gzipped())
    assert (found.size, found.entries, found.skipped) == (5, 5, 0)
    assert (target / "a/f").read_bytes() == b"text"
    assert (target / "a/f").stat().st_mtime == 1_000_000_000
    assert (target / "l").readlink() == Path("a/f")
    assert (target / "h").samefile(target / "a/f")
    assert {path.stat().st_uid for path in target.rglob("*")} == {0}


def test_the_digest_is_that_of_the_archive_without_its_compression(unpack: Unpack) -> None:
    archive = Archive().file("f", b"text")
    assert unpack(archive.gzipped()).diff_id == digest(archive.plain())


def test_an_archive_without_compression_is_read_too(unpack: Unpack, target: Path) -> None:
    archive = Archive().file("f", b"text")
    assert unpack(archive.plain()).diff_id == digest(archive.plain())
    assert (target / "f").read_bytes() == b"text"


def test_paths_that_lead_upwards_are_refused(unpack: Unpack, target: Path) -> None:
    assert "leads upwards" in refused(unpack, Archive().file("../outside", b"x"))
    assert around(target) == {"target"}


def test_absolute_paths_stay_inside(unpack: Unpack, target: Path) -> None:
    unpack(Archive().file("/etc/k8e-test-of-unpacking", b"x").gzipped())
    assert (target / "etc/k8e-test-of-unpacking").exists()
    assert not Path("/etc/k8e-test-of-unpacking").exists()


@pytest.mark.parametrize("where", ["/", "/tmp", "../..", "/proc/self/root"])
def test_a_file_through_a_link_stays_inside(unpack: Unpack, target: Path, where: str) -> None:
    archive = Archive().link("way", where).file("way/k8e-test-escaped", b"x")
    with contextlib.suppress(errors.ImageUnusable):  # the link leads to nothing in there
        unpack(archive.gzipped())
    assert around(target) == {"target"}
    assert not list(Path("/tmp").glob("k8e-test-escaped"))
    assert not Path("/k8e-test-escaped").exists()


def test_a_link_in_place_of_a_file_is_replaced_not_written_through(
    unpack: Unpack, target: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    unpack(Archive().link("f", str(victim)).file("f", b"theirs").gzipped())
    assert victim.read_bytes() == b"mine"
    assert (target / "f").read_bytes() == b"theirs"


@pytest.mark.parametrize("where", ["../../victim", "/victim", "/etc/passwd", "missing"])
def test_a_hard_link_to_the_outside_is_refused(unpack: Unpack, where: str, tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"mine")
    said = refused(unpack, Archive().hard_link("stolen", where))
    assert "leads upwards" in said or "a file that is not there" in said
    assert (tmp_path / "victim").stat().st_nlink == 1


def test_a_hard_link_through_a_link_finds_nothing_outside(unpack: Unpack) -> None:
    assert "not there" in refused(unpack, Archive().link("w", "/").hard_link("s", "w/etc/passwd"))


def test_devices_and_pipes_are_left_away(unpack: Unpack, target: Path) -> None:
    found = unpack(Archive().device("dev/mem", 1, 1).fifo("pipe").file("f").gzipped())
    assert found.skipped == 2
    assert {path.name for path in target.rglob("*")} == {"dev", "f"}


def test_nobody_gets_rights_by_a_mode(unpack: Unpack, target: Path) -> None:
    archive = Archive().file("suid", mode=0o6777).folder("open", mode=0o1777).file("closed", mode=0)
    archive.file("private", mode=0o600).file("theirs", mode=0o750, uid=1000)
    archive.file("group", mode=0o750, gid=1000)
    unpack(archive.gzipped())
    modes = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in target.iterdir()}
    assert modes == {
        "suid": "0o755",
        "open": "0o755",
        "closed": "0o400",
        "private": "0o600",
        "theirs": "0o755",
        "group": "0o755",
    }


def test_whiteouts_become_those_of_overlayfs(unpack: Unpack, target: Path) -> None:
    archive = Archive().file("a/.wh.gone").folder("b").file("b/.wh..wh..opq").file("b/new", b"x")
    archive.file("kept", b"x").file(".wh.kept").file(".wh..wh.plnk").file("a/.wh.back")
    archive.file("a/back", b"y")
    unpack(archive.gzipped())
    found = (target / "a/gone").lstat()
    assert (stat.S_ISCHR(found.st_mode), found.st_rdev) == (True, 0)
    assert os.getxattr(target / "b", "user.overlay.opaque") == b"y"
    assert (target / "kept").read_bytes() == b"x"
    assert (target / "a/back").read_bytes() == b"y"
    assert not list(target.glob(".wh.*"))


@pytest.mark.parametrize("name", [".wh..", ".wh...", ".wh."])
def test_a_whiteout_of_the_folder_itself_does_nothing(
    unpack: Unpack, target: Path, name: str
) -> None:
    assert unpack(Archive().file(f"a/{name}").gzipped()).skipped == 1
    assert around(target) == {"target"}


def test_a_later_entry_replaces_an_earlier_one(unpack: Unpack, target: Path) -> None:
    archive = Archive().folder("a").file("a/f", b"x").file("a", b"now a file").file("b", b"x")
    unpack(archive.folder("b").file("b/f", b"y").gzipped())
    assert (target / "a").read_bytes() == b"now a file"
    assert (target / "b/f").read_bytes() == b"y"


def test_too_many_entries_are_refused(unpack: Unpack) -> None:
    archive = Archive()
    for number in range(MOST_ENTRIES + 1):
        archive.file(str(number))
    assert f"more than {MOST_ENTRIES} entries" in refused(unpack, archive)


def test_files_that_are_too_large_together_are_refused(unpack: Unpack) -> None:
    archive = Archive().file("a", bytes(MOST_BYTES // 2)).file("b", bytes(MOST_BYTES // 2 + 1))
    assert "more than" in refused(unpack, archive)


def test_a_bomb_is_refused_before_it_fills_the_disk(unpack: Unpack, target: Path) -> None:
    info = tarfile.TarInfo("bomb")
    info.size = 1 << 33
    with pytest.raises(errors.ImageUnusable, match="more than"):
        unpack(gzip.compress(info.tobuf() + bytes(8 << 20)))
    assert sum(path.stat().st_size for path in target.iterdir()) <= MOST_BYTES


def test_a_disk_that_becomes_full_is_noticed() -> None:
    check = unpacker._refuse_if_full  # pyright: ignore[reportPrivateUsage]
    check(0)
    with pytest.raises(unpacker.ArchiveRefusal, match="disk is nearly full"):
        check(1 << 60)


def test_what_follows_the_archive_is_bounded_too(unpack: Unpack) -> None:
    tail = gzip.compress(bytes(4 * MOST_BYTES))
    with pytest.raises(errors.ImageUnusable, match="more than"):
        unpack(Archive().file("f").gzipped() + tail)


def test_a_sparse_file_counts_as_large_as_it_is(unpack: Unpack) -> None:
    header = tarfile.TarInfo("sparse")
    header.pax_headers = {"GNU.sparse.size": str(1 << 40), "GNU.sparse.map": "0,0"}
    data = header.tobuf(tarfile.PAX_FORMAT) + bytes(1024)
    with pytest.raises(errors.ImageUnusable, match="more than"):
        unpack(data)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_truncated_archive_is_refused(unpack: Unpack, share: float) -> None:
    data = Archive().file("f", os.urandom(50_000)).gzipped()
    with pytest.raises(errors.ImageUnusable, match=r"ends in the middle|damaged"):
        unpack(data[: int(len(data) * share)])


@pytest.mark.parametrize("data", [b"\x1f\x8bno gzip", b"hello" * 1000, os.urandom(5000)])
def test_what_is_no_archive_is_refused(unpack: Unpack, data: bytes) -> None:
    with pytest.raises(errors.ImageUnusable):
        unpack(data)


def test_zstd_is_read_or_refused_in_words(unpack: Unpack) -> None:
    with pytest.raises(errors.ImageUnusable, match=r"gzip layers|damaged|unpacked"):
        unpack(unpacker.ZSTD + b"whatever")


def test_names_that_are_too_deep_or_long_are_refused(unpack: Unpack) -> None:
    assert "too long" in refused(unpack, Archive().file("/".join("a" * 200)))
    assert "too long" in refused(unpack, Archive().file("a" * 5000))


def test_links_that_lead_deeper_than_names_are_refused(unpack: Unpack, target: Path) -> None:
    """Each name is short, and begins where the one before has ended."""
    step = "/".join("d" * 100)
    archive, here = Archive(), ""
    for number in range(3):
        archive.folder(f"{here}{step}").link(f"l{number}", f"{here}{step}")
        here = f"l{number}/"
    assert "leads too deep" in refused(unpack, archive.file(f"{here}f"))
    assert max(len(path.relative_to(target).parts) for path in target.rglob("*")) < 300


def test_an_unpacker_that_says_too_much_is_ended(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chatty = tmp_path / "chatty.py"
    chatty.write_text("while True: print('x' * 10_000)")
    monkeypatch.setattr(unpacker, "__file__", str(chatty))
    with open("/dev/null", "rb") as nothing, pytest.raises(errors.ImageUnusable, match="too much"):
        Unpackers().unpack(nothing, target, MOST_BYTES, MOST_ENTRIES)


def test_names_that_are_no_text_stay_as_they_are(unpack: Unpack, target: Path) -> None:
    unpack(Archive().file("\udcff\udcfe", b"x").file("new\nline", b"y").gzipped())
    assert {path.name for path in target.iterdir()} == {"\udcff\udcfe", "new\nline"}


def test_the_unpacker_sees_nothing_of_the_host(target: Path) -> None:
    """What the process can reach while it works, seen from outside."""
    reading, writing = os.pipe()
    unpacking = Unpackers()
    done: list[Exception] = []

    def work() -> None:
        try:
            with open(reading, "rb", buffering=0) as source:
                unpacking.unpack(source, target, MOST_BYTES, MOST_ENTRIES)
        except Exception as error:
            done.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        inner = Path("/proc") / str(eventually(lambda: _inner(target)))
        eventually(lambda: _status(inner)["CapEff"] == "0" * 16)
        assert _status(inner)["NoNewPrivs"] == "1"
        assert list((inner / "root").iterdir()) == []
        assert (inner / "net/dev").read_text().count(":") == 1  # only loopback
        for kind in ("user", "mnt", "pid", "net", "ipc", "uts"):
            assert (inner / "ns" / kind).readlink() != Path("/proc/self/ns", kind).readlink()
        unpacking.stop()
    finally:
        os.close(writing)
        thread.join(20)
    assert not thread.is_alive()
    assert eventually(lambda: _inner(target) == 0)


def _status(folder: Path) -> dict[str, str]:
    lines = (folder / "status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _inner(target: Path) -> int:
    """The process that unpacks into ``target``: the one in a namespace of its own; 0 for none."""
    needle = b"\0" + os.fsencode(target) + b"\0"
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if needle in (folder / "cmdline").read_bytes():
                numbers = _status(folder)["NSpid"].split()
                if len(numbers) > 1:
                    return int(folder.name)
        except (OSError, KeyError):
            continue
    return 0


# Cheap, without a process: what the reader makes of whatever comes.


@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(1, 200))
def test_inflating_gives_back_what_was_compressed(pieces: list[bytes], size: int) -> None:
    data = b"".join(pieces)
    source = io.BytesIO(b"".join(gzip.compress(piece) for piece in pieces) or gzip.compress(b""))
    inflated = unpacker.Inflated(source, 1 << 20)
    found = b""
    while piece := inflated.read(size):
        assert len(piece) <= size
        found += piece
    assert found == data
    assert "sha256:" + inflated.digest.hexdigest() == digest(data)


@given(st.binary(max_size=200))
@hypothesis_settings(suppress_health_check=[HealthCheck.too_slow])
def test_nothing_but_a_refusal_comes_of_damage(data: bytes) -> None:
    inflated = unpacker.Inflated(io.BytesIO(unpacker.GZIP + data), 1 << 20)
    with contextlib.suppress(unpacker.ArchiveRefusal, zlib.error):
        inflated.drain()


@given(st.text(alphabet="a./\0\n\u00e9", max_size=60))
def test_a_safe_path_never_leads_upwards(name: str) -> None:
    try:
        path = unpacker._safe(name)  # pyright: ignore[reportPrivateUsage]
    except unpacker.ArchiveRefusal:
        return
    assert path.startswith("/")
    assert ".." not in path.split("/")
    assert path == "/" or not path.endswith("/")
