"""What is fetched once, shared, kept, removed and swept."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from k8e import errors, settings
from k8e.images.service import Images
from k8e.images.unpack import UnpackBudget, Unpacked, Unpackers
from k8e.model import Rootfs
from tests.images import registries
from tests.images.building import Archive, Built, digest
from tests.places import eventually

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="unpacking as root needs root")


class Counting:
    """Counts what is unpacked."""

    def __init__(self, images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        real = Unpackers.unpack

        def unpack(*arguments: Any) -> Unpacked:
            self.count += 1
            return real(*arguments)

        monkeypatch.setattr(Unpackers, "unpack", unpack)


@pytest.fixture
def counting(images: Images, monkeypatch: pytest.MonkeyPatch) -> Counting:
    return Counting(images, monkeypatch)


def layers(place: Path) -> set[str]:
    return {path.name for path in (place / "d/images/layers").iterdir()}


async def test_a_layer_of_two_images_is_fetched_and_kept_once(
    registry: str, images: Images, place: Path, counting: Counting
) -> None:
    base = Archive().file("base", b"x" * 1000)
    Built([base, Archive().file("one", b"1")]).push(registry, "shared/one", "1")
    Built([base, Archive().file("two", b"2")]).push(registry, "shared/two", "1")
    one, two = await asyncio.gather(
        images.pull(f"{registry}/shared/one:1"), images.pull(f"{registry}/shared/two:1")
    )
    assert one.layers[0] == two.layers[0]
    assert counting.count == len(layers(place)) == 3
    assert (one.size, two.size) == (1001, 1001)


async def test_many_who_ask_at_once_get_one_pull(
    registry: str, images: Images, counting: Counting
) -> None:
    Built([Archive().file("f", b"x")]).push(registry, "once", "1")
    rootfs = Rootfs("image", f"{registry}/once:1")
    found = await asyncio.gather(*(images.provide(rootfs) for _ in range(5)))
    assert counting.count == 1
    assert len({content.key for content in found}) == 1
    await images.provide(rootfs)
    assert counting.count == 1


async def test_whoever_leaves_a_pull_does_not_end_it_for_others(
    registry: str, images: Images
) -> None:
    Built([Archive().file("f", os.urandom(100_000))]).push(registry, "left", "1")
    leaver = asyncio.create_task(images.pull(f"{registry}/left:1"))
    stayer = asyncio.create_task(images.pull(f"{registry}/left:1"))
    await asyncio.sleep(0)
    leaver.cancel()
    assert (await stayer).size == 100_000


async def test_progress_is_told_in_bytes(registry: str, images: Images) -> None:
    Built([Archive().file("f", os.urandom(3_000_000))]).push(registry, "large", "1")
    told: list[tuple[int, int]] = []
    await images.pull(f"{registry}/large:1", lambda done, total: told.append((done, total)))
    assert told
    assert all(0 < done <= total for done, total in told)


async def test_a_removed_images_layers_go_unless_another_has_them(
    registry: str, images: Images, place: Path
) -> None:
    base = Archive().file("base", b"of two")
    Built([base, Archive().file("one", b"1")]).push(registry, "gone/one", "1")
    Built([base]).push(registry, "gone/two", "1")
    one = await images.pull(f"{registry}/gone/one:1")
    two = await images.pull(f"{registry}/gone/two:1")
    await images.remove(f"{registry}/gone/one:1")
    assert images.store.prune([]) == [one.layers[1]]
    assert layers(place) == {two.layers[0].removeprefix("sha256:")}
    await images.remove(f"{registry}/gone/two:1")
    assert images.store.prune([images.store.layer(two.layers[0])]) == [], "a sandbox uses it"
    assert images.store.prune([]) == list(two.layers)
    with pytest.raises(errors.ImageNotFound):
        await images.remove(f"{registry}/gone/two:1")


async def test_what_is_being_pulled_is_not_pruned(registry: str, images: Images) -> None:
    image = Built([Archive().file("f", b"pinned")])
    image.push(registry, "pinned", "1")
    [diff_id] = [digest(layer.plain()) for layer in image.layers]
    with images.store.pinned([diff_id]):
        await images.pull(f"{registry}/pinned:1")
        await images.remove(f"{registry}/pinned:1")
        assert images.store.prune([]) == []
    assert images.store.prune([]) == [diff_id]


KILLED = """
import asyncio, sys
from k8e import settings
from k8e.images.service import Images
images = Images(settings.load())
images.prepare()
asyncio.run(images.pull(sys.argv[1]))
"""


def test_a_pull_that_is_killed_leaves_nothing_that_counts(place: Path) -> None:
    """The unpacker ends with it, and the next start sweeps."""
    image = Built([Archive().file("f", os.urandom(200_000))])
    blobs, [(kind, body)] = image.parts()

    def answer(request: BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
        if "/manifests/" in request.path:
            return 200, {"Content-Type": kind}, body
        data = blobs[request.path.rpartition("/")[2]]
        if data.startswith(b"\x1f\x8b"):
            asked.set()
            assert released.wait(30)
        return 200, {}, data

    asked, released = threading.Event(), threading.Event()
    server = registries.serve(answer)
    folders = {"K8E_DATA_DIR": str(place / "d"), "K8E_RUN_DIR": str(place / "r")}
    reference = f"127.0.0.1:{server.server_port}/tools:1"
    process = subprocess.Popen([sys.executable, "-c", KILLED, reference], env=os.environ | folders)
    scratch = place / "d/images/scratch"
    try:
        assert asked.wait(20)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        assert list(scratch.iterdir())
        released.set()
        images = Images(settings.load(folders))
        images.prepare()
        images.store.sweep()
        assert not list(scratch.iterdir())
        assert layers(place) == set()
        assert asyncio.run(images.pull(reference)).size == 200_000
        images.close()
    finally:
        process.kill()
        released.set()
        server.shutdown()
        server.server_close()


def test_an_unpacker_ends_with_whoever_started_it(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    program = f"""
import os
from pathlib import Path
from typing import Any
from k8e.images.unpack import Unpackers
reading, writing = os.pipe()
Unpackers().unpack(open(reading, "rb"), Path({str(target)!r}), 1000)
"""
    process = subprocess.Popen([sys.executable, "-c", program])

    def unpackers() -> list[Path]:
        return [
            folder
            for folder in Path("/proc").glob("[0-9]*")
            if int(folder.name) != process.pid and os.fsencode(target) in _command_line(folder)
        ]

    try:
        eventually(lambda: len(unpackers()) == 2, 20)
    finally:
        process.kill()
        process.wait(10)
    eventually(lambda: not unpackers())


def _command_line(folder: Path) -> bytes:
    try:
        return (folder / "cmdline").read_bytes()
    except OSError:
        return b""


# Archives and folders of the operator's.


async def test_an_archive_is_unpacked_once_and_again_when_it_changes(
    images: Images, place: Path, counting: Counting
) -> None:
    file = place / "root.tar"
    file.write_bytes(Archive().file("f", b"one").gzipped())
    rootfs = Rootfs("tar", str(file))
    first = await images.provide(rootfs)
    assert await images.provide(rootfs) == first
    assert counting.count == 1
    file.write_bytes(Archive().file("f", b"another").plain())
    second = await images.provide(rootfs)
    assert (second.folders[0] / "f").read_bytes() == b"another"
    assert second.key != first.key
    assert [image.name for image in await images.listing()] == [f"tar:{file}"]
    await images.remove(f"tar:{file}")


async def test_a_folder_is_used_as_it_is(images: Images, tmp_path: Path) -> None:
    folder = tmp_path / "root: with, strange:name"
    folder.mkdir()
    folder.chmod(0o755)
    content = await images.provide(Rootfs("dir", str(folder)))
    assert content.folders == (folder,)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("/", "this host's own files"),
        ("//", "this host's own files"),
        ("/tmp/..", "this host's own files"),
        ("relative", "not an absolute path"),
        ("/nowhere/at/all", "No such file"),
        ("/etc/passwd", "not a folder"),
    ],
)
async def test_what_is_no_root_is_refused(images: Images, source: str, said: str) -> None:
    with pytest.raises(errors.K8eError, match=said):
        await images.provide(Rootfs("dir", source))


async def test_k8es_own_folders_are_no_root(images: Images, place: Path) -> None:
    for folder in (place, place / "d", place / "d/images/layers"):
        with pytest.raises(errors.ImageUnusable, match="this host's own files"):
            await images.provide(Rootfs("dir", str(folder)))
    (place / "link").symlink_to("/")
    with pytest.raises(errors.ImageUnusable, match="this host's own files"):
        await images.provide(Rootfs("dir", str(place / "link")))


async def test_a_folder_that_others_may_not_read_is_refused_with_the_cure(
    images: Images, tmp_path: Path
) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o750)
    with pytest.raises(errors.ImageUnusable, match=r"chmod o\+rx"):
        await images.provide(Rootfs("dir", str(folder)))


async def test_an_unknown_kind_is_refused(images: Images) -> None:
    with pytest.raises(errors.InvalidRequest, match="unknown kind") as caught:
        await images.provide(Rootfs("floppy", "/x"))
    assert "host, dir, tar and image" in caught.value.hint


# What does not fit.


def limited(place: Path, most: int) -> Images:
    folders = {"K8E_DATA_DIR": str(place / "d"), "K8E_RUN_DIR": str(place / "r")}
    images = Images(settings.load(folders | {"K8E_MAX_IMAGE_BYTES": str(most)}))
    images.prepare()
    return images


async def test_layers_that_fit_alone_but_not_together_are_refused_and_do_not_stay(
    registry: str, place: Path
) -> None:
    parts = [Archive().file(f"f{number}", bytes(600_000)) for number in range(5)]
    Built(parts).push(registry, "together", "1")
    Built(parts[:1]).push(registry, "alone", "1")
    images = limited(place, 1_000_000)
    try:
        alone = await images.pull(f"{registry}/alone:1")
        with pytest.raises(errors.ImageUnusable, match="more than"):
            await images.pull(f"{registry}/together:1")
    finally:
        images.close()
    assert layers(place) == {alone.layers[0].removeprefix("sha256:")}
    assert not [path for path in (place / "d/images/scratch").iterdir() if (path / "size").exists()]


async def test_entries_count_over_all_layers(
    registry: str, images: Images, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UnpackBudget.__init__, "__defaults__", (5,))
    parts = [Archive().file(f"{n}/a").file(f"{n}/b").file(f"{n}/c") for n in range(2)]
    Built(parts).push(registry, "entries", "1")
    with pytest.raises(errors.ImageUnusable, match="entries"):
        await images.pull(f"{registry}/entries:1")
    images.close()
    assert layers(place) == set()


async def test_an_image_for_which_there_is_no_room_is_not_fetched(
    registry: str, images: Images, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    Built([Archive().file("f", b"room")]).push(registry, "room", "1")
    monkeypatch.setattr(images.store, "_min_free", 1 << 60)
    with pytest.raises(errors.LimitExceeded, match="disk is nearly full"):
        await images.pull(f"{registry}/room:1")
    assert counting.count == 0


DEEP = """
import os, sys
for _ in range(sys.getrecursionlimit() + 500):
    os.mkdir("d")
    os.chdir("d")
