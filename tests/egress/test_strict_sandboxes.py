"""Strict mode, seen from programs in real sandboxes: two tenants share the address of one CDN."""

from __future__ import annotations

import json
from collections.abc import Generator

import pytest

from tests.egress import places
from tests.egress.far import CDN, CDN6, OTHER, WEB
from tests.egress.places import Room

NOT_LISTED = "not in the allow-list"
OURS, THEIRS = "a.cdn.test", "b.cdn.test"


@pytest.fixture
def room(kept: Room) -> Generator[Room]:
    """A strict session that has asked for our tenant's address."""
    with places.reset(kept) as made:
        made.allow("strict", OURS)
        assert made.ask("lookup", OURS).said == sorted([CDN, CDN6])
        made.scene.forget()
        yield made


def request(host: str, *lines: str, path: str = "/") -> str:
    return "\r\n".join([f"GET {path} HTTP/1.1", f"Host: {host}", *lines, "", ""])


def hosts(room: Room) -> list[str]:
    """Whom requests that arrived were for."""
    return [asked["host"] for asked in room.scene.far.requests]


def test_the_allowed_tenant_works_to_the_end(room: Room) -> None:
    trusted = room.scene.far.authority.certificate
    tried = room.attempt(
        ["fetch", f"https://{OURS}/one", trusted],
        ["fetch", f"http://{OURS}/two"],
        ["hello", CDN6, OURS, trusted],
        ["talk", CDN6, 80, request(OURS)],
    )
    assert [outcome.error for outcome in tried.outcomes] == [""] * 4
    secure, plain = (json.loads(outcome.said) for outcome in tried.outcomes[:2])
    assert (secure["server_name"], secure["host"], secure["path"]) == (OURS, OURS, "/one")
    assert (plain["server_name"], plain["host"], plain["path"]) == ("", OURS, "/two")
    assert tried.denials == []


def test_without_strict_the_other_tenant_would_be_reached(room: Room) -> None:
    room.allow(OURS)
    assert room.ask("lookup", OURS).said
    trusted = room.scene.far.authority.certificate
    assert f'"server_name": "{THEIRS}"' in room.ask("hello", CDN, THEIRS, trusted).said


@pytest.mark.parametrize("address", [CDN, CDN6])
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        (THEIRS, NOT_LISTED),
        ("", "its TLS hello has no server name"),
        (f"x.{OURS}", NOT_LISTED),
        ("cdn.test", NOT_LISTED),
        ("web.test", NOT_LISTED),
    ],
)
def test_another_server_name_is_refused(room: Room, address: str, name: str, rule: str) -> None:
    trusted = room.scene.far.authority.certificate
    tried = room.attempt(["hello", address, name, trusted, OURS])
    assert tried.not_refused() == []
    assert room.scene.far.server_names == []
    (denial,) = tried.denials
    assert (denial.name, denial.address, denial.port) == (name, address, 443)
    assert rule in denial.rule


@pytest.mark.parametrize(
    ("said", "name", "rule"),
    [
        (request(THEIRS), THEIRS, NOT_LISTED),
        (request(CDN), "", "an address instead of a host name"),
        (request(OURS, f"Host: {THEIRS}"), "", "more than one Host"),
        (request(OURS, path=f"http://{THEIRS}/"), "", "its target and its Host differ"),
        (request(f"{OURS}:8080"), "", "another port"),
        ("GET / HTTP/1.1\r\nAccept: */*\r\n\r\n", "", "it has no Host"),
        (request(OURS, "Upgrade: websocket"), "", "Upgrade"),
        (request(OURS, "Content-Length: 1", "Transfer-Encoding: chunked"), "", "ambiguous"),
        (f"GET / HTTP/1.1\r\nHost: {OURS}\n\r\n\r\n", "", "stray"),
        (f"CONNECT {THEIRS}:443 HTTP/1.1\r\nHost: {OURS}\r\n\r\n", "", "CONNECT"),
        ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "", "HTTP/2"),
        ("SSH-2.0-client\r\n", "", "only TLS and HTTP can be checked in strict mode"),
        ("\x16\x03\x01\x00\x05hello", "", "TLS"),
    ],
)
def test_a_request_for_anybody_else_does_not_arrive(
    room: Room, said: str, name: str, rule: str
) -> None:
    tried = room.attempt(["talk", CDN, 80, said])
    (answer,) = tried.outcomes[0].said
    assert answer.startswith("HTTP/1.1 403") or answer in ("", "ConnectionResetError")
    assert tried.outcomes[0].seconds < places.QUICKLY
    assert hosts(room) == []
    (denial,) = tried.denials
    assert (denial.name, denial.address, denial.port) == (name, CDN, 80)
    assert rule in denial.rule
    if answer.startswith("HTTP/1.1 403"):
        assert denial.rule in answer, "whoever reads the answer learns why"


@pytest.mark.parametrize("at_once", [True, False])
def test_a_second_request_on_a_connection_does_not_arrive(room: Room, at_once: bool) -> None:
    first, second = request(OURS, "Connection: keep-alive", path="/first"), request(THEIRS)
    parts = [first + second] if at_once else [first, second]
    said = room.ask("talk", CDN, 80, *parts).said
    assert said[0].startswith("HTTP/1.1 200")
    assert hosts(room) == [OURS]


def test_datagrams_and_other_addresses_are_refused(room: Room) -> None:
    trusted = room.scene.far.authority.certificate
    tried = room.attempt(
        ["udp", OURS, 443],
        ["udp", CDN6, 443],
        ["hello", OTHER, OURS, trusted],
        ["hello", WEB, OURS, trusted],
        ["talk", "169.254.169.254", 80, request(OURS)],
        ["lookup", THEIRS],
    )
    assert [
        outcome for outcome in tried.outcomes if outcome.said and CDN in str(outcome.said)
    ] == []
    assert room.scene.tap.take() == []
    assert room.scene.internet.asked == [OURS, OURS]
    rules = {(denial.address, denial.rule) for denial in tried.denials}
    assert (OTHER, "no allowed name led to this address") in rules
    private = "private, local and metadata addresses cannot be reached"
    assert ("169.254.169.254", private) in rules


@pytest.mark.parametrize("words", [["strict", OURS], [OURS]])
def test_a_redirection_to_a_forbidden_host_fails(room: Room, words: list[str]) -> None:
    room.allow(*words)
    for target in (f"http://{THEIRS}/", "http://169.254.169.254/latest", "http://127.0.0.1:8080/"):
        room.scene.forget()
        tried = room.attempt(["fetch", f"http://{OURS}/?to={target}"])
        assert tried.not_refused() == [], target
        assert hosts(room) == [OURS], "the first one arrived, and nobody else's"
        if THEIRS in target:
            assert (THEIRS, NOT_LISTED) in {(item.name, item.rule) for item in tried.denials}


def test_addresses_of_the_policy_need_no_name(room: Room) -> None:
    room.allow("strict", OURS, f"{OTHER}:8080")
    assert room.ask("tcp", OTHER, 8080).said == OTHER
    told = room.ask("talk", OTHER, 22, "SSH-2.0-client\r\n")
    # The reset may come when we still speak, or when we listen.
    assert "ConnectionResetError" in (told.error, *(told.said or ()))
