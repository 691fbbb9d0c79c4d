"""Allow-lists and names: what is allowed works, nothing else does, and DNS carries nothing out."""

from __future__ import annotations

import concurrent.futures
import json
import re
import statistics
from typing import Any

import dns.message
import dns.rrset

from k8e.conformance.behaviours import equal, expect, in_a_room
from k8e.conformance.lab.far import OTHER, WEB, WEB6
from k8e.conformance.lab.gateways import eventually
from k8e.conformance.lab.rooms import QUICKLY, Room
from k8e.model import DNS_ADDRESS

NOT_LISTED = "not in the allow-list"


@in_a_room("names.allowed")
def allowed(room: Room) -> None:
    """An allowed name works to the end, by HTTP and by TLS, and only it is asked for."""
    room.allow("web.test:80", "web.test:443")
    trusted = room.scene.far.authority.certificate
    tried = room.attempt(["fetch", "http://web.test/a"], ["fetch", "https://web.test/b", trusted])
    plain, secure = (json.loads(outcome.said) for outcome in tried.outcomes)
    equal((plain["address"], plain["host"], plain["path"]), (WEB, "web.test", "/a"), "by HTTP")
    equal((secure["server_name"], secure["host"]), ("web.test", "web.test"), "by TLS")
    equal(tried.denials, [], "refusals")
    wrong = room.ask("fetch", "https://web.test/").text
    expect("CERTIFICATE_VERIFY_FAILED" in wrong, f"a certificate of nobody: {wrong}")
    equal(set(room.scene.internet.asked), {"web.test"}, "names that were asked for")


@in_a_room("names.others")
def others(room: Room) -> None:
    """Names outside the allow-list fail at once, are not forwarded, and the result says why."""
    room.allow("web.test")
    names = ("other.test", "secret-data.evil.test", "www.web.test", "web.test.evil.test")
    tried = room.refused(*(["lookup", name] for name in names), ["fetch", "http://other.test/"])
    equal({denial.name for denial in tried.denials}, set(names), "names that were refused")
    equal(tried.rules, {NOT_LISTED}, "reasons")
    equal(room.scene.internet.asked, [], "questions that reached a resolver")


@in_a_room("names.ports")
def ports(room: Room) -> None:
    """A rule with a port opens that port alone."""
    room.allow("web.test:8080")
    tried = room.attempt(["tcp", "web.test", 8080], ["tcp", "web.test", 22])
    errors = [outcome.error for outcome in tried.outcomes]
    equal(errors, ["", "ConnectionRefusedError"], "both ports")
    equal(tried.rules, {"another port than web.test allows"}, "reasons")


@in_a_room("names.known-address")
def known_address(room: Room) -> None:
    """An address is not opened by knowing it; a name must have led there, for this session."""
    room.allow("web.test")
    tried = room.refused(["tcp", WEB, 8080], ["tcp", WEB6, 8080])
    equal(tried.rules, {"no allowed name led to this address"}, "reasons")
    equal(room.ask("tcp", "web.test", 8080).said, WEB, "the name itself")
    with room.beside("other.test") as other:
        other.refused(["tcp", WEB, 8080], ["lookup", "web.test"])  # which another tenant resolved
        equal(other.ask("tcp", "other.test", 8080).said, OTHER, "its own name")
        expect(room.is_refused("tcp", OTHER, 8080), "what the other tenant resolved is open")


@in_a_room("names.wildcards")
def wildcards(room: Room) -> None:
    """A wildcard means what is below it: no sibling, no suffix, no dot within a label."""
    below = ("x.a.test", "y.x.a.test", "X.A.TEST", "x.a.test.")
    beside = ("a.test", "a.test.evil", "xa.test", "x.a.test.evil", "evil%2ea.test", "x%2ea.test")
    for name in ("x.a.test", "y.x.a.test", *beside):
        room.scene.internet.names[name] = [WEB]
    room.allow("*.a.test")
    tried = room.attempt(*(["dns", DNS_ADDRESS, name] for name in (*below, *beside)))
    said = [outcome.said for outcome in tried.outcomes]
    equal(said, [f"NOERROR {WEB}"] * len(below) + ["NXDOMAIN"] * len(beside), "answers")
    equal(set(room.scene.internet.asked), {"x.a.test", "y.x.a.test"}, "names asked for")


