"""Results become a page and a picture, the same ones for the same samples."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from benchmarks import chart, publishing
from k8e.bench.measure import Goal, Series, TableRow

DOCS = Path(__file__).parents[2] / "docs"


def first(name: str, *samples: float) -> Series:
    return Series(f"{name}, sequential", "ms", list(samples))


ROWS = [
    TableRow(
        "first echo", "container", first("k8e container, new", 40, 50, 60), first("runc run", 25)
    ),
    TableRow(
        "first echo",
        "container",
        first("k8e container, new", 40, 50, 60),
        first("podman run (crun)", 300),
        Goal("faster", 20),
        "speed-up",
        "a <note>",
    ),
    TableRow(
        "memory", "container", Series("PSS of each of 100", "MB", [8.0]), bar=Goal("most", 10)
    ),
]


@pytest.fixture
def document() -> dict[str, Any]:
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "quick": False,
        "machine": {
            "k8e": "1",
            "kernel": "6",
            "cpus": 2,
            "cpu": "c",
            "memory_mb": 24000,
            "cgroup": "v2",
            "python": "3.11",
            "load_before": 0.1,
            "load_after": 0.2,
            "runsc": "runsc 1",
        },
        "rows": [row.to_json() for row in ROWS],
        "skipped": [{"subject": "first", "runtime": "gvisor", "name": "srt", "reason": "absent"}],
        "errors": {"noise": "it failed"},
        "interactive": [],
    }


def test_the_chart_has_a_bar_for_each_system_in_order(document: dict[str, Any]) -> None:
    told = chart.panels(document)
    assert [panel.title for panel in told] == [
        "Create to first result, one after the other",
        "Memory of an idle sandbox",
    ]
    assert told[0].bars == [
        chart.Bar("runc run", 25, "floor"),
        chart.Bar("k8e container, new", 50, "ours"),
        chart.Bar("podman run (crun)", 300, "peer"),
    ]
    picture = chart.svg(told)
    texts = [each.text for each in ElementTree.fromstring(picture).iter() if each.text]
    assert "podman run (crun)" in texts
    assert "50.0 ms" in texts
    assert chart.svg(chart.panels(document)) == picture


def test_ten_times_as_much_is_always_so_much_longer() -> None:
    axis = chart.Axis.of([1, 10, 100], 400)
    lengths = [axis.length(value) for value in (1, 10, 100)]
    assert lengths[1] - lengths[0] == pytest.approx(lengths[2] - lengths[1])
    assert (lengths[0] > 0, lengths[2]) == (True, 400)
    assert axis.ticks() == [1, 10, 100]
    assert chart.Axis.of([5], 400).length(5) == 400


def test_the_page_tells_bars_subjects_and_what_is_missing(document: dict[str, Any]) -> None:
    told = publishing.section(document)
    assert "6.00x faster | ≥ 20x faster | **missed**; a <note> |" in told
    assert "PSS of each of 100 | 8.00 MB |  |  |  | ≤ 10 MB | pass |" in told
    assert "### Create to first result\n" in told
    assert "- `gvisor`, srt: absent\n- noise: it failed" in told
    assert "mean nothing" not in told
    assert "mean nothing" in publishing.section({**document, "quick": True})


def test_only_what_stands_between_the_marks_is_replaced(tmp_path: Path, document: Any) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{publishing.BEGIN}\nold\n{publishing.END}\nafter\n")
    written = publishing.publish(document, tmp_path)
    assert {path.name for path in written} == {
        f"performance.{kind}" for kind in ("json", "md", "svg")
    }
    text = page.read_text()
    assert text.startswith(f"before\n{publishing.BEGIN}\n")
    assert text.endswith(f"{publishing.END}\nafter\n")
    assert "old" not in text
    publishing.publish(json.loads((tmp_path / "performance.json").read_text()), tmp_path)
    assert page.read_text() == text, "what was published can be published again"
    with pytest.raises(ValueError, match="no section"):
        publishing.replace_section("a page without marks", "")


def test_what_is_published_is_of_one_run() -> None:
    document = json.loads((DOCS / "performance.json").read_text("utf-8"))
    page = (DOCS / "performance.md").read_text("utf-8")
    assert publishing.replace_section(page, publishing.section(document)) == page
    picture = (DOCS / "performance.svg").read_text("utf-8")
    assert chart.svg(chart.panels(document)) == picture


def test_the_summary_names_missed_bars() -> None:
    told = publishing.summary(ROWS)
    assert told == "bars reached: 1 of 2; missed: k8e container, new, sequential (container)"
    assert publishing.summary([]) == "bars reached: 0 of 0"


def test_what_is_published_names_no_folder_of_the_machine_that_measured() -> None:
    told = publishing.without_folders(
        {
            "skipped": [
                f"no output of /usr/bin/node {publishing.ROOT}/benchmarks/peers/cli.js -c echo 1",
                "no output of /home/a/k8e/benchmarks/peers/cli.js --settings /tmp/x/settings.json",
            ],
            "note": "2 of 3/s in /workspace/a, at https://host.example/a/b",
            "value": 1.5,
        }
    )
    assert told == {
        "skipped": [
            "no output of /usr/bin/node benchmarks/peers/cli.js -c echo 1",
            "no output of benchmarks/peers/cli.js --settings settings.json",
        ],
        "note": "2 of 3/s in /workspace/a, at https://host.example/a/b",
        "value": 1.5,
    }


@pytest.mark.parametrize("kind", ["json", "md", "svg"])
def test_what_was_published_names_none_either(kind: str) -> None:
    text = (publishing.DOCS / f"performance.{kind}").read_text("utf-8")
    section = text.partition(publishing.BEGIN)[2] or text
    assert publishing.without_folders(section) == section
