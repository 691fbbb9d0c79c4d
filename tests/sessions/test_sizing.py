"""How many sandboxes are kept ready, as arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e import errors
from k8e.sessions.sizing import AT_ONCE, REMEMBERED, Demand, Sizes


def test_without_claims_the_least_number_is_kept():
    assert Sizes(2, 8).clamp(Demand().greatest_rush(100.0)) == 2


def test_a_rush_is_expected_to_come_again_until_it_is_forgotten():
    demand = Demand()
    for _ in range(5):
        demand.claimed(100.0)
    assert demand.greatest_rush(100.0) == 5
    assert demand.forgets_at() == 100.0 + REMEMBERED
    assert demand.greatest_rush(100.0 + REMEMBERED - 0.01) == 5
    assert demand.greatest_rush(100.0 + REMEMBERED) == 0
    assert demand.forgets_at() == 0


def test_claims_far_apart_are_no_rush():
    demand = Demand()
    for number in range(10):
        demand.claimed(number * AT_ONCE)
    assert demand.greatest_rush(10 * AT_ONCE) == 1


def test_a_greater_rush_before_a_smaller_one_counts_until_it_is_forgotten():
    demand = Demand()
    for moment in (0.0, 0.1, 0.2, 50.0, 50.1):
        demand.claimed(moment)
    assert demand.greatest_rush(60.0) == 3
    assert demand.greatest_rush(0.3 + REMEMBERED) == 2


@given(st.lists(st.floats(0, 1000), max_size=60))
def test_the_greatest_rush_is_what_counting_by_hand_gives(moments: list[float]):
    moments.sort()
    demand = Demand()
    for moment in moments:
        demand.claimed(moment)
    now = moments[-1] if moments else 0.0
    rushes = [
        sum(moment - AT_ONCE < other <= moment for other in moments[: index + 1])
        for index, moment in enumerate(moments)
        if moment > now - REMEMBERED
    ]
    assert demand.greatest_rush(now) == max(rushes, default=0)


@pytest.mark.parametrize("pair", [(-1, 3), (4, 3), (0, 1001)])
def test_sizes_that_make_no_sense_are_refused(pair: tuple[int, int]):
    with pytest.raises(errors.InvalidRequest, match="a pool keeps"):
        Sizes(*pair)