@in_a_room("names.look-alikes")
def look_alikes(room: Room) -> None:
    """Upper case, trailing dots and punycode are the same name; look-alikes are not."""
    room.scene.internet.names["xn--bcher-kva.test"] = [WEB]
    room.allow("bücher.test.", "Web.TEST")
    same = ("bücher.test", "xn--bcher-kva.test", "wEb.tesT.")
    unlike = ("w\u0435b.test", "xn--wb-5cd.test", "bucher.test")
    tried = room.attempt(
        *(["tcp", name, 8080] for name in same), *(["lookup", name] for name in unlike)
    )
    said = [outcome.said for outcome in tried.outcomes]
    equal(said, [WEB, WEB, WEB, None, None, None], "names and look-alikes")


@in_a_room("names.only-addresses")
def only_addresses(room: Room) -> None:
    """Of DNS only addresses can be asked for: no TXT, NULL, MX, HTTPS, ANY or PTR is forwarded."""
    room.allow("web.test", "open")
    kinds = ("TXT", "NULL", "MX", "HTTPS", "ANY", "PTR")
    tried = room.attempt(
        *(["dns", DNS_ADDRESS, "web.test", kind] for kind in kinds),
        *(["dns", DNS_ADDRESS, "web.test", kind, "tcp"] for kind in kinds),
    )
    equal({outcome.said for outcome in tried.outcomes}, {"NOERROR"}, "answers")
    equal(room.scene.internet.asked, [], "questions that reached a resolver")


@in_a_room("names.tunnel")
def tunnel(room: Room) -> None:
    """Data in random names below a wildcard is cut off after a few hundred bytes, and told."""
    with room.beside("*.evil.test", "web.test") as other:
        room.scene.internet.craft = _always_web
        codes = other.ask("tunnel", DNS_ADDRESS, "evil.test", 200).said
        expect(codes["NOERROR"] < 50, f"{codes['NOERROR']} of 200 names were answered")
        equal(codes["NOERROR"] + codes["NXDOMAIN"], 200, "answers")
        asked = [name for name in room.scene.internet.asked if name.endswith(".evil.test")]
        equal(len(asked), codes["NOERROR"], "names that were carried out")
        told = other.attempt(["tunnel", DNS_ADDRESS, "evil.test", 3], ["lookup", "web.test"])
        equal(told.outcomes[1].said, [WEB], "an honest name meanwhile")
        expect("too many different names below a wildcard" in told.rules, f"{told.rules}")


@in_a_room("names.tunnel-known")
def tunnel_known(room: Room) -> None:
    """What is asked again is answered here: no order and no type of known names gets out."""
    with room.beside("*.evil.test", "web.test") as other:
        room.scene.internet.craft = _always_web
        answered = other.ask("repeat", DNS_ADDRESS, "evil.test", 400).said
        expect(answered > 100, f"only {answered} of 400 questions were answered")
        asked = [name for name in room.scene.internet.asked if name.endswith(".evil.test")]
        # Sixteen names by two types, and some of that again where it takes longer than they last.
        expect(len(asked) <= 64, f"{len(asked)} of {answered} questions got out")


@in_a_room("names.tunnel-lengths")
def tunnel_lengths(room: Room) -> None:
    """Names that look empty are paid for by their lengths: few get out, and the rest is refused."""
    with room.beside("*.evil.test") as other:
        room.scene.internet.craft = _always_web
        codes = other.ask("stretch", DNS_ADDRESS, "evil.test", 200).said
        expect(codes["NOERROR"] < 50, f"{codes['NOERROR']} of 200 names were answered")
        equal(codes["NOERROR"] + codes["NXDOMAIN"], 200, "answers")


