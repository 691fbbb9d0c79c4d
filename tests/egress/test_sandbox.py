"""A sandbox as egress knows it: what is open to it, and the words for what is not."""

from __future__ import annotations

import ipaddress

import dns.message
import dns.rdatatype
import pytest

from k8e.egress import denials
from k8e.egress.dns_answers import AllowedQuestion, Resolved
from k8e.egress.nflog import Packet
from k8e.egress.pins import GRACE, MAX_PINS, PinPlan, Pins
from k8e.egress.policy import Policy, parse_policy, parse_rule
from k8e.egress.proxy import ALLOWED, PEEK
from k8e.egress.router import Slot
from k8e.egress.rules import BoundPolicy
from k8e.egress.sandbox import SandboxEgress
from k8e.egress.sniff import TLS, Said
from k8e.model import DNS_ADDRESS

CDN = ipaddress.IPv4Address("93.184.216.34")
OTHER = ipaddress.IPv4Address("93.184.216.35")
INSIDE = ipaddress.IPv4Address("10.0.0.5")


def client_with(policy: Policy) -> SandboxEgress:
    client = SandboxEgress("sb-x", Slot(1))
    rebind(client, BoundPolicy(policy, 7))
    return client


def rebind(client: SandboxEgress, bound: BoundPolicy) -> None:
    client.pins.keep(client.carry(bound))
    client.bound = bound


def asked(client: SandboxEgress, name: str, *addresses: ipaddress.IPv4Address) -> PinPlan:
    """Let DNS tell the sandbox of a name; what the kernel is to open."""
    question = AllowedQuestion(name, dns.rdatatype.A, client.bound.policy.rules_for(name))
    plan = client.open(client.bound, question, Resolved(list(addresses), 60))
    assert plan is not None
    client.pins.keep(plan)
    return plan


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def last_denial(client: SandboxEgress) -> tuple[str, str, int, str]:
    told = client.ledger.listing()[-1]
    return told["name"], told["address"], told["port"], told["rule"]


# What DNS opens.


def test_a_name_opens_the_ports_of_its_rules() -> None:
    client = client_with(parse_policy(["a.test:443", "a.test:80", "b.test"]))
    assert list(asked(client, "a.test", CDN).groups) == [frozenset((80, 443))]
    assert client.pins.names(CDN) == {"a.test": frozenset((80, 443))}
    assert not asked(client, "b.test", OTHER).groups  # every port
    assert client.pins.names(OTHER) == {"b.test": frozenset((0,))}


def test_a_private_address_is_open_as_far_as_the_operator_said() -> None:
    trusted = parse_rule("index.test:443", trusted=True)
    client = client_with(Policy((trusted, parse_rule("index.test"))))
    asked(client, "index.test", INSIDE, CDN)
    assert client.pins.names(INSIDE) == {"index.test": frozenset((443,))}
    assert client.pins.names(CDN) == {"index.test": frozenset((0,))}


def test_an_answer_under_an_old_policy_opens_nothing_and_is_not_remembered() -> None:
    client = client_with(parse_policy(["a.test"]))
    old = client.bound
    rebind(client, BoundPolicy(parse_policy(["b.test"]), 8))
    question = AllowedQuestion("a.test", dns.rdatatype.A, [])
    assert client.open(old, question, Resolved([CDN], 60)) is None
    assert client.still_open(parse_policy(["a.test"])) == {}


def test_what_is_remembered_is_bounded_and_the_oldest_goes_first() -> None:
    client = client_with(parse_policy(["a.test"]))
    for number in range(MAX_PINS + 10):
        asked(client, "a.test", CDN + number)
    kept = client.still_open(client.bound.policy)
    assert len(kept) == MAX_PINS
    assert CDN not in kept
    client.deny_packet(packet(str(CDN)))
    assert "look its name up again" in last_denial(client)[3]


def test_a_flood_of_denials_writes_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    client = client_with(parse_policy(["a.test"]))
    caplog.set_level("INFO", "k8e.egress")
    for _ in range(3000):
        client.deny_packet(packet("8.8.8.8"))
    assert 0 < len(caplog.records) < 200
    assert client.ledger.total == 3000


# Why a packet was refused.


