"""Files that are to begin first are there, and nothing else is moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import ordering

REPO = Path(__file__).resolve().parents[1]


class Item(NamedTuple):
    nodeid: str


@pytest.mark.parametrize("name", ordering.LONGEST)
def test_a_file_that_is_to_begin_first_exists(name: str) -> None:
    assert (REPO / name).is_file()


def test_long_files_come_before_large_ones_and_tests_keep_their_turn() -> None:
    long = ordering.LONGEST[1]
    names = ["tests/a.py::one", "tests/b.py::two", f"{long}::z", "tests/b.py::one", f"{long}::a"]
    items: list[Any] = [Item(name) for name in names]
    ordering.order(items)
    assert [item.nodeid for item in items] == [names[at] for at in (2, 4, 1, 3, 0)]
