"""Archives that try to break out: images that are unpacked on the host, and snapshots."""

from __future__ import annotations

import asyncio
import gzip
import io
import secrets
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from k8e import errors
from k8e.conformance.behaviour import BrokenPromise, behaviour, equal, expect, in_a_room
from k8e.conformance.lab.rooms import Room
from k8e.conformance.stage import Stage
from k8e.images.unpack import Unpackers

MOST_BYTES, MOST_ENTRIES = 1 << 20, 100
FILE, FOLDER, SOFT, HARD = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


class ArchiveEntry(NamedTuple):
    """One entry of an archive."""

    name: str
    kind: bytes = FILE
    text: str = "x"
    """Its content, or where it leads."""
    mode: int = 0o644


def _packed(entries: Iterable[ArchiveEntry]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            item = tarfile.TarInfo(entry.name)
            item.type, item.mode = entry.kind, entry.mode
            data = entry.text.encode() if entry.kind == FILE else b""
            item.size, item.linkname = len(data), "" if data else entry.text
            if entry.kind in (tarfile.CHRTYPE, tarfile.BLKTYPE):
                item.devmajor, item.devminor, item.linkname = 1, 3, ""
            archive.addfile(item, io.BytesIO(data))
    return gzip.compress(buffer.getvalue(), 1, mtime=0)


def _hostile(mark: str, outside: str) -> dict[str, list[ArchiveEntry]]:
    """Archives that would leave a file called ``mark`` in or around ``outside``."""
    return {
        "dots": [ArchiveEntry(f"../{mark}"), ArchiveEntry(f"a/../../{mark}")],
        "absolute": [ArchiveEntry(f"{outside}/{mark}")],
        "link-out": [ArchiveEntry("l", SOFT, outside), ArchiveEntry(f"l/{mark}")],
        "link-up": [ArchiveEntry("l", SOFT, "../.."), ArchiveEntry(f"l/{mark}")],
        "link-of-link": [
            ArchiveEntry("a", SOFT, "b"),
            ArchiveEntry("b", SOFT, outside),
            ArchiveEntry(f"a/{mark}"),
        ],
        "hard-link": [ArchiveEntry("h", HARD, f"{outside}/victim"), ArchiveEntry("h", text=mark)],
        "hard-link-of-link": [
            ArchiveEntry("s", SOFT, f"{outside}/victim"),
            ArchiveEntry("h", HARD, "s"),
            ArchiveEntry("h", text=mark),
        ],
        "folder-then-link": [
            ArchiveEntry("d", FOLDER),
            ArchiveEntry("d", SOFT, outside),
            ArchiveEntry(f"d/{mark}"),
        ],
        "written-through": [
            ArchiveEntry("f", SOFT, f"{outside}/victim"),
            ArchiveEntry("f", text=mark),
        ],
        "long-link": [
            *(ArchiveEntry(f"{'d' * 60}{n}", SOFT, f"{'d' * 60}{n + 1}") for n in range(60)),
            ArchiveEntry(f"{'d' * 60}60", SOFT, outside),
            ArchiveEntry(f"{'d' * 60}0/{mark}"),
        ],
        "devices": [ArchiveEntry("null", tarfile.CHRTYPE), ArchiveEntry("disk", tarfile.BLKTYPE)],
        "pipe": [ArchiveEntry("pipe", tarfile.FIFOTYPE)],
        "many": [ArchiveEntry(f"f{number}") for number in range(MOST_ENTRIES + 1)],
        "large": [ArchiveEntry("large", text="x" * (MOST_BYTES + 1))],
    }


@behaviour("archives.images")
async def images(stage: Stage) -> None:
    """No archive of an image writes, links or makes devices outside of its folder."""
    await asyncio.to_thread(_unpack_hostile)


def _unpack_hostile() -> None:
    mark = f"k8e-{secrets.token_hex(8)}"
    for name in _hostile(mark, ""):
        with tempfile.TemporaryDirectory(prefix="k8e-") as place:
            outside, target = Path(place, "outside"), Path(place, "target")
            for folder in (Path(place), outside, target):
                folder.mkdir(exist_ok=True)
                folder.chmod(0o755)
            (outside / "victim").write_text("as it was", "utf-8")
            try:
                _unpack(_packed(_hostile(mark, str(outside))[name]), Path(place), target)
            except errors.ImageUnusable:
                pass
            else:
                expect(name not in ("many", "large"), f"an archive with {name} was taken")
            equal((outside / "victim").read_text("utf-8"), "as it was", f"a victim of {name}")
            left = {path.name for path in (*Path(place).iterdir(), *outside.iterdir())}
            equal(left - {"archive"}, {"outside", "target", "victim"}, f"around, after {name}")
            devices = [path for path in target.rglob("*") if _is_special(path)]
            equal(devices, [], f"devices and pipes of {name}")


def _is_special(path: Path) -> bool:
    return path.is_block_device() or path.is_char_device() or path.is_fifo()


def _unpack(data: bytes, place: Path, target: Path) -> None:
    with open(place / "archive", "w+b") as file:
        file.write(data)
        file.seek(0)
        Unpackers().unpack(file, target, MOST_BYTES, MOST_ENTRIES)


@behaviour("archives.bombs")
async def bombs(stage: Stage) -> None:
    """An archive that grows a thousandfold is refused before it fills a disk."""
    await asyncio.to_thread(_unpack_bomb)


def _unpack_bomb() -> None:
    for data in (
        _packed([ArchiveEntry("zeros", text="\0" * (32 << 20))]),
        gzip.compress(bytes(64 << 20)),
        b"rubbish" * 1000,
    ):
        with tempfile.TemporaryDirectory(prefix="k8e-") as place:
            target = Path(place, "target")
            target.mkdir()
            try:
                _unpack(data, Path(place), target)
            except errors.ImageUnusable:
                used = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
                expect(used <= MOST_BYTES, f"{used} bytes were written")
                continue
            raise BrokenPromise("a bomb was taken")


@in_a_room("archives.snapshots")
def snapshots(room: Room) -> None:
    """A snapshot of a hostile workspace is restored as it was, and reaches nothing outside."""
    client, name = room.scene.client, f"s-{secrets.token_hex(6)}"
    with room.beside(tenant="") as first:
        script = (
            "mkdir -p deep; echo kept > deep/file; ln -s /etc/passwd out; ln -s / root; "
            "mkfifo pipe; truncate -s 100M sparse; chmod 4755 deep/file; "
            "printf x > \"$(printf 'n\\001\\377')\"; ln deep/file hard"
        )
        equal(client.exec(first.session_id, ["bash", "-c", script]).exit_code, 0, "a workspace")
        client.save_snapshot(first.session_id, name)
    try:
        session_id = client.create_session(room.runtime, (), snapshot=name)
        try:
            look = "cat deep/file hard; readlink out root"
            done = client.exec(session_id, ["bash", "-c", look])
            equal(done.stdout.split()[:4], ["kept", "kept", "/etc/passwd", "/"], "what came back")
            run = client.exec(session_id, ["bash", "-c", "head -c 99 /etc/passwd; test -w /etc"])
            equal(run.exit_code, 1, "rights outside of the workspace")
        finally:
            client.destroy_session(session_id)
    finally:
        client.delete_snapshot(name)
