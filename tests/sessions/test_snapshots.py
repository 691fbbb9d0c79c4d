"""Snapshots without sandboxes: names, rows, blobs, quotas, and guests that misbehave."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from k8e import errors
from k8e.guest import wire
from k8e.link import FrameSink
from k8e.model import MIB, Limits, Phase, Principal, Session, SessionSpec
from k8e.sessions import archives, exchange
from k8e.sessions.operations import Operation
from k8e.sessions.snapshots import Snapshots
from tests.sessions.fakes import ME, OTHER

pytestmark = pytest.mark.anyio
SESSION = "sess-one"
DISK = 4 * MIB


class Tar:
    """A guest that was asked to pack, and answers what a test tells it to."""

    def __init__(self, script: Callable[[Tar], None]) -> None:
        self._script = script
        self._operation: Operation | None = None
        self._sink: FrameSink | None = None
        self.granted = wire.WINDOW
        self.call: dict[str, Any] = {}
        self.cancelled = False
        self._seq = 0

    # What snapshots know of sessions.

    def get(self, principal: Principal, session_id: str) -> Session:
        if principal != ME or session_id != SESSION:
            raise errors.SessionNotFound("not found")
        spec = SessionSpec(limits=Limits(disk=DISK))
        return Session(session_id, "me", spec, "gvisor", "sb", Phase.ACTIVE, 0, 0)

    async def open(
        self,
        principal: Principal,
        session_id: str,
        call: dict[str, Any],
        on_frame: FrameSink,
        *,
        own: bool = False,
    ) -> Operation:
        self.call = call
        self._operation = Operation("exec", on_frame)
        self._operation.attach(self)  # pyright: ignore[reportArgumentType]
        self._operation.receive(wire.RESULT, wire.pack({"id": "x", "pid": 2}))
        self._script(self)
        return self._operation

    # What an operation knows of a link.

    def send(self, kind: int, body: bytes = b"") -> None:
        if kind == wire.CREDIT:
            self.granted += wire.CREDIT_BODY.unpack(body)[0]
            asyncio.get_running_loop().call_soon(self.on_credit)
        self.cancelled |= kind == wire.CANCEL

    def close(self) -> None:
        pass

    def on_credit(self) -> None:
        """For scripts that go on when they may."""

    # What scripts say.

    def say(self, kind: int, data: bytes) -> None:
        assert self._operation is not None
        self.granted -= len(data)
        self._operation.receive(kind, wire.SEQ.pack(self._seq) + data)
        self._seq += len(data)

    def leave(self, code: int = 0, status: str = "completed") -> None:
        assert self._operation is not None
        body = {"code": code, "status": status, "duration_ms": 1, "truncated": False}
        self._operation.receive(wire.EXIT, wire.pack(body))


def good(content: bytes = b"archive") -> Callable[[Tar], None]:
    def script(tar: Tar) -> None:
        tar.say(wire.OUT, content)
        tar.say(wire.ERR, b"./\n./a\n./b/\n./b/c\\nd\n")
        tar.leave()

    return script


@asynccontextmanager
async def opened(
    folder: Path, script: Callable[[Tar], None], **options: Any
) -> AsyncGenerator[Snapshots]:
    bounds: Any = {"max_bytes": 64 * MIB, **options}
    snapshots = Snapshots(folder, Tar(script), **bounds)
    try:
        await snapshots.start()
        yield snapshots
    finally:
        snapshots.close()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "snapshots").iterdir())


async def test_what_is_saved_is_found_until_it_is_deleted(tmp_path: Path) -> None:
    async with opened(tmp_path, good()) as snapshots:
        saved, warning = await snapshots.save(ME, SESSION, "one", replace=False)
        digest = f"sha256:{hashlib.sha256(b'archive').hexdigest()}"
        assert (saved.digest, saved.layers, warning) == (digest, (digest,), "")
        assert (saved.file_count, saved.size_bytes, saved.session_id) == (2, 7, SESSION)
        assert files(tmp_path) == [saved.blob]
        assert (tmp_path / "snapshots" / saved.blob).read_bytes() == b"archive"
        assert snapshots.get("me", "one") == saved
        assert snapshots.listing("me") == [saved]
        await snapshots.delete("me", "one")
        assert files(tmp_path) == []
        with pytest.raises(errors.SnapshotNotFound, match="not found"):
            snapshots.get("me", "one")


async def test_somebody_else_finds_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path, good()) as snapshots:
        await snapshots.save(ME, SESSION, "one", replace=False)
        assert snapshots.listing(OTHER.name) == []
        with pytest.raises(errors.SnapshotNotFound):
            await snapshots.delete(OTHER.name, "one")
        with pytest.raises(errors.SessionNotFound):
            await snapshots.save(OTHER, SESSION, "one", replace=True)
        await snapshots.put(OTHER.name, "one", ["sha256:x"])  # names are per owner
        assert len(snapshots.listing("me")) == 1


async def test_a_name_is_replaced_only_where_that_is_asked_for(tmp_path: Path) -> None:
    async with opened(tmp_path, good()) as snapshots:
        first, _ = await snapshots.save(ME, SESSION, "one", replace=False)
        with pytest.raises(errors.Conflict):
            await snapshots.save(ME, SESSION, "one", replace=False)
        assert files(tmp_path) == [first.blob]
        second, _ = await snapshots.save(ME, SESSION, "one", replace=True)
        assert files(tmp_path) == [second.blob]
        assert first.blob != second.blob


async def test_two_savers_of_one_name_do_not_mix(tmp_path: Path) -> None:
    async with opened(tmp_path, good()) as snapshots:
        saves = [snapshots.save(ME, SESSION, "one", replace=False) for _ in range(4)]
        done = await asyncio.gather(*saves, return_exceptions=True)
        failed = [item for item in done if isinstance(item, BaseException)]
        assert len(failed) == 3
        assert all(isinstance(item, errors.Conflict) for item in failed)
        assert files(tmp_path) == [snapshots.get("me", "one").blob]


@pytest.mark.parametrize("name", ["", "a" * 64, "a/b", "..%2f", "a b", "é", "\ud800", "a\n"])
async def test_names_that_are_none_are_refused(tmp_path: Path, name: str) -> None:
    async with opened(tmp_path, good()) as snapshots:
        with pytest.raises(errors.InvalidRequest):
            snapshots.get("me", name)
        with pytest.raises(errors.InvalidRequest):
            await snapshots.put("me", name, [])
        with pytest.raises(errors.InvalidRequest):
            await snapshots.save(ME, SESSION, name, replace=False)


@pytest.mark.parametrize("name", [".", "..", "a.b-c_D9", "x" * 63])
async def test_all_other_names_are_only_names(tmp_path: Path, name: str) -> None:
    async with opened(tmp_path, good()) as snapshots:
        saved, _ = await snapshots.save(ME, SESSION, name, replace=False)
        assert files(tmp_path) == [saved.blob]


async def test_a_start_removes_what_was_left_half_done(tmp_path: Path) -> None:
    async with opened(tmp_path, good()) as snapshots:
        kept, _ = await snapshots.save(ME, SESSION, "kept", replace=False)
        lost, _ = await snapshots.save(ME, SESSION, "lost", replace=False)
    folder = tmp_path / "snapshots"
    (folder / "blob-half.part").write_bytes(b"half")
    (folder / "blob-nobodys").write_bytes(b"whole")
    (folder / lost.blob).unlink()
    async with opened(tmp_path, good()) as snapshots:
        assert snapshots.listing("me") == [kept]
        assert files(tmp_path) == [kept.blob]


async def test_nothing_is_made_where_nobody_saves(tmp_path: Path) -> None:
    async with opened(tmp_path, good()):
        pass
    assert not (tmp_path / "snapshots").exists()


# K8E's registry.


async def test_a_name_without_content_is_listed_and_got_but_not_restored(tmp_path: Path) -> None:
    async with opened(tmp_path, good()) as snapshots:
        await snapshots.put("me", "named", ["sha256:a", "sha256:b"])
        assert snapshots.get("me", "named").layers == ("sha256:a", "sha256:b")
        with pytest.raises(errors.InvalidRequest, match="its content was never saved"):
            snapshots.get_content("me", "named")
        await snapshots.put("me", "named", ["sha256:c"])
        assert snapshots.get("me", "named").layers == ("sha256:c",)
        await snapshots.save(ME, SESSION, "full", replace=False)
        with pytest.raises(errors.Conflict, match="content of its own"):
            await snapshots.put("me", "full", [])
        with pytest.raises(errors.Conflict):
            await snapshots.save(ME, SESSION, "named", replace=False)
        await snapshots.save(ME, SESSION, "named", replace=True)
        assert snapshots.get_content("me", "named").size_bytes == 7


async def test_a_registry_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k8e.sessions.snapshots.MAX_NAMES", 2)
    async with opened(tmp_path, good()) as snapshots:
        for layers in (["x"] * 1001, ["x" * 201], [""], ["a\nb"]):
            with pytest.raises((errors.LimitExceeded, errors.InvalidRequest)):
                await snapshots.put("me", "a", layers)
        await snapshots.put("me", "a", [])
        await snapshots.put("me", "b", [])
        await snapshots.put("me", "b", ["x"])
        for work in (snapshots.save(ME, SESSION, "c", replace=False),):
            with pytest.raises(errors.LimitExceeded, match="2 snapshots"):
                await work
        with pytest.raises(errors.LimitExceeded):
            await snapshots.put("me", "c", [])


# Guests that misbehave, and tar that fails.


async def test_an_exit_code_of_tar_is_an_error_with_its_words(tmp_path: Path) -> None:
    def script(tar: Tar) -> None:
        tar.say(wire.OUT, b"part")
        tar.say(wire.ERR, b"./a\ntar: ./b: Cannot open: Permission \x1b[31mdenied\n")
        tar.leave(2)

    async with opened(tmp_path, script) as snapshots:
        with pytest.raises(errors.ToolFailed) as caught:
            await snapshots.save(ME, SESSION, "one", replace=False)
        assert "tar ended with 2: tar: ./b: Cannot open: Permission" in str(caught.value)
        assert "\x1b" not in str(caught.value)
        assert files(tmp_path) == []
        assert snapshots.listing("me") == []


async def test_files_that_changed_meanwhile_are_warned_of(tmp_path: Path) -> None:
    def script(tar: Tar) -> None:
        tar.say(wire.OUT, b"archive")
        tar.say(wire.ERR, b"./a\ntar: ./a: file changed as we read it\n")
        tar.leave(1)

    async with opened(tmp_path, script) as snapshots:
        saved, warning = await snapshots.save(ME, SESSION, "one", replace=False)
        assert "file changed as we read it" in warning
        assert saved.file_count == 1


@pytest.mark.parametrize("kind", [wire.OUT, wire.ERR])
async def test_a_guest_that_sends_for_ever_is_stopped(tmp_path: Path, kind: int) -> None:
    tars: list[Tar] = []

    def script(tar: Tar) -> None:
        def more() -> None:
            while tar.granted >= 64 << 10:
                tar.say(kind, b"x" * (64 << 10))

        tars.append(tar)
        tar.on_credit = more
        more()

    async with opened(tmp_path, script) as snapshots:
        with pytest.raises(errors.LimitExceeded):
            await snapshots.save(ME, SESSION, "one", replace=False)
        assert files(tmp_path) == []
    assert tars[0].cancelled
    assert tars[0].call["kill_on_disconnect"] is True


async def test_an_owner_s_quota_counts_what_is_there_and_what_is_being_written(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, good(b"x" * MIB), max_bytes=5 * MIB // 2) as snapshots:
        saves = [snapshots.save(ME, SESSION, f"n{i}", replace=False) for i in range(4)]
        done = await asyncio.gather(*saves, return_exceptions=True)
        failed = [item for item in done if isinstance(item, BaseException)]
        assert 2 <= len(failed) <= 3
        assert all("K8E_MAX_SNAPSHOT_BYTES" in str(item) for item in failed)
        for item in snapshots.listing("me"):
            await snapshots.delete("me", item.name)
        await snapshots.save(ME, SESSION, "again", replace=False)
        await snapshots.save(ME, SESSION, "more", replace=False)
        with pytest.raises(errors.LimitExceeded):
            await snapshots.save(ME, SESSION, "most", replace=False)


async def test_a_saver_who_leaves_leaves_nothing(tmp_path: Path) -> None:
    tars: list[Tar] = []
    written = asyncio.Event()

    def script(tar: Tar) -> None:
        tars.append(tar)
        tar.on_credit = written.set
        tar.say(wire.OUT, b"x" * MIB)

    async with opened(tmp_path, script) as snapshots:
        task = asyncio.create_task(snapshots.save(ME, SESSION, "one", replace=False))
        await written.wait()
        assert len(files(tmp_path)) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert files(tmp_path) == []
        assert tars[0].cancelled


async def test_a_guest_that_never_ends_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "SECONDS", 0.05)
    monkeypatch.setattr(exchange, "GRACE", 0.05)
    async with opened(tmp_path, lambda tar: None) as snapshots:
        with pytest.raises(errors.GuestFailed, match="in time"):
            await snapshots.save(ME, SESSION, "one", replace=False)
        assert files(tmp_path) == []


@pytest.mark.parametrize("code", [-1, 1 << 20, "0", None])
async def test_a_guest_that_reports_no_exit_code_has_failed(tmp_path: Path, code: Any) -> None:
    async with opened(tmp_path, lambda tar: tar.leave(code)) as snapshots:
        with pytest.raises(errors.GuestFailed):
            await snapshots.save(ME, SESSION, "one", replace=False)


async def test_a_full_disk_of_the_gateway_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: object, parts: list[bytes]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archives.Writer, "_write", full)
    async with opened(tmp_path, good()) as snapshots:
        with pytest.raises(errors.LimitExceeded, match="gateway's disk is full"):
            await snapshots.save(ME, SESSION, "one", replace=False)
        assert files(tmp_path) == []


async def test_names_are_counted_however_they_are_cut() -> None:
    text = b"./\n./a\n./b/\n./b/c\ntar: hm\n./d"
    for at in range(len(text)):
        listing = archives.TarListing()
        listing.add(text[:at])
        listing.add(text[at:] + b"\n")
        assert listing.files == 3
        assert listing.rest.text() == "tar: hm"


async def test_one_session_is_saved_once_at_a_time(tmp_path: Path) -> None:
    tars: list[Tar] = []
    begun = asyncio.Event()

    def script(tar: Tar) -> None:
        tars.append(tar)
        begun.set()

    async with opened(tmp_path, script) as snapshots:
        tasks = [
            asyncio.create_task(snapshots.save(ME, SESSION, name, replace=False))
            for name in ("a", "b", "c")
        ]
        for number in range(3):
            await begun.wait()
            begun.clear()
            assert len(tars) == number + 1
            assert len(files(tmp_path)) == number + 1
            tars[-1].leave()
        await asyncio.gather(*tasks)
        assert [item.name for item in snapshots.listing("me")] == ["a", "b", "c"]


async def test_a_folder_of_somebody_else_s_keeps_no_gateway_from_starting(tmp_path: Path) -> None:
    async with opened(tmp_path, good()) as snapshots:
        await snapshots.save(ME, SESSION, "one", replace=False)
    (tmp_path / "snapshots" / "lost+found").mkdir()
    async with opened(tmp_path, good()) as snapshots:
        assert len(snapshots.listing("me")) == 1
