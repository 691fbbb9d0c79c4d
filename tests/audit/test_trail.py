"""The trail by itself: a chain that shows what was done to it, kept within its bounds."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import resource
import statistics
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from k8e import errors
from k8e.audit import act, query
from k8e.audit import trail as audit_trail
from k8e.audit.act import Act, AuditCaller
from k8e.audit.query import MAX_LOOKS, Looks
from k8e.audit.rows import ALLOWED, AuditRow, ChainLink, Filter
from k8e.audit.segments import SegmentWriter, segments, sync
from k8e.audit.trail import MAX_FOLLOWERS, Trail
from k8e.gateway.identity import UnknownPeer
from k8e.model import Phase, Session, SessionSpec

ME = AuditCaller("key:me", "key", "192.0.2.7:40000")
OTHER = AuditCaller("key:other", "certificate", "192.0.2.8:40000")
SECRET = "s3cr3t-value"
PATIENCE = 10.0


def session(owner: str = "key:me", name: str = "sess-a") -> Session:
    return Session(name, owner, SessionSpec(), "container", "sb-x", Phase.ACTIVE, 0, 0)


def make(folder: Path, **settings: Any) -> Trail:
    bounds: dict[str, Any] = {"max_bytes": 1 << 30, "max_age": 0}
    return Trail(folder, **bounds | settings)


@contextmanager
def acts(caller: AuditCaller, call: str = "exec", session_id: str = "") -> Generator[None]:
    before = act.current()
    act.begin(Act(caller, call, session_id))
    yield
    act.begin(before)


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in query.following(folder, Filter(), "", 10_000).lines]


def lines(folder: Path) -> list[bytes]:
    return b"".join(path.read_bytes() for path in segments(folder)).splitlines()


async def filled(folder: Path, count: int = 6) -> Trail:
    """A trail whose gateway is still there."""
    trail = make(folder)
    for number in range(count):
        trail.record("file.written", path=f"file-{number}")
    return trail


# The chain.


async def test_rows_have_numbers_and_the_hash_of_the_row_before(tmp_path: Path) -> None:
    trail = make(tmp_path / "audit")
    async with trail.running():
        with acts(ME):
            trail.event(session(), "file.written", {"path": "a", "size": 3}, None)
    found = read(tmp_path / "audit")
    assert [row["action"] for row in found] == [
        "gateway.started",
        "file.written",
        "gateway.stopped",
    ]
    assert [row["seq"] for row in found] == [1, 2, 3]
    assert [row["prev"] for row in found[1:]] == [row["hash"] for row in found[:-1]]
    body, _, _ = lines(tmp_path / "audit")[1].partition(b',"hash":')
    assert hashlib.sha256(body).hexdigest() == found[1]["hash"]
    assert found[1] | {"at": 0, "prev": "", "hash": ""} == {
        "seq": 2,
        "at": 0,
        "action": "file.written",
        "outcome": "allowed",
        "principal": "key:me",
        "via": "key",
        "peer": "192.0.2.7:40000",
        "session": "sess-a",
        "detail": {"path": "a", "size": 3},
        "prev": "",
        "hash": "",
    }


async def test_a_changed_row_is_found(tmp_path: Path) -> None:
    trail = await filled(tmp_path)
    (path,) = segments(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"file-3", b"file-X"))
    found = await trail.verify()
    assert found.problems == ["row 4 is not what its hash says"]


async def test_a_changed_row_with_a_new_hash_breaks_the_chain(tmp_path: Path) -> None:
    trail = await filled(tmp_path)
    (path,) = segments(tmp_path)
    all_lines = lines(tmp_path)
    body = all_lines[3].partition(b',"hash":')[0].replace(b"file-3", b"file-X")
    forged = body + b',"hash":"' + hashlib.sha256(body).hexdigest().encode() + b'"}'
    all_lines[3] = forged
    path.write_bytes(b"".join(line + b"\n" for line in all_lines))
    assert (await trail.verify()).problems == ["row 5 does not follow row 4"]


@pytest.mark.parametrize("gone", [0, 2, 5])
async def test_a_removed_row_is_found(tmp_path: Path, gone: int) -> None:
    trail = await filled(tmp_path)
    (path,) = segments(tmp_path)
    all_lines = lines(tmp_path)
    del all_lines[gone]
    path.write_bytes(b"".join(line + b"\n" for line in all_lines))
    (problem,) = (await trail.verify()).problems
    assert problem in (
        "rows before 2 are missing, and no row says that they were removed",
        "row 4 does not follow row 2",
        "rows from 6 to 6 are missing at the end",
    )


async def test_rows_in_another_order_are_found(tmp_path: Path) -> None:
    trail = await filled(tmp_path)
    (path,) = segments(tmp_path)
    all_lines = lines(tmp_path)
    all_lines[1], all_lines[2] = all_lines[2], all_lines[1]
    path.write_bytes(b"".join(line + b"\n" for line in all_lines))
    assert (await trail.verify()).problems


async def test_a_chain_that_was_made_anew_lacks_the_head_that_somebody_remembers(
    tmp_path: Path,
) -> None:
    trail = await filled(tmp_path / "a")
    before = await trail.verify()
    head = ChainLink(before.last, "", before.head)
    trail.record("file.removed", path="x")
    assert not (await trail.verify(head)).problems
    anew = await filled(tmp_path / "b")
    assert not (await anew.verify()).problems
    assert (await anew.verify(head)).problems == ["row 6, as it was expected, is not there"]


async def test_a_chain_that_was_made_anew_is_not_the_one_that_the_gateway_wrote(
    tmp_path: Path,
) -> None:
    trail, anew = await filled(tmp_path / "a"), make(tmp_path / "b")
    for number in range(6):
        anew.record("file.written", path=f"other-{number}")
    (path,), (other,) = segments(tmp_path / "a"), segments(tmp_path / "b")
    path.write_bytes(other.read_bytes())
    assert (await trail.verify()).problems == ["row 6 is another one than this gateway wrote"]


# Crashes.


async def test_the_next_gateway_goes_on_with_the_chain(tmp_path: Path) -> None:
    for _ in range(3):
        trail = make(tmp_path)
        async with trail.running():
            trail.record("file.written", path="a")
    trail = make(tmp_path)
    found = await trail.verify()
    assert (found.rows, found.last, found.problems) == (9, 9, [])


async def test_half_a_row_is_taken_away_and_that_is_written_down(tmp_path: Path) -> None:
    trail = await filled(tmp_path)
    trail._writer.close()  # pyright: ignore[reportPrivateUsage]
    (path,) = segments(tmp_path)
    with path.open("ab") as file:
        file.write(b'{"seq":7,"at":1')
    trail = make(tmp_path)
    async with trail.running():
        assert not (await trail.verify()).problems
    assert [(row["action"], row["detail"]) for row in read(tmp_path)][6] == (
        "audit.repaired",
        {"bytes": 15},
    )


@pytest.mark.parametrize("name", [7, 9])
async def test_a_segment_that_was_begun_and_never_written_to_hides_no_row(
    tmp_path: Path, name: int
) -> None:
    trail = await filled(tmp_path)
    trail._writer.close()  # pyright: ignore[reportPrivateUsage]
    (tmp_path / f"{name:015d}.jsonl").touch()
    trail = make(tmp_path)
    cursor = (await trail.newest(Filter(), 1)).cursor
    trail.record("file.written", path="after the crash")
    (line,) = (await trail.following(Filter(), cursor, 5)).lines
    assert json.loads(line)["seq"] == 7
    assert not (await trail.verify()).problems


def test_segments_that_are_full_are_brought_to_the_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SegmentWriter(tmp_path, max_bytes=1, max_age=0)
    for number in range(300):
        detail = {"path": f'"{number:01000d}"'}
        writer.append(AuditRow("file.written", ALLOWED, "", "gateway", "", "", "", detail))
    synced: list[int] = []

    def note(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)

    monkeypatch.setattr(os, "fdatasync", note)
    sync(tmp_path, writer.written())
    assert len(synced) > 3
    assert synced == [path.stat().st_ino for path in segments(tmp_path)]
    synced.clear()
    sync(tmp_path, writer.written())
    assert synced == [segments(tmp_path)[-1].stat().st_ino]
    writer.close()


def test_two_gateways_do_not_write_one_trail(tmp_path: Path) -> None:
    trail = make(tmp_path)
    with pytest.raises(errors.Conflict, match="another gateway"):
        make(tmp_path)
    trail._writer.close()  # pyright: ignore[reportPrivateUsage]
    make(tmp_path)


async def test_rows_that_find_no_room_are_counted_and_told_by_the_next_one(tmp_path: Path) -> None:
    trail = await filled(tmp_path, 2)
    (path,) = segments(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, before[1]))
    try:
        for _ in range(3):
            trail.record("file.written", path="lost")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    trail.record("file.written", path="again")
    assert not (await trail.verify()).problems
    assert [(row["action"], row["detail"]) for row in read(tmp_path)[2:]] == [
        ("audit.lost", {"count": 3}),
        ("file.written", {"path": "again"}),
    ]


# Bounds.


def test_a_row_costs_the_hot_path_next_to_nothing(tmp_path: Path) -> None:
    trail = make(tmp_path)
    fields = {"exec_id": "0123456789abcdef", "background": False, "command": "echo hello"}
    call = {"argv": ["/bin/sh", "-c", "echo hello"]}
    took: list[float] = []
    with acts(ME):
        for _ in range(2000):
            began = time.perf_counter()
            trail.event(session(), "exec.started", fields, call)
            took.append(time.perf_counter() - began)
    assert statistics.median(took) < 50e-6


# What is in it.


def run_row(folder: Path, content: str, call: dict[str, Any], **fields: Any) -> dict[str, Any]:
    trail = make(folder, content=content)
    trail.event(session(), "exec.started", {"exec_id": "x", **fields}, call)
    return read(folder)[0]["detail"]


@pytest.mark.parametrize("content", ["commands", "hashes", "all"])
def test_code_and_commands_are_kept_as_the_setting_says(tmp_path: Path, content: str) -> None:
    command = {"argv": ["/bin/sh", "-c", "echo hello"], "env": {"TOKEN": SECRET}}
    code = {"code": b"print('hello')", "language": "python", "env": {"TOKEN": SECRET}}
    ran = run_row(tmp_path / "a", content, command, command="echo hello")
    coded = run_row(tmp_path / "b", content, code, language="python", size=14)
    digest = hashlib.sha256(b"print('hello')").hexdigest()
    assert (coded["sha256"], coded["size"]) == (digest, 14)
    assert ("echo hello" in str(ran)) == (content != "hashes")
    assert ("sha256" in ran) == (content != "commands")
    assert ("hello" in str(coded)) == (content == "all")
    assert SECRET.encode() not in b"".join(lines(tmp_path / "a") + lines(tmp_path / "b"))


def test_texts_are_bounded_and_cannot_forge_a_row(tmp_path: Path) -> None:
    trail = make(tmp_path, content="all")
    evil = '"},\n{"seq":9,"action":"session.created"' + "\x1b[2J" + "x" * 100_000
    trail.event(session(), "file.written", {"path": evil}, None)
    trail.event(session(), "exec.started", {"exec_id": "x"}, {"code": evil.encode()})
    assert len(read(tmp_path)) == 2
    assert all(len(line) < 16 << 10 and line.isascii() for line in lines(tmp_path))


def test_control_characters_hide_no_code_and_a_long_field_hides_no_other(tmp_path: Path) -> None:
    code = b"import os\n" + b"\x01" * 100_000
    kept = run_row(tmp_path / "a", "all", {"code": code}, language="python")
    assert kept["code"].startswith("import os\n\x01\x01")
    assert len(kept["code"]) > 4000
    assert kept["size"] == len(code)
    trail = make(tmp_path / "b")
    hosts = ["\x01" * 1000] * 32
    trail.event(session(), "session.created", {"runtime": "gvisor", "allowed_hosts": hosts}, None)
    assert read(tmp_path / "b")[0]["detail"] == {"runtime": "gvisor", "cut": True}


def test_an_unknown_setting_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidRequest, match="K8E_AUDIT_CONTENT"):
        make(tmp_path, content="everything")


# Refusals.


def test_what_is_refused_leaves_a_row_and_mistakes_leave_none(tmp_path: Path) -> None:
    trail = make(tmp_path)
    with acts(ME, "exec", "sess-of-others"):
        trail.refused(errors.SessionNotFound("session sess-of-others not found"))
        trail.refused(errors.InvalidRequest("argv must be a list"))
        trail.refused(errors.Conflict("session 'sess-of-others' exists already"))
    trail.refused(UnknownPeer("not a key"), Act(AuditCaller("", "grpc", "192.0.2.9:1"), "Exec"))
    told = [
        (row["principal"], row["peer"], row["session"], row["detail"]["code"])
        for row in read(tmp_path)
    ]
    assert told == [
        ("key:me", "192.0.2.7:40000", "sess-of-others", "session_not_found"),
        ("key:me", "192.0.2.7:40000", "sess-of-others", "conflict"),
        ("", "192.0.2.9:1", "", "unauthenticated"),
    ]
    assert {row["outcome"] for row in read(tmp_path)} == {"denied"}


def test_a_key_that_stands_where_a_name_belongs_is_not_kept(tmp_path: Path) -> None:
    digits = "0123456789abcdef" * 4
    trail = make(tmp_path)
    act = Act(AuditCaller("", "grpc", "192.0.2.9:1"), "Exec", "k8e-" + digits)
    trail.refused(errors.SessionNotFound(f"session 'k8e-{digits}' not found"), act)
    (row,) = read(tmp_path)
    assert row["session"] == "k8e-…"
    assert row["detail"]["why"] == "session 'k8e-…' not found"


def test_a_flood_of_refusals_is_a_few_rows_and_a_number(tmp_path: Path) -> None:
    trail = make(tmp_path)
    for number in range(1000):
        act = Act(AuditCaller("", "grpc", f"192.0.2.9:{number}"), "Exec")
        trail.refused(UnknownPeer("not a key"), act)
    trail._flush(time.monotonic() + audit_trail.WINDOW + 1)  # pyright: ignore[reportPrivateUsage]
    found = read(tmp_path)
    assert len(found) == audit_trail.BURST + 1
    assert found[-1]["detail"] == {"code": "unauthenticated", "count": 1000 - audit_trail.BURST}


def test_a_host_with_many_addresses_is_one_kind_of_refusal(tmp_path: Path) -> None:
    trail = make(tmp_path)
    for number in range(100):
        act = Act(AuditCaller("", "grpc", f"[2001:db8::{number:x}]:{number}"), "Exec")
        trail.refused(UnknownPeer("not a key"), act)
    trail._flush(time.monotonic() + audit_trail.WINDOW + 1)  # pyright: ignore[reportPrivateUsage]
    found = read(tmp_path)
    assert len(found) == audit_trail.BURST + 1
    assert found[-1]["peer"] == "2001:db8::/64"


def test_kinds_of_refusals_without_end_fill_no_memory() -> None:
    counts = audit_trail.Folding()
    for number in range(audit_trail.MAX_KINDS + 10):
        for _ in range(audit_trail.BURST + 2):
            counts.admit((str(number),), now=0)
    assert [count for _, count in counts.over(now=1)] == [2] * 10


# Reading.


@pytest.fixture
def mixed(tmp_path: Path) -> Trail:
    """Rows of two principals and the gateway."""
    trail = make(tmp_path)
    for number in range(10):
        for caller in (ME, OTHER):
            with acts(caller):
                name = f"sess-{caller.principal[4:]}"
                owned = session(caller.principal, name)
                trail.event(owned, "exec.started", {"exec_id": str(number)}, None)
    trail.event(session("key:me", "sess-me"), "session.ended", {"reason": "idle"}, None)
    with acts(OTHER):
        decided = {"status": "rejected", "approval_id": "x"}
        trail.event(session("key:me", "sess-me"), "approval.decided", decided, None)
    return trail


async def ask(trail: Trail, limit: int = 100, **wanted: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (await trail.newest(Filter(**wanted), limit)).lines]


async def test_rows_are_found_by_each_filter(mixed: Trail) -> None:
    assert len(await ask(mixed)) == 22
    assert len(await ask(mixed, session="sess-me")) == 12
    assert len(await ask(mixed, principal="key:other")) == 11
    assert len(await ask(mixed, action="exec.*", principal="key:me")) == 10
    assert [row["action"] for row in await ask(mixed, denied=True)] == ["approval.decided"]
    assert len(await ask(mixed, since=time.time() + 60)) == 0
    assert len(await ask(mixed, until=time.time() + 60)) == 22
    assert len(await ask(mixed, until=1)) == 0
    assert [row["seq"] for row in await ask(mixed, limit=2)] == [21, 22]


async def test_a_principal_sees_rows_of_its_own_and_of_its_sessions(mixed: Trail) -> None:
    mine = await ask(mixed, of="key:me")
    assert len(mine) == 12
    assert (mine[-2]["via"], mine[-2]["principal"]) == ("gateway", "key:me")
    assert (mine[-1]["principal"], mine[-1]["owner"]) == ("key:other", "key:me")
    assert await ask(mixed, of="key:me", session="sess-other") == []
    assert await ask(mixed, of="key:m") == []


async def test_pages_go_on_where_the_last_one_ended(mixed: Trail) -> None:
    seen: list[int] = []
    cursor, more = "", True
    while more:
        page = await mixed.following(Filter(), cursor, 5)
        seen += [json.loads(line)["seq"] for line in page.lines]
        cursor, more = page.cursor, page.more
    assert seen == list(range(1, 23))
    for nonsense in ("x", "1", "1:-1", "1:2:3"):
        with pytest.raises(errors.InvalidRequest):
            await mixed.following(Filter(), nonsense, 5)


async def test_who_follows_gets_a_row_when_it_comes(mixed: Trail) -> None:
    cursor = (await mixed.newest(Filter(), 1)).cursor
    assert (await mixed.following(Filter(), cursor, 5, wait=0.05)).lines == []
    waiting = asyncio.create_task(mixed.following(Filter(action="key.*"), cursor, 5, wait=PATIENCE))
    await asyncio.sleep(0)
    mixed.record("file.written", path="not this one")
    mixed.record("key.created", name="new")
    (line,) = (await asyncio.wait_for(waiting, PATIENCE)).lines
    assert json.loads(line)["detail"] == {"name": "new"}


async def test_only_so_many_can_follow_at_once_and_admins_always_can(mixed: Trail) -> None:
    cursor = (await mixed.newest(Filter(), 1)).cursor
    mine = Filter(of="key:me")

    def follow(who: str) -> asyncio.Task[query.Page]:
        return asyncio.create_task(mixed.following(mine, cursor, 5, PATIENCE, who))

    waiting = [follow(f"key:{number}") for number in range(MAX_FOLLOWERS)]
    await asyncio.sleep(0)
    with pytest.raises(errors.LimitExceeded, match="wait for rows"):
        await mixed.following(mine, cursor, 5, PATIENCE, "key:me")
    assert not (await mixed.following(mine, cursor, 5, who="key:me")).lines
    admin = asyncio.create_task(mixed.following(Filter(), cursor, 5, PATIENCE, "local"))
    await asyncio.sleep(0)
    with acts(ME):
        mixed.record("file.written", path="for all of them")
    pages = await asyncio.wait_for(asyncio.gather(admin, *waiting), PATIENCE)
    assert [len(page.lines) for page in pages] == [1] * (MAX_FOLLOWERS + 1)
    assert (await mixed.following(Filter(), cursor, 5)).lines


async def test_one_caller_has_so_many_looks_at_once_and_others_look_meanwhile(
    mixed: Trail,
) -> None:
    cursor = (await mixed.newest(Filter(), 1)).cursor
    waiting = [
        asyncio.create_task(mixed.following(Filter(), cursor, 5, PATIENCE, "key:me"))
        for _ in range(MAX_LOOKS)
    ]
    await asyncio.sleep(0)
    for look in (
        mixed.newest(Filter(), 1, "key:me"),
        mixed.following(Filter(), cursor, 1, 0, "key:me"),
        mixed.verify(None, "key:me"),
    ):
        with pytest.raises(errors.LimitExceeded, match="of yours"):
            await look
    assert (await mixed.newest(Filter(), 1, "local")).lines
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert (await mixed.newest(Filter(), 1, "key:me")).lines


async def test_who_leaves_in_the_middle_takes_no_second_thread() -> None:
    looks, begun, go_on = Looks(), threading.Event(), threading.Event()

    def read() -> str:
        begun.set()
        assert go_on.wait(PATIENCE)
        return "read"

    first = asyncio.create_task(looks.read(read))
    assert await asyncio.to_thread(begun.wait, PATIENCE)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    begun.clear()
    second = asyncio.create_task(looks.read(read))
    left = [asyncio.create_task(looks.read(read)) for _ in range(100)]
    await asyncio.sleep(0)
    for task in left:
        task.cancel()
    await asyncio.wait(left)
    assert not begun.is_set(), "the thread of the first one is still there"
    go_on.set()
    assert await asyncio.wait_for(second, PATIENCE) == "read"
    assert await asyncio.wait_for(looks.read(read), PATIENCE) == "read"


async def test_one_look_forward_reads_only_so_much(
    mixed: Trail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "MAX_READ", 1000)
    wanted = Filter(action="approval.*")
    page = await mixed.following(wanted, "", 5, PATIENCE)
    assert (page.lines, page.more) == ([], True)
    while page.more:
        page = await mixed.following(wanted, page.cursor, 5)
    assert [json.loads(line)["seq"] for line in page.lines] == [22]


async def test_a_page_ends_when_it_has_enough_bytes(
    mixed: Trail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "MAX_PAGE", 1000)
    newest, first = await mixed.newest(Filter(), 100), await mixed.following(Filter(), "", 100)
    for page in (newest, first):
        assert page.more
        assert 1000 <= sum(map(len, page.lines)) < 1000 + len(page.lines[-1])
    assert json.loads(newest.lines[-1])["seq"] == 22
    assert json.loads(first.lines[0])["seq"] == 1


async def test_old_segments_are_found_too(tmp_path: Path) -> None:
    trail = make(tmp_path, max_bytes=1 << 20)
    with acts(ME):
        trail.event(session(name="sess-old"), "exec.started", {"exec_id": "x"}, None)
    for number in range(3000):
        trail.record("file.written", path=f"{number:0200d}")
    assert len(segments(tmp_path)) > 3
    assert len(await ask(trail, session="sess-old")) == 1


def test_a_flood_from_any_number_of_addresses_is_bounded_too(tmp_path: Path) -> None:
    trail = make(tmp_path)
    for number in range(2 * audit_trail.GROUP_BURST):
        act = Act(AuditCaller("", "grpc", f"[2001:db8:0:{number:x}::1]:9"), "Exec")
        trail.refused(UnknownPeer("not a key"), act)
    known = Act(AuditCaller("key:ci:id-1", "key", "192.0.2.1:1"), "Exec")
    trail.refused(UnknownPeer("not yours"), known)
    trail._flush(time.monotonic() + audit_trail.WINDOW + 1)  # pyright: ignore[reportPrivateUsage]
    found = read(tmp_path)
    assert len(found) == audit_trail.GROUP_BURST + 2
    (counted,) = [row for row in found if "count" in row["detail"]]
    assert (counted["peer"], counted["detail"]["count"]) == ("*", audit_trail.GROUP_BURST)
    assert [row["principal"] for row in found].count("key:ci:id-1") == 1, (
        "whom we know counts alone"
    )
