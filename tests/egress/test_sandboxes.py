"""Allow-lists, names and DNS, seen from programs in real sandboxes of each runtime."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
from collections.abc import Callable, Generator

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest

from k8e.client.results import Denial
from k8e.model import DNS_ADDRESS
from tests.egress.far import CALLING_PORT, OTHER, WEB, WEB6
from tests.egress.places import QUICKLY, Room, Scene, Tried
from tests.places import eventually

NOT_LISTED = "not in the allow-list"


@pytest.fixture
def other(scene: Scene, runtime: str) -> Generator[Room]:
    """Another tenant's session."""
    room = Room(scene, runtime, tenant="other")
    yield room
    room.close()


def denials(tried: Tried) -> dict[str, Denial]:
    """By name."""
    return {denial.name: denial for denial in tried.denials}


# What is allowed works, and nothing else.


def test_an_allowed_name_works_to_the_end(room: Room) -> None:
    room.allow("web.test:80", "web.test:443")
    trusted = room.scene.far.authority.certificate
    tried = room.attempt(["fetch", "http://web.test/a"], ["fetch", "https://web.test/b", trusted])
    plain, secure = (json.loads(outcome.said) for outcome in tried.outcomes)
    assert (plain["address"], plain["host"], plain["path"]) == (WEB, "web.test", "/a")
    assert (secure["server_name"], secure["host"]) == ("web.test", "web.test")
    assert tried.denials == []
    assert "CERTIFICATE_VERIFY_FAILED" in room.ask("fetch", "https://web.test/").text
    assert set(room.scene.internet.asked) == {"web.test"}


def test_a_session_has_its_policy_from_its_first_moment(scene: Scene, runtime: str) -> None:
    room = Room(scene, runtime, "web.test:8080")
    try:
        assert room.ask("tcp", "web.test", 8080).said == WEB
        assert room.ask("tcp", OTHER, 8080).refused
    finally:
        room.close()


def test_other_names_fail_at_once_and_the_result_says_why(room: Room) -> None:
    room.allow("web.test")
    names = ("other.test", "secret-data.evil.test", "www.web.test", "web.test.evil.test")
    tried = room.attempt(*(["lookup", name] for name in names), ["fetch", "http://other.test/"])
    assert tried.not_refused() == []
    assert {outcome.text for outcome in tried.outcomes} == {"[Errno -2] Name or service not known"}
    told = denials(tried)
    assert set(told) == set(names)
    assert {(denial.protocol, denial.rule) for denial in told.values()} == {("dns", NOT_LISTED)}
    assert room.scene.internet.asked == []


def test_another_port_is_refused_by_name(room: Room) -> None:
    room.allow("web.test:8080")
    tried = room.attempt(["tcp", "web.test", 8080], ["tcp", "web.test", 22])
    assert [outcome.error for outcome in tried.outcomes] == ["", "ConnectionRefusedError"]
    told = {(item.name, item.address, item.port, item.protocol) for item in tried.denials}
    assert told == {("web.test", address, 22, "tcp") for address in (WEB, WEB6)}
    assert {item.rule for item in tried.denials} == {"another port than web.test allows"}


def test_an_address_is_not_opened_by_knowing_it(room: Room) -> None:
    room.allow("web.test")
    tried = room.attempt(["tcp", WEB, 8080], ["tcp", WEB6, 8080])
    assert tried.not_refused() == []
    assert {denial.rule for denial in tried.denials} == {"no allowed name led to this address"}


def test_a_wildcard_means_what_is_below_it(room: Room) -> None:
    below = ("x.a.test", "y.x.a.test", "X.A.TEST", "x.a.test.")
    beside = ("a.test", "a.test.evil", "xa.test", "x.a.test.evil", "evil%2ea.test", "x%2ea.test")
    for name in ("x.a.test", "y.x.a.test", *beside):
        room.scene.internet.names[name] = [WEB]
    room.allow("*.a.test")
    tried = room.attempt(*(["dns", DNS_ADDRESS, name] for name in (*below, *beside)))
    said = [outcome.said for outcome in tried.outcomes]
    assert said == [f"NOERROR {WEB}"] * len(below) + ["NXDOMAIN"] * len(beside)
    assert set(room.scene.internet.asked) == {"x.a.test", "y.x.a.test"}


def test_names_of_other_scripts_are_their_ascii_form_and_no_look_alike(room: Room) -> None:
    room.scene.internet.names["xn--bcher-kva.test"] = [WEB]
    room.allow("bücher.test.", "Web.TEST")
    tried = room.attempt(
        *(["tcp", name, 8080] for name in ("bücher.test", "xn--bcher-kva.test", "wEb.tesT.")),
        *(["lookup", name] for name in ("w\u0435b.test", "xn--wb-5cd.test", "bucher.test")),
    )
    assert [outcome.said for outcome in tried.outcomes] == [WEB, WEB, WEB, None, None, None]


