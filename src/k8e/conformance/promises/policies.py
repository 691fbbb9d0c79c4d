"""Policies of egress: changes at run time, presets, and strict mode."""

from __future__ import annotations

import contextlib
import json
import statistics

from k8e.conformance.behaviour import equal, expect, in_a_room
from k8e.conformance.lab.far import CALLING_PORT, CDN, CDN6, OTHER, WEB, WEB6, Tap
from k8e.conformance.lab.gateways import eventually
from k8e.conformance.lab.rooms import (
    QUICKLY,
    TRIES,
    Attempts,
    RemoteProgram,
    Room,
    RoomProgram,
    Scene,
    Words,
)
from k8e.conformance.promises.network import NOT_LISTED, PRIVATE_RULE

CALL = f"{OTHER}:{CALLING_PORT}"  # a way out for puppets that no name leads to
_BY_HTTP = "GET /call HTTP/1.1\r\nHost: web.test\r\n\r\n"
_WAYS = {
    ("web.test",): ("web.test", CALLING_PORT),
    (f"{WEB}:{CALLING_PORT}",): (WEB, CALLING_PORT),
    ("open",): (WEB6, CALLING_PORT),
    ("strict", "web.test"): ("web.test", 80, _BY_HTTP),
}
"""Policies, and what they let a program download from."""


def _line(program: RoomProgram) -> str:
    """The next line that a download prints, after the HTTP headers."""
    while not (line := program.line()).startswith(("line", "[")) and program.end is None:
        pass
    return line


@in_a_room("policy.first-moment")
def first_moment(room: Room) -> None:
    """A session has its policy from its first moment, and no network before it has one."""
    with room.beside("web.test:8080") as new:
        equal(new.ask("tcp", "web.test", 8080).said, WEB, "what is allowed")
        expect(new.is_refused("tcp", OTHER, 8080), "what is not allowed is reached")
    with room.beside() as new:
        new.refused(["tcp", WEB, 8080], ["lookup", "web.test"])


@in_a_room("policy.kept-connections")
def kept_connections(room: Room) -> None:
    """A change of policy leaves open connections that it still allows as they are."""
    for words, attempt in _WAYS.items():
        room.allow(*words)
        with room.start("download", *attempt) as program:
            server = room.scene.far.caller()
            for number, more in enumerate((["a.cdn.test"], ["b.cdn.test", "a.cdn.test"], [])):
                room.allow(*words, *more)
                server.sendall(f"line {number}\n".encode())
                equal(_line(program), f"line {number}", f"a download under {words}")


@in_a_room("policy.cut-connections")
def cut_connections(room: Room) -> None:
    """A tightened policy ends open connections at once, both ways."""
    for words, attempt in _WAYS.items():
        room.allow(*words)
        with room.start("download", *attempt) as program:
            server = room.scene.far.caller()
            server.sendall(b"line 0\n")
            equal(_line(program), "line 0", f"a download under {words}")
            room.allow("other.test", "a.cdn.test")
            with contextlib.suppress(OSError):
                server.sendall(b"line 1\nline 2\n")
            later = [_line(program) for _ in range(3)]
            ends = [json.loads(line)[0]["error"] for line in later if line.startswith("[")]
            equal(ends, ["ConnectionResetError"], f"the end of a download: {later}")
    room.allow(CALL)
    with room.puppet(OTHER, CALLING_PORT) as puppet:
        room.allow("web.test")
        room.scene.tap.take()
        expect(puppet.is_cut(), "a connection under an old policy goes on")
        packets = room.scene.tap.take()
        expect(f"tcp {OTHER} {CALLING_PORT}" not in packets, f"what it said got out: {packets}")


@in_a_room("policy.gateway-dies")
def gateway_dies(room: Room) -> None:
    """Without its gateway a sandbox keeps what was open and gets nothing new; then all goes on."""
    scene = room.scene
    room.allow("web.test", CALL)
    with room.puppet(OTHER, CALLING_PORT) as puppet:
        equal(puppet.attempt("tcp", "web.test", 8080).said, WEB, "an allowed name")
        scene.place.kill_gateway()
        try:
            _nothing_new(scene, puppet)
        finally:
            scene.restart()  # others use it, too
        equal(puppet.attempt("lookup", "web.test").said, sorted([WEB, WEB6]), "after a restart")
        expect(puppet.is_refused("lookup", "a.cdn.test"), "a name that is not allowed")
        told = scene.client.egress(room.session_id)
        expect("a.cdn.test" in {item.name for item in told.denials}, "a refusal is not told")
        room.allow("web.test")
        expect(puppet.is_cut(), "a connection under an old policy goes on after a restart")
    equal(room.ask("tcp", "web.test", 8080).said, WEB, "the name in the end")


