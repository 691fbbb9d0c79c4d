"""The gateway's reserve: kept while there is room, given up step by step when there is none."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from k8e import database, disk, errors

MIB = 1 << 20
TABLE = ("CREATE TABLE things (name TEXT);",)


@pytest.fixture(autouse=True)
def no_other_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_reserve", None)


def blocks(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_a_reserve_has_its_blocks_and_gives_them_up_step_by_step(tmp_path: Path) -> None:
    reserve = disk.keep_reserve(tmp_path, 16 * MIB, 0)
    assert reserve.held == reserve.size == 16 * MIB <= blocks(tmp_path / "reserve")
    for left in range(15, -1, -1):
        assert disk.give_way()
        assert reserve.held == left * MIB
    assert not disk.give_way()
    assert blocks(tmp_path / "reserve") == 0


def test_what_is_not_urgent_leaves_half_of_the_reserve(tmp_path: Path) -> None:
    reserve = disk.keep_reserve(tmp_path, 16 * MIB, 0)
    while disk.give_way(urgent=False):
        pass
    assert reserve.held == 8 * MIB
    assert disk.give_way()


def test_a_reserve_is_filled_again_of_what_is_spare_and_never_twice(tmp_path: Path) -> None:
    disk.keep_reserve(tmp_path, 16 * MIB, 0)
    while disk.give_way():
        pass
    reserve = disk.Reserve(tmp_path / "reserve", 16 * MIB)  # of the next gateway
    reserve.fill(5 * MIB + 1)
    assert reserve.held == 5 * MIB
    reserve.fill(1 << 40)
    assert (reserve.held, reserve.missing) == (16 * MIB, 0)
    assert disk.Reserve(tmp_path / "reserve", 4 * MIB).held == 4 * MIB


def test_no_reserve_is_taken_from_what_has_to_stay_free(tmp_path: Path) -> None:
    assert disk.keep_reserve(tmp_path, 16 * MIB, 1 << 60).held == 0


def test_a_file_gets_blocks_and_stays_as_long_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(b"x")
        file.flush()
        assert disk.allocate(file.fileno(), MIB)
    assert path.stat().st_size == 1
    assert blocks(path) >= MIB


def test_a_full_disk_is_told_in_words_that_say_what_to_do(tmp_path: Path) -> None:
    disk.refuse_if_full(tmp_path, 0, "nothing needs")
    with pytest.raises(
        errors.LimitExceeded, match=r"disk is nearly full: .* left; a thing needs"
    ) as told:
        disk.refuse_if_full(tmp_path, 1 << 60, "a thing needs")
    assert "k8e image prune" in told.value.hint


def test_a_database_has_room_for_its_log_before_it_needs_it(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    database.connect(path, TABLE, durable=True).close()
    opened = database.connect(path, TABLE, durable=True)
    assert blocks(tmp_path / "a.db-wal") >= database.LOG_BYTES
    opened.close()


def test_a_statement_alone_gets_room_from_the_reserve(
    tmp_path: Path,
) -> None:
    reserve = disk.keep_reserve(tmp_path, 16 * MIB, 0)
    opened = database.connect(
        tmp_path / "a.db", ("CREATE TABLE things (name TEXT);",), durable=True
    )
    pages = int(opened.execute("PRAGMA page_count").fetchone()[0])
    opened.execute(f"PRAGMA max_page_count={pages}")  # a disk that is full, as far as SQLite knows
    with pytest.raises(sqlite3.OperationalError) as told:
        opened.execute("INSERT INTO things VALUES (?)", ("x" * 100_000,))
    assert database.is_full(told.value)
    assert reserve.held == 0, "it was tried again for each step"
    assert not database.is_full(sqlite3.OperationalError())
    opened.close()