"""


def test_a_folder_that_cannot_be_removed_keeps_no_other(images: Images, place: Path) -> None:
    scratch = place / "d/images/scratch"
    for name in "0ab":
        (scratch / name).mkdir()
    try:
        subprocess.run([sys.executable, "-c", DEEP], cwd=scratch / "a", check=True, timeout=60)
        images.store.sweep()
        left = {path.name for path in scratch.iterdir()}
        assert left <= {"a"}, "newer Pythons can remove that, too"
    finally:
        subprocess.run(["rm", "-rf", scratch], check=True, timeout=60)


async def test_a_gateway_stops_while_a_registry_keeps_it_waiting(place: Path) -> None:
    asked, over = threading.Event(), threading.Event()

    def answer(request: BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
        asked.set()
        while not over.wait(0.05):
            request.wfile.write(b"x")  # of a header that never ends
        return 200, {}, b""

    server = registries.serve(answer)
    images = limited(place, 1000)
    pull = asyncio.create_task(images.pull(f"127.0.0.1:{server.server_port}/tools:1"))
    try:
        assert await asyncio.to_thread(asked.wait, 20)
        async with asyncio.timeout(10):
            await asyncio.to_thread(images.close)
            with pytest.raises(errors.ImageUnusable, match="is being stopped"):
                await pull
    finally:
        over.set()
        server.shutdown()
        server.server_close()
