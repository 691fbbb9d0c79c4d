"""Places of users; what cannot be tried here says why."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest

from tests.rootless.users import UserPlace, missing

NewUserPlace = Callable[..., UserPlace]


@pytest.fixture
def new_user_place(tmp_path_factory: pytest.TempPathFactory) -> Generator[NewUserPlace]:
    """Makes places whose gateways a test may start, stop and kill."""
    if reason := missing():
        pytest.skip(reason)
    places: list[UserPlace] = []

    probe = tmp_path_factory.getbasetemp() / "probe-of-users.json"

    def make(**options: Any) -> UserPlace:
        places.append(UserPlace(**options))
        places[-1].remember(probe)
        return places[-1]

    yield make
    for place in places:
        place.remember(probe)
        place.close()


@pytest.fixture
def user_place(new_user_place: NewUserPlace) -> UserPlace:
    return new_user_place()
