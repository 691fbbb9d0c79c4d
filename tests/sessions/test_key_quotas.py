"""An owner's quota counts what lives and what is about to, and nobody else's."""

from __future__ import annotations

from typing import cast

import pytest

from k8e import errors
from k8e.sessions.key_quotas import KeyQuotas
from k8e.sessions.store import Store


class Living:
    """How many sessions each owner has."""

    def __init__(self, **counts: int) -> None:
        self.counts = counts

    def count_of(self, owner: str) -> int:
        return self.counts.get(owner, 0)


def quotas_of(most: int, **living: int) -> KeyQuotas:
    found = KeyQuotas(cast("Store", Living(**living)))
    found.most_of = lambda owner: most if owner == "mine" else 0
    return found


def test_what_is_being_made_counts_until_it_is_written_down() -> None:
    counted = quotas_of(3, mine=1)
    with counted.room("mine"), counted.room("mine"):
        with pytest.raises(errors.LimitExceeded, match="you have 3 sessions"), counted.room("mine"):
            pass
        with counted.room("other"):
            pass
    with counted.room("mine"):
        pass


def test_a_session_that_fails_to_be_made_gives_its_place_back() -> None:
    counted = quotas_of(1)
    for _ in range(3):
        with pytest.raises(ValueError, match="broken"), counted.room("mine"):
            raise ValueError("broken")
    with counted.room("mine"):
        pass


def test_without_a_quota_there_is_always_room() -> None:
    with quotas_of(0, mine=1000).room("mine"):
        pass
