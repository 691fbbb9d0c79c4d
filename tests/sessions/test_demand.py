"""How many sandboxes are kept ready, as arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e import errors
from k8e.sessions.demand import AT_ONCE, REMEMBERED, Demand, Sizes, share


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


@pytest.mark.parametrize(
    ("total", "wishes", "shares"),
    [
        (32, [(1, 8), (0, 3)], [8, 3]),
        (8, [(1, 8), (0, 8)], [5, 3]),  # the first has its least number, the rest is halved
        (8, [(0, 8), (0, 8), (0, 1)], [4, 3, 1]),
        (2, [(0, 5), (0, 5), (0, 5)], [1, 1, 0]),
        (3, [(4, 4), (4, 4)], [2, 1]),
        (5, [(4, 4), (0, 9)], [4, 1]),
        (0, [(1, 1)], [0]),
        (4, [], []),
    ],
)
def test_what_all_may_have_is_shared(total: int, wishes: list[tuple[int, int]], shares: list[int]):
    assert share(total, wishes) == shares


@given(st.integers(0, 60), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), max_size=12))
def test_nobody_gets_more_than_another_that_wants_as_much(total: int, pairs: list[tuple[int, int]]):
    wishes = [(least, max(least, most)) for least, most in pairs]
    shares = share(total, wishes)
    assert sum(shares) == min(total, sum(most for _, most in wishes)), "all of it, and no more"
    for got, (_, most) in zip(shares, wishes, strict=True):
        assert 0 <= got <= most
    if sum(least for least, _ in wishes) > total:
        return
    above = [got - least for got, (least, _) in zip(shares, wishes, strict=True)]
    assert min(above, default=0) >= 0
    for got, (least, most) in zip(above, wishes, strict=True):
        if got < most - least:
            assert max(above) <= got + 1, "who lacks something has as much as anybody, but for one"
