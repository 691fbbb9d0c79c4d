"""State that was damaged: a gateway starts all the same, or says what is wrong; and never more."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from k8e import errors, settings
from k8e.audit import query, rows, segments
from k8e.auth.store import SqliteKeyStore
from k8e.cli import state
from k8e.egress import presets
from k8e.egress.records import NetworkRecords
from k8e.gateway import tls
from k8e.images import registry
from k8e.images.store import ImageStore
from k8e.runtimes import overlays, uids
from k8e.runtimes.host import Host, SandboxRecord
from k8e.runtimes.registry import Runtimes
from k8e.sessions.approval_store import SqliteApprovalStore
from k8e.sessions.events import Log
from k8e.sessions.exposures import ExposureStore
from k8e.sessions.snapshots import SqliteSnapshotStore
from k8e.sessions.templates import TemplateStore
from tests.fuzz.running import fuzz, helpful
from tests.fuzz.values import JSON, damaged
from tests.sessions.fakes import ME, World

DEEP = b"[" * 100_000
RECORD: dict[str, Any] = {
    "sandbox_id": "sb-x",
    "runtime": "container",
    "limits": {"cpus": 1.0, "memory": 1 << 30, "pids": 64, "disk": 1 << 30},
    "id_base": 0x70000000,
    "pid": 12,
    "pid_started": 34,
    "workspace_of": "",
    "settled": True,
    "root": "",
    "env": {"A": "b"},
}
BOUND: dict[str, Any] = {
    "generation": 3,
    "rules": [["a.example:443", False]],
    "open": False,
    "strict": True,
}
IMAGE: dict[str, Any] = {
    "name": "r.example/x:y",
    "digest": "sha256:" + "0" * 64,
    "layers": ["sha256:" + "1" * 64],
}


def contents(good: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """A file as it should be with damage, or with fields of other types, or something else."""
    whole = json.dumps(good).encode()
    return (
        damaged(whole)
        | JSON.map(lambda value: json.dumps(value).encode())
        | st.sampled_from([b"", b"\xff\xfe", DEEP, b"1e999", b"9" * 5000])
        | _other_fields(good)
    )


def _other_fields(good: dict[str, Any]) -> st.SearchStrategy[bytes]:
    names = st.sampled_from(sorted(good) or ["x"])
    fields = st.dictionaries(names, JSON, min_size=1, max_size=3)
    return fields.map(lambda other: json.dumps({**good, **other}).encode())


def in_folder(work: Callable[[Path], object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        work(Path(folder))


# Files.


ROW = rows.AuditRow("a.b", rows.ALLOWED, "me", "key", "", "", "", {})


def _trail(count: int) -> bytes:
    lines, head = b"", rows.NO_HASH
    for number in range(1, count + 1):
        line, head = rows.encode(number, 1.5, ROW, head)
        lines += line
    return lines


ROWS = _trail(4)


@fuzz(120)
@given(damaged(ROWS) | st.binary(max_size=200) | st.sampled_from([b"", DEEP, b"\n" * 5000]))
@example(ROWS[:-20])
def test_an_audit_trail_that_was_damaged_is_told_and_goes_on(data: bytes) -> None:
    def read(folder: Path) -> None:
        (folder / f"{1:015}.jsonl").write_bytes(data)
        writer = segments.SegmentWriter(folder, max_bytes=1 << 20, max_age=0)
        before = writer.seq
        writer.append(ROW)
        assert writer.seq == before + 1
        writer.close()
        check = query.Verifying(folder, None, rows.ChainLink(writer.seq, "", writer.head))
        while (found := check.step()) is None:
            pass
        assert found.problems or writer.repaired or data == ROWS[: len(data)] or not data.strip()
        page = query.following(folder, rows.Filter(), "", 100)
        assert page.lines[-1].startswith(f'{{"seq":{writer.seq},')

    in_folder(read)


@fuzz(60)
@given(st.text(max_size=30), st.text(max_size=30))
@example("1879048192-sb-x", "/nowhere")
@example("9" * 400 + "-sb-x", "x")
def test_claims_of_uids_that_mean_nothing_stop_nobody(name: str, target: str) -> None:
    def read(folder: Path) -> None:
        claims = folder / "claims"
        claims.mkdir()
        with contextlib.suppress(OSError, ValueError):
            (claims / (name or "x")).symlink_to(target or "x")
        known = uids.Uids(folder / "sandboxes", claims=claims)
        known.load({})
        base = known.take("sb-new")
        assert base >= uids.FIRST_ID
        assert known.take("sb-other") != base
        known.free("sb-new")

    in_folder(read)


@fuzz(60)
@given(contents({"keys": {"container": ""}, "support": [{"runtime": "container", "usable": True}]}))
def test_what_was_found_out_about_runtimes_is_found_out_again(data: bytes) -> None:
    def read(folder: Path) -> None:
        given = {"K8E_DATA_DIR": str(folder / "d"), "K8E_RUN_DIR": str(folder / "r")}
        (folder / "d").mkdir()
        known = Runtimes(Host(settings.load(given)))
        mine = json.dumps(known._key("container")).encode()  # pyright: ignore[reportPrivateUsage]
        told = data.replace(b'"container": ""', b'"container": ' + mine)
        (folder / "d" / "probe.json").write_bytes(told)
        known._load()  # pyright: ignore[reportPrivateUsage]

    in_folder(read)


@fuzz(120)
@given(contents(RECORD))
@example(json.dumps({**RECORD, "limits": {"cpus": -1}}).encode())
@example(json.dumps({**RECORD, "pid": "../../self"}).encode())
def test_a_sandbox_with_a_damaged_record_is_not_adopted(data: bytes) -> None:
    def read(folder: Path) -> None:
        (folder / "sb-x").mkdir()
        (folder / "sb-x" / "sandbox.json").write_bytes(data)
        found = SandboxRecord.load(folder / "sb-x")
        assert found is None or (found.sandbox_id == "sb-x" and type(found.pid) is int)

    in_folder(read)


@fuzz(120)
@given(contents({"slot": 4, "bound": BOUND, "before": BOUND}))
def test_a_damaged_record_of_a_network_belongs_to_nobody(data: bytes) -> None:
    def read(folder: Path) -> None:
        (folder / "sandboxes").mkdir()
        (folder / "sandboxes" / "sb-x.json").write_bytes(data)
        NetworkRecords(folder).load()

    in_folder(read)


@fuzz(40)
@given(st.binary(max_size=20) | st.sampled_from([b"", b"9" * 5000, b"-1"]))
def test_no_generation_is_used_twice_whatever_its_file_holds(data: bytes) -> None:
    def read(folder: Path) -> None:
        (folder / "generation").write_bytes(data)
        records = NetworkRecords(folder)
        records.load()
        records.skip(7)  # what the kernel has
        found = records.next_generation()
        assert 7 < found < 1 << 32
        again = NetworkRecords(folder)
        again.load()
        assert again.next_generation() > found

    in_folder(read)


@fuzz(60)
@given(contents(IMAGE))
def test_a_damaged_image_is_none(data: bytes) -> None:
    def read(folder: Path) -> None:
        store = ImageStore(folder)
        store.prepare()
        (folder / "names").mkdir(exist_ok=True)
        (folder / "names" / "x.json").write_bytes(data)
        for image in store.listing():
            assert all(store.layer(item).parent.parent.name for item in image.layers)

    in_folder(read)


@fuzz(60)
@given(contents({"auths": {"r.example": {"auth": "YTpi"}}}))
def test_passwords_that_cannot_be_read_are_told(data: bytes) -> None:
    def read(folder: Path) -> None:
        (folder / "config.json").write_bytes(data)
        try:
            registry.find(str(folder / "config.json"), "r.example")
        except errors.InvalidRequest as error:
            helpful(error)

    in_folder(read)


@fuzz(60)
@given(contents({"session_id": "sess-x", "tenant_id": "default", "phase": "active"}))
def test_a_damaged_state_file_names_no_session_or_a_text(data: bytes) -> None:
    def read(folder: Path) -> None:
        home, os.environ["HOME"] = os.environ["HOME"], str(folder)
        try:
            path = state.path_of("default")
            path.parent.mkdir(parents=True)
            path.write_bytes(data)
            assert isinstance(state.load("default"), str)
            state.forget("sess-x")
        finally:
            os.environ["HOME"] = home

    in_folder(read)


@fuzz(60)
@given(contents({"sha256": "x", "names": ["localhost"], "not_after": 1e12}), contents({}))
def test_what_is_only_remembered_is_made_again(record: bytes, uses: bytes) -> None:
    def read(folder: Path) -> None:
        (folder / tls.RECORD).write_bytes(record)
        assert tls.due(folder, 0)
        (folder / "uses").write_bytes(uses)
        overlays._uses(folder)  # pyright: ignore[reportPrivateUsage]
        (folder / "indexes.json").write_bytes(record)
        presets._load(folder / "indexes.json", "x")  # pyright: ignore[reportPrivateUsage]

    in_folder(read)


LINES = b"".join(
    b'{"at":1.5,"seq":%d,"kind":"exec.%s","session_id":"s","exec_id":"e%d"}\n' % (n, kind, n)
    for n, kind in enumerate([b"started", b"finished", b"started"], 1)
)


@fuzz(120)
@given(damaged(LINES) | st.binary(max_size=100))
@example(b'{"at":1.5,"seq":' + b"9" * 5000 + b',"kind":"x"}\n')
@example(LINES.replace(b"e1", b"\xff"))
def test_damaged_events_are_gone_and_new_ones_are_not(data: bytes) -> None:
    def read(folder: Path) -> None:
        path = folder / "x.jsonl"
        path.write_bytes(data)
        log = Log(path)
        log.add("s", "file.written", {"path": "p"})
        log.close()
        assert path.read_bytes().endswith(b'"path":"p"}\n')

    in_folder(read)


def test_a_file_of_events_without_lines_is_cut_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k8e.sessions.events.MAX_BYTES", 500)
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"x" * 490 + b"\n")
    log = Log(path)
    log.add("s", "file.written", {"path": "p"})
    log.close()
    assert path.read_bytes().count(b"\n") == 1


# Databases.


def spoil(path: Path, table: str, column: str, value: str) -> None:
    with sqlite3.connect(path) as database:
        database.execute(f"UPDATE {table} SET {column}=?", (value,))
    database.close()


@fuzz(12)
@given(
    st.sampled_from(["spec", "allowed_hosts", "phase", "parent"]),
    contents({}).map(lambda data: data.decode("utf-8", "replace")),
)
@example("spec", "[1")
@example("spec", "[]")
@example("spec", DEEP.decode())
@example("allowed_hosts", "7")
@example("allowed_hosts", "[7]")
@example("phase", "eaten")
def test_a_session_that_cannot_be_read_is_told_and_never_guessed(column: str, value: str) -> None:
    async def play(folder: Path) -> None:
        world = World(folder)
        async with world.running() as sessions:
            spec = await sessions.templates.specify({"session_id": "mine"})
            await sessions.create(ME, spec)
        spoil(folder / "sessions.db", "sessions", column, value)
        try:
            async with world.running() as sessions:
                sessions.listing(ME, ended=True)
        except errors.StateUnusable as error:
            helpful(error)

    in_folder(lambda folder: asyncio.run(play(folder)))


@fuzz(40)
@given(st.binary(min_size=1, max_size=60) | damaged(b"SQLite format 3\0" + bytes(100)))
def test_a_file_that_is_no_database_is_told_as_what_it_is(data: bytes) -> None:
    def read(folder: Path) -> None:
        path = folder / "x.db"
        path.write_bytes(data)
        for store in (
            SqliteApprovalStore,
            ExposureStore,
            SqliteKeyStore,
            SqliteSnapshotStore,
            TemplateStore,
        ):
            try:
                store(path).close()
            except errors.StateUnusable as error:
                helpful(error, "x.db")
            else:
                return  # SQLite can make use of it

    in_folder(read)


@fuzz(15)
@given(contents({"name": "x"}).map(lambda data: data.decode("utf-8", "replace")))
@example(DEEP.decode())
def test_a_template_that_cannot_be_read_is_unusable_and_the_others_are_not(text: str) -> None:
    async def play(folder: Path) -> None:
        world = World(folder)
        async with world.running() as sessions:
            await sessions.templates.apply({"name": "x"}, "me")
            await sessions.templates.apply({"name": "y"}, "me")
        with sqlite3.connect(folder / "templates.db") as database:
            database.execute("UPDATE templates SET recipe=? WHERE name='x'", (text,))
        database.close()
        async with world.running() as sessions:
            assert sessions.templates.get("y").name == "y"
            assert "x" in [entry.name for entry in sessions.templates.listing()]

    in_folder(lambda folder: asyncio.run(play(folder)))
