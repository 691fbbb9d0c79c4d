"""How many strangers may be connected, and who of them has to leave."""

from __future__ import annotations

import pytest

from k8e import access, admission
from k8e.admission import Admission, UnknownConnection

ROOM, OF_ADDRESS = 20, 8


class Crowd:
    """Connections that say nothing."""

    def __init__(self) -> None:
        self.places = Admission(ROOM, OF_ADDRESS)
        self.expelled: list[str] = []

    def come(self, address: str, group: str = "") -> UnknownConnection:
        return self.places.enter(address, lambda: self.expelled.append(address), group=group)


@pytest.fixture
def crowd() -> Crowd:
    return Crowd()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever came before has been silent for long enough."""
    monkeypatch.setattr(admission, "GRACE_SECONDS", 0.0)


def test_a_newcomer_takes_the_place_of_the_oldest_of_the_largest_range(
    crowd: Crowd, impatient: None
) -> None:
    crowd.come("198.51.100.1")
    for number in range(ROOM - 1):  # many addresses, one range
        crowd.come(f"192.0.2.{number}")
    crowd.come("203.0.113.1")
    assert crowd.expelled == ["192.0.2.0"]
    assert len(crowd.places) == ROOM


def test_no_address_has_more_than_its_share(crowd: Crowd, impatient: None) -> None:
    for _ in range(OF_ADDRESS + 3):
        crowd.come("192.0.2.1")
    assert crowd.expelled == ["192.0.2.1"] * 3
    assert len(crowd.places) == OF_ADDRESS


def test_where_all_are_alike_the_oldest_leaves(crowd: Crowd, impatient: None) -> None:
    for number in range(ROOM + 2):
        crowd.come(f"198.51.{number}.1")
    assert crowd.expelled == ["198.51.0.1", "198.51.1.1"]


def test_where_all_have_only_just_come_chance_decides_and_the_newcomer_stays(crowd: Crowd) -> None:
    latest = crowd.come("203.0.113.1")
    for number in range(100 * ROOM):
        latest = crowd.come(f"198.{number % 100}.{number % 7}.1")
        assert latest.pool is not None
    assert len(crowd.places) == ROOM


def test_who_was_known_before_has_a_place_that_no_stranger_takes(
    crowd: Crowd, impatient: None
) -> None:
    crowd.places.admit(crowd.come("2001:db8:1:2::3"))
    assert len(crowd.places) == 0
    known, here = crowd.come("2001:db8:1:2::4"), crowd.come("127.0.0.1")
    for number in range(3 * ROOM):
        crowd.come(f"198.51.{number}.1")
    assert known.pool is not None, "the same host"
    assert here.pool is not None, "this machine"


def test_who_has_shown_a_certificate_is_out_of_the_way_of_strangers(
    crowd: Crowd, impatient: None
) -> None:
    some = crowd.come("192.0.2.1")
    crowd.places.vouch(some)
    for number in range(3 * ROOM):
        crowd.come(f"192.0.2.{number}")
    assert some.pool is not None
    some.leave()
    some.leave()
    assert some.pool is None


def test_users_of_this_machine_share_by_user_and_not_by_address(
    crowd: Crowd, impatient: None
) -> None:
    for number in range(ROOM):
        crowd.come(f"127.0.0.{number}", "uid 1001")
    crowd.come("127.0.0.1", "uid 1000")
    assert crowd.expelled == ["127.0.0.0"]


def test_what_is_remembered_of_addresses_is_bounded(
    crowd: Crowd, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_KNOWN", 2)
    for number in range(3):
        crowd.places.admit(crowd.come(f"198.51.{number}.1"))
    forgotten, known = crowd.come("198.51.0.1"), crowd.come("198.51.2.1")
    for number in range(3 * ROOM):
        crowd.come(f"203.0.{number}.1")
    assert (forgotten.pool is None, known.pool is None) == (True, False)


@pytest.mark.parametrize(
    ("address", "host", "network"),
    [
        ("192.0.2.7", "192.0.2.7", "192.0.2.0/24"),
        ("::ffff:192.0.2.7", "192.0.2.7", "192.0.2.0/24"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64", "2001:db8:1::/48"),
        ("fe80::1%eth0", "fe80::/64", "fe80::/48"),
        ("", "", ""),
    ],
)
def test_addresses_stand_for_hosts_and_networks(address: str, host: str, network: str) -> None:
    assert (access.group(address), access.span(address)) == (host, network)
