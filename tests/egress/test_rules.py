"""The parts of egress that need no network: parsing, counting, remembering."""

from __future__ import annotations

import hashlib
import ipaddress
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e import errors
from k8e.egress import dns, dns_answers, nflog, rules
from k8e.egress.denials import DenialRecord, Ledger
from k8e.egress.dns import Upstream
from k8e.egress.policy import Policy, parse_policy
from k8e.egress.records import STEP, NetworkRecord, NetworkRecords
from k8e.egress.rules import BoundPolicy

FOUR, SIX = ipaddress.ip_address("198.18.0.2"), ipaddress.ip_address("fd6b:3865:0:1::2")


# Names as a way out for data.


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_ordinary_names_below_a_wildcard_fit_into_the_budget() -> None:
    account = dns_answers.NameBudget(Clock())
    names = [f"{word}{number}.cdn.test" for word in ("img", "api", "files") for number in range(60)]
    assert all(account.allows(name, "cdn.test") for name in names)


def test_random_names_are_cut_off_until_the_account_has_filled_again() -> None:
    clock = Clock()
    account = dns_answers.NameBudget(clock)
    hexed = [hashlib.sha256(bytes([number])).hexdigest()[:60] + ".cdn.test" for number in range(99)]
    allowed = [name for name in hexed if account.allows(name, "cdn.test")]
    assert 20 < len(allowed) < 30
    assert not account.allows(hexed[-1], "cdn.test")
    clock.now += 60
    assert account.allows(hexed[-1], "cdn.test")


# Refused packets.


@given(st.binary(max_size=300))
def test_no_bytes_from_the_kernel_break_the_parser(data: bytes) -> None:
    nflog.parse(data)
    nflog.parse_packet(1, data)


def test_a_refused_packet_tells_where_it_wanted_to_go() -> None:
    four = bytearray(28)
    four[0], four[9] = 0x45, 6
    four[16:20] = bytes([192, 0, 2, 7])
    struct.pack_into("!HH", four, 20, 40000, 443)
    packet = nflog.parse_packet(9, bytes(four))
    assert packet is not None
    assert (packet.index, str(packet.address), packet.protocol, packet.port) == (
        9,
        "192.0.2.7",
        "tcp",
        443,
    )


def test_a_port_behind_extension_headers_is_found() -> None:
    six = bytearray(40 + 8 + 8)
    six[0], six[6] = 0x60, 60  # destination options, then UDP
    six[24:40] = ipaddress.ip_address("2001:db8::1").packed
    six[40] = 17
    struct.pack_into("!HH", six, 48, 1, 53)
    packet = nflog.parse_packet(1, bytes(six))
    assert packet is not None
    assert (packet.protocol, packet.port) == ("udp", 53)


# Denials.


def test_equal_denials_are_told_once_with_a_count() -> None:
    ledger = Ledger()
    first, second = (DenialRecord(name, "", 443, "tcp", "no") for name in ("a.test", "b.test"))
    ledger.add(first, "name")
    mark = ledger.total
    for denial in (second, second, first):
        ledger.add(denial, "name")
    told = ledger.since(mark)
    assert [(item["name"], item["count"]) for item in told] == [("b.test", 2), ("a.test", 1)]
    assert ledger.since(ledger.total) == []
    assert [(item["name"], item["count"]) for item in ledger.listing()] == [
        ("b.test", 2),
        ("a.test", 2),
    ]


# Rules.


def bound(*words: str, generation: int = 7) -> BoundPolicy:
    return BoundPolicy(parse_policy(words), generation)


def test_a_policy_without_generation_has_nothing_in_the_kernel() -> None:
    assert rules.change("sb0", FOUR, SIX, BoundPolicy(), BoundPolicy(Policy(), 0)) == []


def test_what_a_change_removes_is_what_the_change_before_added() -> None:
    policy = bound("strict", "a.test", "93.184.0.0/16", "[2606:4700::/32]:443")
    made = rules.change("sb0", FOUR, SIX, BoundPolicy(), policy)
    gone = rules.change("sb0", FOUR, SIX, policy, BoundPolicy())
    assert {item.verb for item in made} == {"add"}
    assert {item.verb for item in gone} == {"delete"}
    assert {item.element for item in made} == {item.element for item in gone}


# What a gateway leaves for the next.


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    records = NetworkRecords(tmp_path)
    records.load()
    policy = parse_policy(["strict", "a.test:443", "*.b.test", "[2606:4700::/32]:80"])
    record = NetworkRecord(3, BoundPolicy(policy, 12), bound("open", generation=11))
    records.save("sb-x", record)
    assert NetworkRecords(tmp_path).load() == {"sb-x": record}
    records.remove("sb-x")
    assert NetworkRecords(tmp_path).load() == {}


def test_no_generation_comes_twice_also_after_a_crash(tmp_path: Path) -> None:
    seen: set[int] = set()
    for _ in range(3):
        records = NetworkRecords(tmp_path)
        records.load()
        new = {records.next_generation() for _ in range(STEP + 5)}
        assert not new & seen
        seen |= new


def test_a_record_that_cannot_be_read_belongs_to_nobody(tmp_path: Path) -> None:
    records = NetworkRecords(tmp_path)
    records.load()
    (tmp_path / "sandboxes" / "sb-x.json").write_text("{", "utf-8")
    assert records.load() == {}


# Resolvers.


def test_resolvers_are_those_of_the_host(tmp_path: Path) -> None:
    file = tmp_path / "resolv.conf"
    file.write_text("# x\nsearch a\nnameserver 192.0.2.53\nnameserver 2001:db8::53\nnameserver\n")
    assert dns.host_resolvers(file) == [Upstream("192.0.2.53"), Upstream("2001:db8::53")]
    assert dns.host_resolvers(tmp_path / "none") == []


def test_resolvers_can_be_configured_with_ports() -> None:
    found = dns.parse_upstreams("192.0.2.53:5353, [2001:db8::53]:54 2001:db8::1")
    assert found == [
        Upstream("192.0.2.53", 5353),
        Upstream("2001:db8::53", 54),
        Upstream("2001:db8::1"),
    ]


@pytest.mark.parametrize("text", ["dns.example", "192.0.2.53:x", "[::1"])
def test_a_resolver_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="K8E_RESOLVERS"):
        dns.parse_upstreams(text if text != "[::1" else "[::1]:x")
