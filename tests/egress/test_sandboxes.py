"""What an attacker's DNS answers, and what lasts. What programs try is in ``k8e.conformance``."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest

from k8e.model import DNS_ADDRESS
from tests.egress.far import CALLING_PORT, OTHER, WEB
from tests.egress.places import Room

# An attacker's DNS.

Craft = Callable[[dns.message.Message], list[bytes] | None]


def _answer(query: dns.message.Message, *records: str) -> dns.message.Message:
    """An answer with records like ``name TTL TYPE data``."""
    answer = dns.message.make_response(query)
    for record in records:
        owner, ttl, kind, data = record.split(" ", 3)
        answer.answer.append(dns.rrset.from_text(owner, int(ttl), "IN", kind, data))
    return answer


def _wrong_number(query: dns.message.Message) -> list[bytes] | None:
    forged = _answer(query, f"web.test. 60 A {OTHER}")
    forged.id ^= 1
    return [forged.to_wire(), _answer(query, f"web.test. 60 A {WEB}").to_wire()]


def _other_question(query: dns.message.Message) -> list[bytes] | None:
    other = dns.message.make_query("other.test", "A")
    other.id = query.id
    forged = _answer(other, f"web.test. 60 A {OTHER}", f"other.test. 60 A {OTHER}")
    return [forged.to_wire(), _answer(query, f"web.test. 60 A {WEB}").to_wire()]


def _garbage(query: dns.message.Message) -> list[bytes] | None:
    right = _answer(query, f"web.test. 60 A {WEB}").to_wire()
    return [os.urandom(40), right[:20], query.id.to_bytes(2, "big"), right[:2] * 600, right]


def _uninvited(query: dns.message.Message) -> list[bytes] | None:
    """Addresses of names that were not asked for, in every section."""
    answer = _answer(query, f"web.test. 0 A {WEB}", f"other.test. 60 A {OTHER}")
    answer.additional.append(dns.rrset.from_text("web.test.", 60, "IN", "A", OTHER))
    answer.authority.append(dns.rrset.from_text("test.", 60, "IN", "NS", "evil.test."))
    return [answer.to_wire()]


@pytest.mark.parametrize(
    "craft",
    [_wrong_number, _other_question, _garbage, _uninvited],
    ids=lambda it: it.__name__,
)
def test_what_an_attacker_answers_opens_nothing_else(room: Room, craft: Craft) -> None:
    room.allow("web.test")
    room.scene.internet.craft = craft
    said = str(room.ask("dns", DNS_ADDRESS, "web.test").said).split()
    assert said[0] == "NOERROR"
    assert WEB in said
    assert OTHER not in said
    tried = room.attempt(["tcp", WEB, 8080], ["tcp", OTHER, 8080])
    assert [outcome.said for outcome in tried.outcomes] == [WEB, None]


def test_a_name_opens_a_few_addresses_at_a_time(room: Room) -> None:
    room.scene.internet.names["crowd.test"] = [f"93.184.217.{number}" for number in range(60)]
    room.allow("crowd.test")
    assert len(room.ask("dns", DNS_ADDRESS, "crowd.test").said.split()) == 9


def _loop(query: dns.message.Message) -> list[bytes] | None:
    records = "web.test. 60 CNAME b.test.", "b.test. 60 CNAME web.test.", f"c.test. 60 A {WEB}"
    return [_answer(query, *records).to_wire()]


def _itself(query: dns.message.Message) -> list[bytes] | None:
    return [_answer(query, "web.test. 60 CNAME web.test.").to_wire()]


def _long_chain(query: dns.message.Message) -> list[bytes] | None:
    names = ["web.test.", *(f"n{number}.test." for number in range(50))]
    links = [f"{one} 60 CNAME {two}" for one, two in itertools.pairwise(names)]
    return [_answer(query, *links, f"{names[-1]} 60 A {WEB}").to_wire()]


def _cut_short(query: dns.message.Message) -> list[bytes] | None:
    """Asks to come again by TCP, where nonsense is served."""
    answer = _answer(query, f"web.test. 60 A {OTHER}")
    answer.flags |= dns.flags.TC
    return [answer.to_wire()]


def _refusal(query: dns.message.Message) -> list[bytes] | None:
    answer = _answer(query, f"web.test. 60 A {OTHER}")
    answer.set_rcode(dns.rcode.REFUSED)
    return [answer.to_wire()]


@pytest.mark.parametrize(
    "craft", [_loop, _itself, _long_chain, _cut_short, _refusal], ids=lambda it: it.__name__
)
def test_an_answer_that_leads_nowhere_is_the_end_of_it(room: Room, craft: Craft) -> None:
    room.allow("web.test")
    room.scene.internet.craft = craft
    tried = room.attempt(["lookup", "web.test"], ["tcp", WEB, 8080], ["tcp", OTHER, 8080])
    assert tried.not_refused() == []


# What lasts.


def test_an_address_stays_open_longer_than_an_answer_without_time(room: Room) -> None:
    room.allow("web.test")
    room.scene.internet.ttl = 0
    try:
        with room.puppet("web.test", CALLING_PORT) as puppet:
            assert puppet.attempt("tcp", WEB, 8080).said == WEB
    finally:
        room.scene.internet.ttl = 60


def test_addresses_of_the_policy_need_no_name(room: Room) -> None:
    room.allow("strict", "web.test", f"{OTHER}:8080")
    assert room.ask("tcp", OTHER, 8080).said == OTHER
    told = room.ask("talk", OTHER, 22, "SSH-2.0-client\r\n")
    # The reset may come when we still speak, or when we listen.
    assert "ConnectionResetError" in (told.error, *(told.said or ()))