def packet(
    address: str,
    port: int = 443,
    protocol: str = "tcp",
    *,
    payload: bytes = b"",
    many: bool = False,
) -> Packet:
    return Packet(1, ipaddress.ip_address(address), protocol, port, payload, many)


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (packet("93.184.216.34", 22), "another port than a.test allows"),
        (packet("8.8.8.8", 53, "udp"), "only the resolver in /etc/resolv.conf may be asked"),
        (packet("8.8.8.8", 853), "only the resolver in /etc/resolv.conf may be asked"),
        (packet("169.254.169.254", 80), "private, local and metadata addresses"),
        (packet("8.8.8.8"), "no allowed name led to this address"),
        (packet("8.8.8.8", many=True), "too many"),
    ],
)
def test_a_refusal_has_words(refused: Packet, words: str) -> None:
    client = client_with(parse_policy(["a.test:443"]))
    asked(client, "a.test", CDN)
    client.deny_packet(refused)
    assert words in last_denial(client)[3]


def test_a_refused_question_tells_the_name() -> None:
    client = SandboxEgress("sb-x", Slot(1))
    query = dns.message.make_query("secret.evil.test", "A").to_wire()
    client.deny_packet(packet(DNS_ADDRESS, 53, "udp", payload=query))
    name, address, port, rule = last_denial(client)
    assert (name, address, port) == ("secret.evil.test", "", 0)
    assert "no network" in rule


@pytest.mark.parametrize("payload", [b"", b"\xff" * 90, b"\0" * 12 + b"\xc0\x0c"])
def test_a_refused_question_that_makes_no_sense_is_only_a_packet(payload: bytes) -> None:
    client = SandboxEgress("sb-x", Slot(1))
    client.deny_packet(packet("8.8.8.8", 53, "udp", payload=payload))
    assert last_denial(client)[1:3] == ("8.8.8.8", 53)


# Strict mode.


def test_a_strict_connection_must_say_a_name_that_led_there() -> None:
    client = client_with(parse_policy(["strict", "a.test", "b.test"]))
    assert not asked(client, "a.test", CDN).added  # nothing for the kernel to open
    assert client.decide(CDN, 443, None) is PEEK
    assert client.decide(CDN, 443, Said(TLS, "a.test")) is ALLOWED
    # Allowed, but nobody said that it lives here.
    assert client.decide(CDN, 443, Said(TLS, "b.test")).verdict == "refused"
    assert client.decide(CDN, 443, Said(TLS, "evil.test")).verdict == "refused"
    assert last_denial(client)[0] == "evil.test"
    assert client.decide(OTHER, 443, None).verdict == "refused"


def test_a_strict_connection_that_says_nothing_is_refused_with_the_reason() -> None:
    client = client_with(parse_policy(["strict", "a.test"]))
    asked(client, "a.test", CDN)
    assert client.decide(CDN, 443, Said(TLS, reason="no server name")).reason == "no server name"
    assert last_denial(client)[3] == "no server name"


def test_a_network_of_a_strict_policy_needs_no_name_but_is_not_private() -> None:
    client = client_with(parse_policy(["strict", "0.0.0.0/0:443"]))
    assert client.decide(CDN, 443, None) is ALLOWED
    assert client.decide(CDN, 80, None).verdict == "refused"
    assert client.decide(INSIDE, 443, None).verdict == "refused"


def test_a_name_of_a_strict_sandbox_leads_to_an_address_only_while_its_answer_holds() -> None:
    clock = Clock()
    client = SandboxEgress("sb-x", Slot(1))
    client.pins = Pins("sb1", clock)
    rebind(client, BoundPolicy(parse_policy(["strict", "a.test:443"]), 7))
    asked(client, "a.test", CDN)
    clock.now += 60
    assert client.decide(CDN, 443, Said(TLS, "a.test")) is ALLOWED
    clock.now += GRACE
    asked(client, "a.test", OTHER)  # by now it leads elsewhere, and the address may be anybody's
    assert client.decide(CDN, 443, None).verdict == "refused"
    assert client.decide(CDN, 443, Said(TLS, "a.test")).verdict == "refused"
    assert "look its name up again" in last_denial(client)[3]
    assert client.decide(OTHER, 443, Said(TLS, "a.test")) is ALLOWED


def test_connections_of_a_strict_sandbox_outlive_an_answer_and_a_change_that_allows_them() -> None:
    clock = Clock()
    client = SandboxEgress("sb-x", Slot(1))
    client.pins = Pins("sb1", clock)
    rebind(client, BoundPolicy(parse_policy(["strict", "a.test:443"]), 7))
    asked(client, "a.test", CDN)
    clock.now += 600
    rebind(client, BoundPolicy(parse_policy(["strict", "a.test:443", "b.test"]), 8))
    said = Said(TLS, "a.test")
    assert client.decide(CDN, 443, said, again=True) is ALLOWED  # as an open one is judged anew
    assert client.decide(CDN, 443, said).reason == denials.EXPIRED[1]
