"""Archives that want to break out, and gateways that die in the middle."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import secrets
import sqlite3
import tarfile
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from k8e import errors
from k8e.guest import wire
from tests.sessions.gateways import Client, Gateways, eventually

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="the local runtimes need root"),
    pytest.mark.timeout(300),
]
RUNTIMES = ("container", "gvisor")
MIB = 1 << 20
LARGE = {"container": 150 * MIB, "gvisor": 64 * MIB}
"""Bytes that take a while to save and to restore."""


class Place(contextlib.AbstractContextManager["Place"]):
    """Gateways, one after the other, with one snapshot whose archive a test may change."""

    def __init__(self, **environ: str) -> None:
        self.gateways = Gateways(**environ)
        self.client = self.gateways.start()

    def __exit__(self, *_: object) -> None:
        self.gateways.close()

    def blobs(self) -> list[str]:
        folder = self.gateways.data / "snapshots"
        return [path.name for path in folder.iterdir()] if folder.exists() else []

    def plant(self, archive: bytes) -> None:
        """Put an archive in the place of what was saved, as whoever can write there could."""
        (blob,) = self.blobs()
        (self.gateways.data / "snapshots" / blob).write_bytes(archive)
        digest = f"sha256:{hashlib.sha256(archive).hexdigest()}"
        with contextlib.closing(sqlite3.connect(self.gateways.data / "snapshots.db")) as database:
            database.execute("UPDATE snapshots SET digest=?, size_bytes=?", (digest, len(archive)))
            database.commit()


@pytest.fixture(scope="module")
def place() -> Generator[Place]:
    with Place() as place:
        made = place.client.create(runtime="container")
        place.client.call("save_snapshot", session_id=made, name="planted")
        place.client.call("destroy_session", session_id=made)
        yield place


MARK = f"k8e-evil-{secrets.token_hex(8)}"


def tar(*members: tuple[str, bytes, int, str]) -> bytes:
    """An archive of (name, type, mode or size, target or content)."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, kind, mode, text in members:
            item = tarfile.TarInfo(name)
            item.type, item.mode = kind, mode
            content = b""
            if kind == tarfile.REGTYPE:
                content = text.encode()
                item.size = len(content)
            elif kind in (tarfile.CHRTYPE, tarfile.BLKTYPE):
                item.devmajor, item.devminor = 1, 3
            else:
                item.linkname = text
            archive.addfile(item, io.BytesIO(content))
    return packed.getvalue()


FILE, SOFT, HARD = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
ESCAPES = {
    "dots": tar((f"../../../../../../tmp/{MARK}", FILE, 0o644, "x")),
    "absolute": tar((f"/tmp/{MARK}", FILE, 0o644, "x"), (f"/etc/{MARK}", FILE, 0o644, "x")),
    "link-out": tar(("l", SOFT, 0o777, "/etc"), (f"l/{MARK}", FILE, 0o644, "x")),
    "link-to-slot": tar(("l", SOFT, 0o777, "/run/k8e"), (f"l/{MARK}", FILE, 0o644, "x")),
    "link-up": tar(("l", SOFT, 0o777, "../../.."), (f"l/{MARK}", FILE, 0o644, "x")),
    "hard-link": tar(("h", HARD, 0o644, "/etc/passwd"), ("h", FILE, 0o666, MARK)),
    "dir-then-link": tar(
        ("d", tarfile.DIRTYPE, 0o755, ""), ("d", SOFT, 0o777, "/"), (f"d/{MARK}", FILE, 0o644, "x")
    ),
    "device": tar(("null", tarfile.CHRTYPE, 0o666, ""), ("sda", tarfile.BLKTYPE, 0o666, "")),
    "set-uid": tar(("su", FILE, 0o6755, "#!/bin/sh\nid -u\n")),
}
UNPACKED = {"absolute", "set-uid"}
"""What is made, inside the workspace; with the others tar gives up, and the creation fails."""


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("attack", ESCAPES)
def test_nothing_gets_out_of_the_workspace(place: Place, runtime: str, attack: str) -> None:
    place.plant(ESCAPES[attack])
    passwd = Path("/etc/passwd").read_bytes()
    if attack in UNPACKED:
        made = place.client.create(runtime=runtime, snapshot="planted")
        who = place.client.shell(made, "id -u; test -e su && sh -c ./su; true")
        assert set(who.split()) == {"1000"}
        place.client.call("destroy_session", session_id=made)
    else:
        with pytest.raises(errors.ToolFailed, match="tar ended with"):
            place.client.create(runtime=runtime, snapshot="planted")
    assert place.client.call("list_sessions")["sessions"] == []
    assert Path("/etc/passwd").read_bytes() == passwd
    roots = [Path("/"), Path("/tmp"), Path("/etc"), Path("/run"), place.gateways.data]
    assert not [root for root in roots if (root / MARK).exists()]
    assert not list(place.gateways.folder.rglob(MARK))


