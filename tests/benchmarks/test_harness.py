"""The harness itself: it measures, tells, and leaves nothing behind. No test here knows a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import reporting, timing
from k8e.bench.samples import Bar, Row, Series, percentile

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


@pytest.mark.parametrize(
    ("bar", "passed"),
    [
        (Bar("faster", 4), True),
        (Bar("faster", 4.1), False),
        (Bar("ratio", 0.25), True),
        (Bar("ratio", 0.24), False),
        (Bar("most", 10), True),
        (Bar("most", 9), False),
        (Bar("least", 10), True),
        (Bar("least", 11), False),
        (None, None),
    ],
)
def test_bars(bar: Bar | None, passed: bool | None) -> None:
    sense = "speed-up" if bar is not None and bar.kind == "faster" else "multiple"
    row = Row("subject", "", series(10), series(40), bar, sense=sense)
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


def test_program_that_fails_is_no_measurement() -> None:
    with pytest.raises(timing.ProgramFailed, match="exit code 1"):
        timing.program(["/bin/false"])()


def test_table_has_a_line_per_row() -> None:
    rows = [
        Row("exec", "gvisor", series(1, 2, 3), series(4, 5, 6), Bar("faster", 2), "speed-up"),
        Row("footprint", "", series(50, unit="MB"), None, Bar("most", 40)),
    ]
    lines = reporting.table(rows).splitlines()
    assert len(lines) == 4
    assert "2.50x faster" in lines[2]
    assert lines[2].endswith("pass")
    assert lines[3].endswith("MISSED")


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")
def test_one_subject_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    options = ["--quick", "--only", "cli", "--runtime", "container", "--output", str(output)]
    env = {**os.environ, "TMPDIR": "/tmp", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *options],
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
    (row,) = document["rows"]
    assert (row["subject"], row["runtime"]) == ("cli", "container")
    assert len(row["ours"]["samples"]) == len(row["peer"]["samples"]) == 2
    assert row["ratio"] > 0
    assert "k8e-b-" not in Path("/proc/mounts").read_text("utf-8")
