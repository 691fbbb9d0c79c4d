"""``k8e bench``: measures a real gateway, tells it as a table or as JSON, and leaves no session."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.cli.terminals import Terminal
from tests.places import Place, eventually

NAMES = [
    "create to first result",
    "destroy",
    "create to first result, 2 at once",
    "exec true",
    "exec true, 2 at once",
    "exec true, 20 at once",
    "run python",
    "run node",
    "run bash",
    "write 1 KiB",
    "read 1 KiB",
    "write 1 MiB",
    "read 1 MiB",
]


def sessions(place: Place) -> list[dict[str, Any]]:
    return place.json("sandbox", "sessions")["sessions"]


def test_a_quick_run_tells_every_sample_and_leaves_no_session(place: Place, runtime: str) -> None:
    before = sessions(place)
    told = place.json("bench", "--quick", "--json", "--runtime", runtime)
    assert (told["quick"], told["rounds"], told["at_once"]) == (True, 2, 2)
    assert told["client"]["cpus"] >= 1
    assert [row["ours"]["name"] for row in told["rows"]] == NAMES
    for row in told["rows"]:
        assert row["runtime"] == runtime
        assert row["ratio"] > 0
        for side in (row["ours"], row["peer"]):
            assert len(side["samples"]) >= 2
            assert min(side["samples"]) <= side["p50"] <= max(side["samples"])
    assert sessions(place) == before


def test_on_a_terminal_it_shows_what_it_does_and_a_table(place: Place) -> None:
    flags = ["--quick", "--rounds", "1", "--runtime", "container"]
    with Terminal(place, "bench", *flags) as terminal:
        terminal.until(b"measuring container: exec")
        terminal.until(b"python -c pass on this host")
        assert terminal.end() == 0


@pytest.mark.parametrize("flags", [["--rounds", "0"], ["--at-once", "1000"]])
def test_nothing_or_too_much_is_refused(place: Place, flags: list[str]) -> None:
    assert flags[0] in place.error("bench", *flags)


def test_a_runtime_that_does_not_exist_is_an_error(place: Place) -> None:
    assert "nonsense" in place.error("bench", "--runtime", "nonsense")


def test_its_sessions_are_marked_and_end_with_it_also_when_it_is_terminated(place: Place) -> None:
    before = sessions(place)
    process = place.start("bench", "--rounds", "1000", "--runtime", "container")

    def marked() -> bool:
        return any(item["labels"] == {"k8e-bench": "1"} for item in sessions(place))

    try:
        assert eventually(marked)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=40)
        assert process.returncode == 143
    finally:
        process.kill()
    assert sessions(place) == before
