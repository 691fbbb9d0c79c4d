"""Limits as a session tells of them: with the end of a run, in its events, and as it ends."""

from __future__ import annotations

import math
from typing import Any

import pytest

from k8e import errors, metrics
from k8e.guest import wire
from k8e.model import MIB, Limits
from k8e.sessions.limits import MET, LimitWatch, describe

EXIT: dict[str, Any] = {"id": "e", "code": 1, "status": "completed", "duration_ms": 3}


@pytest.fixture
def hits() -> dict[str, int]:
    """How often the runtime has held the sandbox to each limit."""
    return {"memory": 0, "pids": 0}


@pytest.fixture
def watch(hits: dict[str, int]) -> LimitWatch:
    return LimitWatch(lambda: dict(hits), Limits(memory=64 * MIB, pids=40, disk=8 * MIB))


def amended(watch: LimitWatch, **told: Any) -> dict[str, Any]:
    return wire.unpack_dict(watch.amend(wire.pack({**EXIT, **told})))


def test_each_limit_has_words_that_name_it_its_value_and_how_to_raise_it() -> None:
    limits = Limits(memory=64 * MIB, pids=40, disk=8 * MIB, open_files=2048, output=3 * MIB)
    told = {name: describe(limits, name) for name in MET}
    assert {name: item["value"] for name, item in told.items()} == {
        "memory": 64 * MIB,
        "pids": 40,
        "disk": 8 * MIB,
        "inodes": 1024,  # of which the limit says nothing: one for every 8 KiB
        "open_files": 2048,
        "output": 3 * MIB,
    }
    for name, item in told.items():
        assert item["message"].startswith(f"limit {name}: ")
        assert f"limits={{'{name}': …}}" in item["message"]
    assert "(64 MiB in all)" in told["memory"]["message"]
    assert "--open-files" in told["open_files"]["message"]
    assert "--max-output" in told["output"]["message"]
    assert {*MET, "timeout"} == set(metrics.LIMITS)


def test_a_run_that_ends_well_is_passed_on_as_it_is(
    watch: LimitWatch, hits: dict[str, int]
) -> None:
    body = wire.pack({**EXIT, "code": 0})
    hits["memory"] = 7
    assert watch.amend(body) is body


def test_what_the_kernel_did_is_told_once(watch: LimitWatch, hits: dict[str, int]) -> None:
    hits["memory"] = 1
    assert [item["limit"] for item in amended(watch)["limits"]] == ["memory"]
    assert "limits" not in amended(watch)
    hits["memory"], hits["pids"] = 2, 9
    assert [item["limit"] for item in amended(watch)["limits"]] == ["memory", "pids"]


def test_what_the_kernel_did_before_a_restart_is_not_told_again(
    watch: LimitWatch, hits: dict[str, int]
) -> None:
    hits["pids"] = 5
    watch.catch_up()
    assert "limits" not in amended(watch)


def test_what_a_guest_says_of_its_limits_is_told_in_our_words(watch: LimitWatch) -> None:
    (told,) = amended(watch, limits=["disk", "disk"])["limits"]
    assert told == describe(Limits(disk=8 * MIB), "disk")


def timed_out(watch: LimitWatch, **told: Any) -> dict[str, Any]:
    return amended(watch, status="timed_out", **told)


@pytest.mark.parametrize("code", [0, 143])
def test_a_time_out_is_named_also_where_the_program_ended_well(
    watch: LimitWatch, hits: dict[str, int], code: int
) -> None:
    hits["memory"] = 1
    told = timed_out(watch, code=code, timeout=0.5)
    assert (told["status"], told["code"], "timeout" in told) == ("timed_out", code, False)
    first, second = told["limits"]
    assert (first["limit"], first["value"]) == ("timeout", 0.5)
    assert "(0.5 s)" in first["message"]
    assert "--timeout" in first["message"]
    assert second["limit"] == "memory"


def test_the_seconds_of_a_time_out_are_a_whole_number_where_they_can_be(watch: LimitWatch) -> None:
    assert str(timed_out(watch, timeout=30.0)["limits"][0]["value"]) == "30"


@pytest.mark.parametrize("said", [None, 0, -1, True, "9", [9], math.nan, math.inf, 1e9, 1 << 62])
def test_a_time_out_that_cannot_be_has_no_number(watch: LimitWatch, said: Any) -> None:
    (told,) = timed_out(watch, timeout=said)["limits"]
    assert (told["limit"], told["value"]) == ("timeout", 0)
    assert "than it may, and" in told["message"]


def test_who_was_not_timed_out_cannot_say_so(watch: LimitWatch) -> None:
    assert amended(watch, limits=["timeout"], timeout=9) == EXIT


@pytest.mark.parametrize(
    "said",
    [["nonsense"], [b"disk", 7, None, ["disk"], {}], "disk", {"disk": 1}, 5, [{"limit": "disk"}]],
)
@pytest.mark.parametrize("code", [0, 1])
def test_a_guest_that_says_nonsense_says_nothing(watch: LimitWatch, said: Any, code: int) -> None:
    told = amended(watch, limits=said, code=code)
    assert told == {**EXIT, "code": code}


def test_a_body_that_is_none_is_left_to_whoever_reads_it(watch: LimitWatch) -> None:
    assert watch.amend(b"limits \xff") == b"limits \xff"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("inodes", 15),
        ("inodes", 1 << 31),
        ("open_files", 1023),
        ("open_files", (1 << 20) + 1),
        ("output", 1023),
        ("output", (1 << 50) + 1),
    ],
)
def test_a_limit_that_cannot_be_is_refused_by_its_name(name: str, value: int) -> None:
    with pytest.raises(errors.InvalidRequest, match=f"limit {name} must be"):
        Limits(**{name: value})
