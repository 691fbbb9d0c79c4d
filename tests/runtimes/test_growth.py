"""What workspaces may take of a disk: no more together than there is, and for each its part."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from k8e.runtimes.growth import FLOOR, GROWING, Usage, Workspace, level, share_out

MIB = 1 << 20
GIB = 1 << 30


def workspace(name: str, *, used: int = 0, free: int = GIB, recent: float = 0) -> Workspace:
    nowhere = "/nonexistent"
    usage = Usage(backed=used, used=used, free=free, debt=0)
    return Workspace(name, nowhere, nowhere, GIB, nowhere, 4096, 4096, usage, recent=recent)


def test_where_there_is_enough_for_all_nobody_is_bounded() -> None:
    found = [workspace("a"), workspace("b", used=GIB // 2, free=GIB // 2)]
    assert share_out(found, 2 * GIB) == {"a": GIB, "b": GIB // 2}


def test_one_that_takes_everything_leaves_each_other_its_floor() -> None:
    hog = workspace("hog", used=10 * GIB, free=10 * GIB, recent=GIB)
    others = [workspace(f"other-{number}") for number in range(3)]
    assert share_out([hog, *others], 3 * FLOOR) == {
        "hog": 0,
        **{item.sandbox_id: FLOOR for item in others},
    }


def test_most_of_what_is_short_goes_to_the_one_that_grows() -> None:
    room = 1000 * MIB
    found = share_out([workspace("a", recent=100 * GROWING), workspace("b")], room)
    assert found["b"] >= FLOOR
    assert found["a"] > 3 * found["b"]


def test_where_there_is_less_than_all_floors_each_gets_the_same() -> None:
    found = [workspace(f"w{number}") for number in range(4)]
    assert set(share_out(found, FLOOR).values()) == {FLOOR // 4}
    assert set(share_out(found, -FLOOR).values()) == {0}


sizes = st.integers(0, 4 * GIB)


@given(
    st.lists(st.tuples(sizes, sizes, st.floats(0, 4 * GIB)), max_size=12),
    st.integers(-GIB, 16 * GIB),
)
def test_nobody_gets_more_than_it_can_hold_nor_all_of_them_more_than_there_is(
    many: list[tuple[int, int, float]], room: int
) -> None:
    found = [
        workspace(f"w{number}", used=used, free=free, recent=recent)
        for number, (used, free, recent) in enumerate(many)
    ]
    grants = share_out(found, room)
    assert sum(grants.values()) <= max(0, room)
    for item in found:
        assert 0 <= grants[item.sandbox_id] <= item.usage.free
    wanted = sum(item.usage.free for item in found)
    assert sum(grants.values()) >= min(max(0, room), wanted) - 64 * len(found)


def test_shares_are_kept() -> None:
    assert level({"a": 100, "b": 100}, 90, {"a": 2, "b": 1}) == {"a": 60, "b": 30}
    assert level({"a": 10, "b": 100}, 90) == {"a": 10, "b": 80}
    assert level({}, 90) == {}
