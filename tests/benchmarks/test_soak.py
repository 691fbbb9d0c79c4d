"""A short soak, and that a long one would find what grows."""

from __future__ import annotations

import json
import os

import pytest

from benchmarks import leaks, soak

SESSIONS = 30


@pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")
@pytest.mark.timeout(180)
def test_mixed_work_leaves_nothing_behind() -> None:
    with soak.staged(("gvisor", "container")) as soaking:
        course = soaking.run(SESSIONS)
    assert course.problems == []
    assert course.done == SESSIONS
    assert len(course.works) >= 5


def test_elements_of_nft_are_counted_by_how_they_go() -> None:
    listed = {
        "nftables": [
            {"metainfo": {"version": "1"}},
            {"set": {"name": "live", "elem": ["a", "b"]}},
            {"map": {"name": "generation", "elem": [["a", 1]]}},
            {"set": {"name": "asking", "flags": ["dynamic", "timeout"], "elem": ["a"]}},
            {"set": {"name": "empty"}},
        ]
    }
    assert leaks.elements(json.dumps(listed)) == {"nft elements": 3, leaks.TIMED: 1}


def test_the_slope_is_in_mb_for_a_thousand_sessions() -> None:
    assert soak.slope([(0, 50.0), (500, 51.0), (1000, 52.0)]) == pytest.approx(2.0)
    assert soak.slope([(0, 50.0), (100, 50.0)]) == 0
    assert soak.slope([(5, 50.0)]) == 0


def test_memory_that_grows_all_the_time_fails_and_a_warm_up_does_not() -> None:
    growing = [(at, 50 + at / 100) for at in range(0, 1001, 20)]
    assert soak.judge_memory(growing, 1000) == [
        "the gateway grows by 10.0 MB for a thousand sessions"
    ]
    warmed = [(at, 50.0 + min(at, 100) / 10) for at in range(0, 1001, 20)]
    assert soak.judge_memory(warmed, 1000) == []
    assert soak.judge_memory([(0, 50.0), (10, 50.0), (20, 80.0)], 20)
