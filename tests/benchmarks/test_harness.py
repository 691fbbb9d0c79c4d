"""The harness itself: it measures, tells, and leaves nothing behind. No test here knows a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks import timing
from k8e.bench import measure
from k8e.bench.measure import Goal, Series, Skipped, TableRow, percentile, short

ROOT = Path(__file__).parents[2]


def series(*samples: float, unit: str = "ms") -> Series:
    return Series("it", unit, list(samples))


def test_percentile_is_one_of_the_samples() -> None:
    assert percentile([3, 1, 2], 50) == 2
    assert percentile([3, 1, 2], 95) == 3
    assert percentile([7], 5) == 7


def test_bad_end_of_times_is_high_and_of_rates_low() -> None:
    assert series(*range(1, 101)).p95 == 95
    assert series(*range(1, 101), unit="MB/s").p95 == 5
    assert (series(*range(1, 101)).p99, series(*range(1, 101), unit="/s").p99) == (99, 1)


def test_the_99th_percentile_is_told_only_of_enough_samples() -> None:
    assert series(7).text() == "7.00 ms"
    assert series(*range(1, 100)).text() == "50.0 (95.0) ms"
    assert series(*range(1, 101)).text() == "50.5 (95.0, 99.0) ms"


def test_numbers_have_as_many_digits_as_are_worth_reading() -> None:
    assert [short(each) for each in (0.123, 9.994, 56.78, 1234.5)] == [
        "0.12",
        "9.99",
        "56.8",
        "1,234",
    ]


def test_a_series_survives_json() -> None:
    told = series(1, 2.5)
    assert Series.from_json(json.loads(json.dumps(told.to_json()))) == told


def test_slower_is_never_called_faster() -> None:
    rows = [TableRow("s", "", series(mine), series(10), sense="speed-up") for mine in (5, 20)]
    assert [row.ratio_text() for row in rows] == ["2.00x faster", "2.00x slower"]


def test_what_is_skipped_says_why() -> None:
    told = Skipped("first", "gvisor", "podman", "not installed").text()
    assert told == "first (gvisor): podman: skipped: not installed"


@pytest.mark.parametrize(
    ("bar", "passed"),
    [
        (Goal("faster", 4), True),
        (Goal("faster", 4.1), False),
        (Goal("ratio", 0.25), True),
        (Goal("ratio", 0.24), False),
        (Goal("share", 0.25), True),
        (Goal("share", 0.26), False),
        (Goal("most", 10), True),
        (Goal("most", 9), False),
        (Goal("least", 10), True),
        (Goal("least", 11), False),
        (None, None),
    ],
)
def test_bars(bar: Goal | None, passed: bool | None) -> None:
    sense = "speed-up" if bar is not None and bar.kind == "faster" else "multiple"
    row = TableRow("subject", "", series(10), series(40), bar, sense=sense)
    assert row.passed is passed
    assert row.to_json()["passed"] is passed


def test_contenders_take_turns_in_changing_order() -> None:
    seen: list[str] = []

    def contender(name: str) -> timing.Timed:
        return lambda: float(seen.append(name) or 1)

    samples = timing.interleave(20, {name: contender(name) for name in "abc"}, warm_up=1)
    rounds = ["".join(seen[at : at + 3]) for at in range(0, len(seen), 3)]
    assert len(rounds) == 21
    assert {"".join(sorted(each)) for each in rounds} == {"abc"}
    assert len(set(rounds)) > 3
    assert samples == {name: [1.0] * 20 for name in "abc"}


def test_the_clock_stops_at_the_first_line_and_all_programs_are_awaited(tmp_path: Path) -> None:
    late = tmp_path / "late"
    command = ["/bin/sh", "-c", f"echo 1; read nothing; echo x >> {late}"]
    took = timing.burst([command] * 3)
    assert len(took) == 3
    assert min(took) > 0
    assert late.read_text() == "x\nx\nx\n"


def test_a_program_without_output_is_no_measurement() -> None:
    with pytest.raises(timing.ProgramFailed, match="no output"):
        timing.first_line(["/bin/true"])


def test_program_that_fails_is_no_measurement() -> None:
    with pytest.raises(timing.ProgramFailed, match="exit code 1"):
        timing.program(["/bin/false"])()


def test_table_has_a_line_per_row() -> None:
    rows = [
        TableRow("exec", "gvisor", series(1, 2, 3), series(4, 5, 6), Goal("faster", 2), "speed-up"),
        TableRow("footprint", "", series(50, unit="MB"), None, Goal("most", 40)),
    ]
    lines = measure.table(rows).splitlines()
    assert len(lines) == 4
    assert "2.50x faster" in lines[2]
    assert lines[2].endswith("pass")
    assert lines[3].endswith("MISSED")


def test_staggered_work_begins_though_what_came_before_is_not_done() -> None:
    both = threading.Barrier(2)

    def meet() -> float:
        both.wait(30)  # the first waits for the second, which must have begun
        return 1.0

    assert timing.staggered(meet, 2, 0.001) == [1.0, 1.0]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")
def test_subjects_are_measured_and_nothing_is_left(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    options = ["--quick", "--cycles", "2", "--runtime", "container", "--output", str(output)]
    env = {**os.environ, "TMPDIR": "/tmp", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *options, "--only", "cli", "--only", "churn"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "k8e sandbox run" in done.stdout
    document: dict[str, Any] = json.loads(output.read_text("utf-8"))
    assert document["errors"] == {}
    assert document["machine"]["kernel"]
    rows = {row["ours"]["name"]: row for row in document["rows"]}
    assert {row["runtime"] for row in rows.values()} == {"container"}
    cli = rows["k8e sandbox run"]
    assert len(cli["ours"]["samples"]) == len(cli["peer"]["samples"]) == 2
    assert cli["ratio"] > 0
    assert rows["create + destroy"]["ratio"] > 0
    assert rows["left after 2 cycles"]["ours"]["samples"] == [0], rows["left after 2 cycles"]
    assert "k8e-b-" not in Path("/proc/mounts").read_text("utf-8")