MANY, EACH = 100, 8  # names, and addresses of each: more than are kept
HELD = 512
_PINNED = re.compile(r"map pins[46] {[^}]*elements = {([^}]*)}", re.DOTALL)
_PORTS = re.compile(r"set ports {[^}]*elements = {([^}]*)}", re.DOTALL)


def _count(pattern: re.Pattern[str], text: str) -> int:
    return sum(len(part.split(",")) for part in pattern.findall(text))


def _crowd(query: dns.message.Message) -> list[bytes]:
    """Eight addresses of its own for every name, which hold for an hour."""
    asked = query.question[0]
    number = int(asked.name.to_text().split(".")[0])
    texts = [f"93.185.{number // 32}.{number % 32 * EACH + nth}" for nth in range(EACH)]
    answer = dns.message.make_response(query)
    answer.answer.append(dns.rrset.from_text_list(asked.name, 3600, "IN", "A", texts))
    return [answer.to_wire()]


@in_a_room("names.many-addresses")
def many_addresses(room: Room) -> None:
    """Of all that a session looks up, the newest addresses are open; the kernel holds no others."""
    with room.beside("*.evil.test") as other:
        room.scene.internet.craft = _crowd
        equal(
            other.ask("ask_all", DNS_ADDRESS, "#.evil.test", MANY).said, {"NOERROR": MANY}, "codes"
        )
        equal(_count(_PINNED, room.scene.elements()), HELD, "pins in the kernel")
        tried = other.refused(["tcp", "93.185.0.1", 8080])
        expect(any("look its name up again" in rule for rule in tried.rules), f"{tried.rules}")
    equal(_count(_PINNED, room.scene.elements()), 0, "pins after the session's end")


@in_a_room("names.many-ports")
def many_ports(room: Room) -> None:
    """A name with as many ports as a policy can have is one entry of the kernel's per address."""
    with room.beside(*(f"*.evil.test:{port}" for port in range(8000, 8255))) as other:
        room.scene.internet.craft = _crowd
        equal(other.ask("ask_all", DNS_ADDRESS, "#.evil.test", 10).said, {"NOERROR": 10}, "codes")
        rules = room.scene.elements()
        equal(_count(_PINNED, rules), 10 * EACH, "pins in the kernel")
        equal(_count(_PORTS, rules), 255, "ports in the kernel")
        room.scene.internet.craft = _always_web
        equal(other.ask("tcp", "web.evil.test", 8080).said, WEB, "a port among them")
        expect(other.ask("tcp", WEB, 80).refused, "a port that is not among them is open")
    equal(_count(_PORTS, room.scene.elements()), 0, "ports after the session's end")


def _always_web(query: dns.message.Message) -> list[bytes]:
    asked = query.question[0]
    answer = dns.message.make_response(query)
    if asked.rdtype == 1:
        answer.answer.append(dns.rrset.from_text(asked.name, 60, "IN", "A", WEB))
    return [answer.to_wire()]


@in_a_room("names.flood")
def flood(room: Room) -> None:
    """A flood of questions, by datagrams or connections, is capped and holds up nobody else."""
    room.allow("web.test")
    with room.beside("web.test") as other, concurrent.futures.ThreadPoolExecutor() as pool:
        for words in (
            ["flood", DNS_ADDRESS, "web.test", 3000],
            ["flood_streams", DNS_ADDRESS, "web.test", 40, 2],
        ):
            work = pool.submit(room.attempt, words)
            meanwhile = [other.ask("lookup", "web.test") for _ in range(5)]
            equal([it.error for it in meanwhile], [""] * 5, "an honest sandbox meanwhile")
            usual = statistics.median(it.seconds for it in meanwhile)
            expect(usual < QUICKLY, f"an honest question took {usual:.1f} s")
            said: Any = work.result().outcomes[0].said
            count = int(said["answered"] if words[0] == "flood" else said)
            expect(0 < count < 1000, f"{count} answers to a flood")
    expect(len(room.scene.internet.asked) < 1000, "a flood reached the resolver")
    eventually(lambda: room.ask("lookup", "web.test").said)
