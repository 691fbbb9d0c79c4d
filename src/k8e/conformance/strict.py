"""Strict mode: two tenants share the address of one CDN, and only ours is reached."""

from __future__ import annotations

import json

from k8e.conformance.behaviours import equal, expect, in_a_room
from k8e.conformance.lab.far import CDN, CDN6, OTHER, WEB
from k8e.conformance.lab.rooms import QUICKLY, TRIES, Room, Tried, Words
from k8e.conformance.names import NOT_LISTED
from k8e.conformance.network import PRIVATE_RULE

OURS, THEIRS = "a.cdn.test", "b.cdn.test"


def _strict(room: Room) -> str:
    """Make a room strict that has asked for our tenant's address; whom it trusts."""
    room.allow("strict", OURS)
    equal(room.ask("lookup", OURS).said, sorted([CDN, CDN6]), "our tenant's addresses")
    room.scene.forget()
    return room.scene.far.authority.certificate


def _request(host: str, *lines: str, path: str = "/") -> str:
    return "\r\n".join([f"GET {path} HTTP/1.1", f"Host: {host}", *lines, "", ""])


def _hosts(room: Room) -> list[str]:
    """Whom requests that arrived were for."""
    return [asked["host"] for asked in room.scene.far.requests]


@in_a_room("strict.allowed")
def allowed(room: Room) -> None:
    """The allowed tenant of a shared address works to the end, by HTTP and by TLS."""
    trusted = _strict(room)
    tried = room.attempt(
        ["fetch", f"https://{OURS}/one", trusted],
        ["fetch", f"http://{OURS}/two"],
        ["hello", CDN6, OURS, trusted],
        ["talk", CDN6, 80, _request(OURS)],
    )
    equal([outcome.error for outcome in tried.outcomes], [""] * 4, "errors")
    secure, plain = (json.loads(outcome.said) for outcome in tried.outcomes[:2])
    equal((secure["server_name"], secure["host"]), (OURS, OURS), "by TLS")
    equal((plain["server_name"], plain["host"]), ("", OURS), "by HTTP")
    equal(tried.denials, [], "refusals")


@in_a_room("strict.server-name")
def server_name(room: Room) -> None:
    """Another server name than the allowed one, or none, is refused before TLS begins."""
    trusted = _strict(room)
    names = {THEIRS: NOT_LISTED, "": "no server name", f"x.{OURS}": NOT_LISTED}
    names |= {"cdn.test": NOT_LISTED, "web.test": NOT_LISTED}
    for address in (CDN, CDN6):
        for name, rule in names.items():
            tried = room.refused(["hello", address, name, trusted, OURS])
            told = [(item.name, item.address, item.port) for item in tried.denials]
            equal(told, [(name, address, 443)], "refusals")
            expect(rule in tried.denials[0].rule, f"{name!r}: {tried.denials[0].rule}")
    equal(room.scene.far.server_names, [], "server names that arrived")
    room.allow(OURS)  # without strict mode, the other tenant is reached: the probe is not blind
    room.ask("lookup", OURS)
    said = room.ask("hello", CDN, THEIRS, trusted).said
    expect(f'"server_name": "{THEIRS}"' in str(said), f"the probe is blind: {said}")


@in_a_room("strict.host")
def host(room: Room) -> None:
    """A request for another Host, two Hosts, none, CONNECT, HTTP/2 or no HTTP does not arrive."""
    _strict(room)
    for said, rule in {
        _request(THEIRS): NOT_LISTED,
        _request(CDN): "an address instead of a host name",
        _request(OURS, f"Host: {THEIRS}"): "more than one Host",
        _request(OURS, path=f"http://{THEIRS}/"): "its target and its Host differ",
        _request(f"{OURS}:8080"): "another port",
        "GET / HTTP/1.1\r\nAccept: */*\r\n\r\n": "it has no Host",
        _request(OURS, "Upgrade: websocket"): "Upgrade",
        _request(OURS, "Content-Length: 1", "Transfer-Encoding: chunked"): "ambiguous",
        f"GET / HTTP/1.1\r\nHost: {OURS}\n\r\n\r\n": "stray",
        f"CONNECT {THEIRS}:443 HTTP/1.1\r\nHost: {OURS}\r\n\r\n": "CONNECT",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n": "HTTP/2",
        "SSH-2.0-client\r\n": "only TLS and HTTP can be checked in strict mode",
        "\x16\x03\x01\x00\x05hello": "TLS",
    }.items():
        tried = _quick_attempt(room, ["talk", CDN, 80, said])
        (answer,) = tried.outcomes[0].said
        refused = answer.startswith("HTTP/1.1 403") or answer in ("", "ConnectionResetError")
        expect(refused and tried.outcomes[0].seconds < QUICKLY, f"{said!r} got {answer[:80]!r}")
        equal(len(tried.denials), 1, f"refusals of {said!r}")
        expect(rule in tried.denials[0].rule, f"{said!r}: {tried.denials[0].rule}")
    equal(_hosts(room), [], "requests that arrived")


def _quick_attempt(room: Room, words: Words) -> Tried:
    """An attempt on which a busy machine did not spend long."""
    tried = room.attempt(words)
    for _ in range(TRIES - 1):
        if tried.outcomes[0].seconds < QUICKLY:
            break
        tried = room.attempt(words)
    return tried


@in_a_room("strict.second-request")
def second_request(room: Room) -> None:
    """A second request to another Host on a kept-alive connection does not arrive."""
    for at_once in (True, False):
        _strict(room)
        first = _request(OURS, "Connection: keep-alive", path="/first")
        parts = [first + _request(THEIRS)] if at_once else [first, _request(THEIRS)]
        said = room.ask("talk", CDN, 80, *parts).said
        expect(said[0].startswith("HTTP/1.1 200"), f"the first request: {said}")
        equal(_hosts(room), [OURS], "requests that arrived")


@in_a_room("strict.datagrams")
def datagrams(room: Room) -> None:
    """QUIC and other datagrams, and the right name at a wrong address, are refused."""
    trusted = _strict(room)
    tried = room.attempt(
        ["udp", OURS, 443],
        ["udp", CDN6, 443],
        ["hello", OTHER, OURS, trusted],
        ["hello", WEB, OURS, trusted],
        ["talk", "169.254.169.254", 80, _request(OURS)],
        ["lookup", THEIRS],
    )
    reached = [item for item in tried.outcomes if item.said and CDN in str(item.said)]
    equal(reached, [], "answers")
    room.silence()
    rules = {(denial.address, denial.rule) for denial in tried.denials}
    expect((OTHER, "no allowed name led to this address") in rules, f"refusals: {rules}")
    expect(("169.254.169.254", PRIVATE_RULE) in rules, f"refusals: {rules}")


@in_a_room("strict.redirects")
def redirects(room: Room) -> None:
    """A redirection to a forbidden host, a metadata service or loopback fails, strict or not."""
    for words in (("strict", OURS), (OURS,)):
        room.allow(*words)
        for target in (THEIRS, "169.254.169.254/latest", "127.0.0.1:8080"):
            room.scene.forget()
            room.refused(["fetch", f"http://{OURS}/?to=http://{target}/"])
            equal(_hosts(room), [OURS], f"requests that arrived, after one to {target}")