def bomb() -> bytes:
    """More zeros than the disk has room for."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        item = tarfile.TarInfo("zeros")
        item.size = 40 * MIB
        archive.addfile(item, io.BytesIO(bytes(item.size)))
    return packed.getvalue()


BROKEN: dict[str, tuple[Callable[[], bytes], type[errors.K8eError]]] = {
    "bomb": (bomb, errors.LimitExceeded),
    "nonsense": (lambda: b"nonsense" * 4096, errors.ToolFailed),
    "cut": (lambda: tar(("a", FILE, 0o644, "x" * 100_000))[:50_000], errors.ToolFailed),
    "compressed": (lambda: gzip.compress(tar(("a", FILE, 0o644, "x"))), errors.ToolFailed),
}


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_archive_fails_the_restore_cleanly(place: Place, runtime: str, kind: str) -> None:
    make, expected = BROKEN[kind]
    place.plant(make())
    with pytest.raises(expected):
        place.client.create(runtime=runtime, snapshot="planted", limits={"disk": 16 * MIB})
    assert place.client.call("list_sessions")["sessions"] == []


def test_an_archive_that_is_not_what_was_saved_is_not_handed_over(place: Place) -> None:
    place.plant(tar(("a", FILE, 0o644, "good")))
    (blob,) = place.blobs()
    path = place.gateways.data / "snapshots" / blob
    path.write_bytes(path.read_bytes().replace(b"good", b"evil"))
    with pytest.raises(errors.ToolFailed, match="damaged"):
        place.client.create(runtime="container", snapshot="planted")
    assert place.client.call("list_sessions")["sessions"] == []


# Gateways that die.


def begin(client: Client, op: str, **call: object) -> int:
    """Start something, and wait until it is under way; its channel."""
    channel = client.open({"op": op, "progress": True, **call})
    kind, body = client.receive(channel)
    assert kind == wire.DATA
    assert set(wire.unpack_dict(body)) == {"bytes", "total"}
    return channel


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_gateway_that_dies_while_it_saves_leaves_no_half_snapshot(runtime: str) -> None:
    with Place() as place:
        made = place.client.create(runtime=runtime)
        place.client.shell(made, "echo small > small")
        place.client.call("save_snapshot", session_id=made, name="whole")
        other = place.client.create(runtime=runtime)
        for session_id in (made, other):
            place.client.shell(session_id, f"head -c {LARGE[runtime]} /dev/zero > big")
        begin(place.client, "save_snapshot", session_id=made, name="half")
        begin(
            place.gateways.connect(), "save_snapshot", session_id=other, name="whole", replace=True
        )
        place.gateways.kill()
        assert len(place.blobs()) > 1, "it was writing"
        client = place.gateways.start()
        (found,) = client.call("list_snapshots")["snapshots"]
        assert (found["name"], found["file_count"]) == ("whole", 1), "the one of before"
        assert len(place.blobs()) == 1
        restored = client.create(runtime=runtime, snapshot="whole")
        assert client.shell(restored, "cat small") == "small\n"
        assert client.shell(made, "cat small") == "small\n", "the session lives on"
        client.shell(made, "rm big")
        again = client.call("save_snapshot", session_id=made, name="half")
        assert again["file_count"] == 1


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_gateway_that_dies_while_it_restores_leaves_no_half_session(runtime: str) -> None:
    with Place() as place:
        made = place.client.create(runtime=runtime)
        place.client.shell(made, f"head -c {LARGE[runtime]} /dev/zero > big")
        place.client.call("save_snapshot", session_id=made, name="big")
        spec = {"runtime": runtime, "snapshot": "big", "session_id": "half"}
        begin(place.client, "create_session", spec=spec)
        place.gateways.kill()
        client = place.gateways.start()
        assert client.session("half")["phase"] == "ended"
        assert [item["session_id"] for item in client.call("list_sessions")["sessions"]] == [made]
        half = place.gateways.sandboxes()["half"]
        assert place.gateways.traces(half) == []
        again = client.create(runtime=runtime, snapshot="big", session_id="half")
        assert client.shell(again, "stat -c %s big") == f"{LARGE[runtime]}\n"


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_session_that_is_destroyed_while_it_is_saved_leaves_no_snapshot(
    place: Place, runtime: str
) -> None:
    before = place.blobs()
    made = place.client.create(runtime=runtime)
    place.client.shell(made, "head -c 100M /dev/zero > big")
    channel = begin(place.client, "save_snapshot", session_id=made, name="gone")
    place.gateways.connect().call("destroy_session", session_id=made)
    with pytest.raises(errors.SandboxDied, match="destroyed"):
        place.client.output(channel)  # there may be more progress before the error
    assert place.blobs() == before
    with pytest.raises(errors.SnapshotNotFound):
        place.client.call("get_snapshot", name="gone")


def test_a_saver_who_hangs_up_leaves_no_snapshot_and_no_tar(place: Place) -> None:
    before = place.blobs()
    made = place.client.create(runtime="container")
    place.client.shell(made, "head -c 100M /dev/zero > big")
    leaving = Client(place.gateways.run_dir / "gateway.sock")
    begin(leaving, "save_snapshot", session_id=made, name="gone")
    leaving.close()
    eventually(lambda: place.blobs() == before, "the half snapshot is gone")
    look = "cat /proc/[0-9]*/comm"
    eventually(lambda: "tar" not in place.client.shell(made, look).split(), "tar is killed")
    place.client.call("destroy_session", session_id=made)


def peak(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def test_large_snapshots_need_little_memory_of_the_gateway() -> None:
    with Place() as place:
        pid = int(place.client.call("status")["pid"])
        made = place.client.create(runtime="container")
        place.client.shell(made, "head -c 160M /dev/zero > big")
        before = peak(pid)
        place.client.call("save_snapshot", session_id=made, name="big")
        place.client.create(runtime="container", snapshot="big")
        assert peak(pid) - before < 48 << 10, "KiB"


def test_an_owner_s_snapshots_are_bounded_by_the_setting() -> None:
    with Place(K8E_MAX_SNAPSHOT_BYTES=str(8 * MIB)) as place:
        made = place.client.create(runtime="container")
        place.client.shell(made, "head -c 5M /dev/zero > big")
        place.client.call("save_snapshot", session_id=made, name="one")
        with pytest.raises(errors.LimitExceeded, match="K8E_MAX_SNAPSHOT_BYTES"):
            place.client.call("save_snapshot", session_id=made, name="two")
        assert len(place.blobs()) == 1
        place.client.call("delete_snapshot", name="one")
        place.client.call("save_snapshot", session_id=made, name="two")


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_workspace_that_pretends_to_be_endless_is_stopped(runtime: str) -> None:
    """A file with holes is larger than any disk. The sandbox may know them as holes, or not."""
    with Place() as place:
        made = place.client.create(runtime=runtime, limits={"disk": 16 * MIB})
        place.client.shell(made, "truncate -s 1G holes")
        call = {"session_id": made, "name": "holes"}
        if runtime == "gvisor":  # it knows of no holes
            with pytest.raises(errors.LimitExceeded, match="the archive is larger"):
                place.client.call("save_snapshot", **call)
            assert place.blobs() == []
            return
        place.client.call("save_snapshot", **call)
        limits = {"disk": 16 * MIB}
        restored = place.client.create(runtime=runtime, snapshot="holes", limits=limits)
        assert place.client.shell(restored, "stat -c %s holes") == f"{1 << 30}\n"
