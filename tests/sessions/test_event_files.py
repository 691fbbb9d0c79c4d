"""The files that events are written to: complete, bounded and valid, whatever is passed."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from k8e.model import Phase, Session, SessionSpec
from k8e.sessions import events as module
from k8e.sessions.events import Events


def session(session_id: str = "mine", sandbox_id: str = "sb-one") -> Session:
    return Session(session_id, "me", SessionSpec(), "gvisor", sandbox_id, Phase.ACTIVE, 0, 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "events"


@pytest.fixture
def events(folder: Path) -> Events:
    events = Events(folder)
    events.start([])
    return events


def only(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


async def newest(events: Events, limit: int = 0) -> list[dict[str, Any]]:
    lines, _ = await events.read(session(), limit)
    return [json.loads(line) for line in lines]


async def test_an_event_has_time_number_kind_and_session_before_its_own_fields(
    events: Events, folder: Path
) -> None:
    events.write(session(), "thing.happened", b=1, a=None, c=True)
    ((name,), _) = await events.read(session())
    found = json.loads(name)
    assert list(found) == ["at", "seq", "kind", "session_id", "b", "a", "c"]
    assert (found["seq"], found["kind"], found["session_id"]) == (1, "thing.happened", "mine")
    file = only(folder)
    assert stat.S_IMODE(only(folder).stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_an_event_cannot_pretend_to_be_another_s(events: Events) -> None:
    for name in ("at", "seq", "session_id"):
        with pytest.raises(TypeError):
            events.write(session(), "thing.happened", **{name: 1})


@pytest.mark.parametrize(
    "hostile",
    [
        'x"}\n{"seq":9,"kind":"exec.started","session_id":"mine","exec_id":"z"}',
        "\udcff\ud800 \0 \x1b[2J \u2028 \x85 \u202e",
        "é" * 5000,
        "\udcff" * 5000,
        float("nan"),
        float("inf"),
        ["a"] * 1000,
        {"k" * 5000: ["v" * 5000] * 100},
        [[["\0" * 5000] * 100] * 100] * 100,
        b"bytes",
        10**30,
    ],
)
async def test_whatever_is_passed_makes_one_valid_bounded_line(
    events: Events, folder: Path, hostile: Any
) -> None:
    events.begin(session())
    events.write(session(), "thing.happened", text=hostile)
    events.write(session(), "thing.happened", text="after")
    file = only(folder)
    data = file.read_bytes()
    assert data.isascii()
    assert len(data.decode().splitlines()) == 2
    assert len(data) < module.MAX_LINE + 1000
    assert [item["seq"] for item in await newest(events)] == [1, 2]
    json.dumps(await newest(events), ensure_ascii=False).encode()  # no halves of characters
    events.close()
    events.begin(session())
    assert events.unfinished(session()) == []


async def test_long_texts_are_cut_at_a_kibibyte_and_say_so(events: Events) -> None:
    events.write(session(), "exec.started", command="é" * 600, other="x" * 1024)
    (found,) = await newest(events)
    assert found["command"].endswith("é…")
    assert len(found["command"].encode()) <= 1024
    assert found["other"] == "x" * 1024


async def test_a_full_file_loses_its_older_half_and_says_so(
    events: Events, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 10_000)
    events.begin(session())
    for number in range(1000):
        events.write(session(), "thing.happened", number=number, text="x" * 100)
        file = only(folder)
        assert file.stat().st_size <= 10_000
    lines, truncated = await events.read(session())
    assert truncated
    numbers = [json.loads(line)["seq"] for line in lines]
    assert numbers == list(range(numbers[0], 1001))
    assert len(numbers) > 20
    assert stat.S_IMODE(only(folder).stat().st_mode) == 0o600


async def test_only_the_newest_are_told_and_that_there_were_others(events: Events) -> None:
    for number in range(600):
        events.write(session(), "thing.happened", number=number)
    lines, truncated = await events.read(session())
    assert (len(lines), truncated) == (500, True)
    lines, truncated = await events.read(session(), 600)
    assert (len(lines), truncated) == (600, False)
    ((line,), truncated) = await events.read(session(), 1)
    assert (json.loads(line)["number"], truncated) == (599, True)
    assert await events.read(session(sandbox_id="sb-other")) == ([], False)


async def test_numbers_go_on_after_a_restart_and_half_a_line_is_none(
    events: Events, folder: Path
) -> None:
    events.begin(session())
    events.exec_started(session(), "run-1", command="sleep 9")
    events.exec_started(session(), "run-2", command="true")
    events.exec_finished(session(), "run-2", exit_code=0)
    file = only(folder)
    with file.open("ab") as torn:
        torn.write(b'{"at":1,"seq":4,"kind":"exec.st')
    lines, _ = await events.read(session())
    assert len(lines) == 3, "a reader is not given half a line"
    again = Events(folder)
    again.start(["sb-one"])
    again.begin(session())
    assert again.unfinished(session()) == ["run-1"]
    again.write(session(), "thing.happened")
    assert [item["seq"] for item in await newest(again)] == [1, 2, 3, 4]
    events.close()
    again.close()


async def test_a_full_disk_stops_nobody_and_leaves_a_gap(
    events: Events, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    events.begin(session())
    events.write(session(), "first.one")
    real = os.write

    def full(fd: int, data: bytes) -> int:
        real(fd, data[: len(data) // 2])
        monkeypatch.setattr(os, "write", half)
        return len(data) // 2

    def half(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    events.write(session(), "second.one")
    events.write(session(), "third.one")
    monkeypatch.undo()
    events.write(session(), "fourth.one")
    assert [item["seq"] for item in await newest(events)] == [1, 4]
    assert caplog.text.count("is lost") == 2


def test_files_of_nobody_are_removed_at_the_start(events: Events, folder: Path) -> None:
    for name in ("sb-kept", "sb-gone"):
        events.write(session(sandbox_id=name), "thing.happened")
    (folder / "kept.tmp").touch()
    (folder / "somebody-s").mkdir()
    Events(folder).start(["sb-kept"])
    assert sorted(file.name for file in folder.iterdir()) == ["kept.jsonl", "somebody-s"]


async def test_a_sandbox_that_waits_has_its_file_and_its_session_goes_on_with_it(
    events: Events, folder: Path
) -> None:
    events.expect("sb-one")
    made = only(folder).stat().st_ino
    events.begin(session())
    events.write(session(), "session.created")
    assert only(folder).stat().st_ino == made
    assert [item["kind"] for item in await newest(events)] == ["session.created"]


def test_nothing_is_left_of_a_sandbox_that_waited_for_nobody(events: Events, folder: Path) -> None:
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    for number in range(3):
        events.expect(f"sb-{number}")
    events.expect_no_more("sb-0")
    events.begin(session(sandbox_id="sb-1"))
    events.expect_no_more("sb-1")  # it is a session's now
    events.close()
    assert [file.name for file in folder.iterdir()] == ["1.jsonl"]
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before