def _nothing_new(scene: Scene, puppet: RemoteProgram) -> None:
    """Check that open connections go on, and that nothing else gets out."""
    equal(puppet.attempt("tcp", WEB, 8080).said, WEB, "what was open")
    asked = len(scene.internet.asked)
    scene.tap.take()
    for words in (
        ("tcp", CDN, 8080),
        ("udp", CDN, 443),
        ("tcp", "169.254.169.254", 8080),
        ("lookup", "web.test"),
        ("lookup", "other.test"),
    ):
        expect(puppet.is_refused(*words), f"{words} without a gateway")
    # Of what was open, also to the other address of that name, the last packets may come late.
    new = [text for text in scene.tap.take() if text.split()[1] not in (OTHER, WEB, WEB6)]
    equal(new, [], "what got out")
    equal(len(scene.internet.asked), asked, "questions that reached a resolver")


@in_a_room("policy.strict-gateway-dies")
def strict_gateway_dies(room: Room) -> None:
    """Without the proxy of strict mode nothing gets out, and refusals stay quick."""
    scene = room.scene
    room.allow("strict", "web.test")
    equal(room.ask("fetch", "http://web.test/").error, "", "an allowed host")
    client, enough = scene.client, "enough"
    client.exec(room.session_id, ["rm", "-f", enough])
    words = ["insist", enough, "talk", WEB, 80, "GET / HTTP/1.1\r\nHost: web.test\r\n\r\n"]
    with room.start(*words, exec_id="insist"):
        scene.place.kill_gateway()
        with contextlib.closing(Tap(scene.router, room.slot.interface)) as wire:
            scene.tap.take()
            for _ in range(5):
                eventually(wire.take)
            room.silence()
        scene.restart()
        scene.client.write_file(room.session_id, enough, "")
        told = room.rejoin(*words, exec_id="insist").said
    refused = [item for item in told if item["error"] == "ConnectionRefusedError"]
    expect(refused, "nothing was refused while there was no gateway")
    usual = statistics.median(item["seconds"] for item in refused)
    expect(usual < QUICKLY, f"a refusal took {usual:.1f} s")


@in_a_room("policy.nothing-left")
def nothing_left(room: Room) -> None:
    """A session that ends leaves neither rules, records, namespaces nor links."""
    scene = room.scene
    with room.beside("web.test", "93.184.216.0/24:22", "open") as ending:
        equal(ending.ask("tcp", "web.test", 8080).said, WEB, "an allowed name")
        slot, record = ending.slot, ending.record
        expect(f'"{slot.interface}"' in scene.elements(), "it has no rules")
    expect(not record.exists(), "its record is left")
    expect(not (scene.net / "slots" / str(slot.number)).exists(), "its namespace is left")
    expect(f'"{slot.interface}"' not in scene.elements(), "its rules are left")
    eventually(lambda: slot.interface not in scene.links())


OURS, THEIRS = "a.cdn.test", "b.cdn.test"


def _strict(room: Room) -> str:
    """Make a room strict that has resolved our tenant's address; return whom it trusts."""
    room.allow("strict", OURS)
    equal(room.ask("lookup", OURS).said, sorted([CDN, CDN6]), "our tenant's addresses")
    room.scene.forget()
    return room.scene.far.authority.certificate


def _request(host: str, *lines: str, path: str = "/") -> str:
    return "\r\n".join([f"GET {path} HTTP/1.1", f"Host: {host}", *lines, "", ""])


def _hosts(room: Room) -> list[str]:
    """The hosts that arrived requests were for."""
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


def _quick_attempt(room: Room, words: Words) -> Attempts:
    """An attempt that a busy machine did not slow down."""
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