def test_what_one_tenant_resolved_is_not_open_to_another(room: Room, other: Room) -> None:
    room.allow("web.test")
    other.allow("other.test")
    assert room.ask("tcp", "web.test", 8080).said == WEB
    tried = other.attempt(["tcp", WEB, 8080], ["lookup", "web.test"], ["tcp", "other.test", 8080])
    assert [bool(outcome.error) for outcome in tried.outcomes] == [True, True, False]
    assert room.ask("tcp", OTHER, 8080).refused


# Tunnels.


def test_only_addresses_can_be_asked_for(room: Room) -> None:
    room.allow("web.test", "open")
    kinds = ("TXT", "NULL", "MX", "HTTPS", "ANY", "PTR")
    tried = room.attempt(
        *(["dns", DNS_ADDRESS, "web.test", kind] for kind in kinds),
        *(["dns", DNS_ADDRESS, "web.test", kind, "tcp"] for kind in kinds),
    )
    assert {outcome.said for outcome in tried.outcomes} == {"NOERROR"}
    assert room.scene.internet.asked == []


def test_data_in_names_below_a_wildcard_is_cut_off(room: Room, other: Room) -> None:
    other.allow("*.evil.test", "web.test")
    room.scene.internet.craft = _always(WEB)
    codes = other.ask("tunnel", DNS_ADDRESS, "evil.test", 200).said
    assert codes["NOERROR"] < 80, "a few hundred bytes, as many as a day's host names have"
    assert codes["NOERROR"] + codes["NXDOMAIN"] == 200
    carried = [name for name in room.scene.internet.asked if name.endswith(".evil.test")]
    assert len(carried) == codes["NOERROR"]
    told = other.attempt(["tunnel", DNS_ADDRESS, "evil.test", 3], ["lookup", "web.test"])
    assert told.outcomes[1].said == [WEB]
    assert "too many different names below a wildcard" in {item.rule for item in told.denials}
    eventually(lambda: other.ask("lookup", "www.evil.test").said == [WEB])


def test_a_flood_of_questions_is_capped_and_hurts_nobody_else(room: Room, other: Room) -> None:
    for each in (room, other):
        each.allow("web.test")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        flood = pool.submit(room.attempt, ["flood", DNS_ADDRESS, "web.test", 3000])
        meanwhile = [other.ask("lookup", "web.test") for _ in range(5)]
        tried = flood.result()
    assert [outcome.error for outcome in meanwhile] == [""] * 5
    assert max(outcome.seconds for outcome in meanwhile) < QUICKLY
    assert 0 < tried.outcomes[0].said["answered"] < 1000
    assert "too many questions at once" in {denial.rule for denial in tried.denials}
    assert len(room.scene.internet.asked) < 1000
    assert eventually(lambda: room.ask("lookup", "web.test").said) == sorted([WEB, WEB6])


def test_a_flood_over_connections_is_capped_too(room: Room, other: Room) -> None:
    for each in (room, other):
        each.allow("web.test")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        flood = pool.submit(room.ask, "flood_streams", DNS_ADDRESS, "web.test", 40, 3)
        meanwhile = [other.ask("lookup", "web.test") for _ in range(5)]
        count = flood.result().said
    assert [outcome.error for outcome in meanwhile] == [""] * 5
    assert max(outcome.seconds for outcome in meanwhile) < QUICKLY
    assert 0 < count < 1000


# An attacker's DNS.

Craft = Callable[[dns.message.Message], list[bytes] | None]


def _answer(query: dns.message.Message, *records: str) -> dns.message.Message:
    """An answer with records like ``name TTL TYPE data``."""
    answer = dns.message.make_response(query)
    for record in records:
        owner, ttl, kind, data = record.split(" ", 3)
        answer.answer.append(dns.rrset.from_text(owner, int(ttl), "IN", kind, data))
    return answer


def _always(address: str) -> Craft:
    def craft(query: dns.message.Message) -> list[bytes]:
        asked = query.question[0]
        records = [f"{asked.name} 60 A {address}"] if asked.rdtype == 1 else []
        return [_answer(query, *records).to_wire()]

    return craft


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


def test_nothing_is_left_of_a_session_that_was_destroyed(scene: Scene, runtime: str) -> None:
    room = Room(scene, runtime, "web.test", "93.184.216.0/24:22", "open")
    assert room.ask("tcp", "web.test", 8080).said == WEB
    slot, record = room.slot, room.record
    assert f'"{slot.interface}"' in scene.elements()
    room.close()
    assert not record.exists()
    assert not (scene.net / "slots" / str(slot.number)).exists()
    assert f'"{slot.interface}"' not in scene.elements()
    eventually(lambda: slot.interface not in scene.links())
