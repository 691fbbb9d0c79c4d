"""The network of sandboxes: nothing but what the policy allows, and names in DNS."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ipaddress
import json
import re
import socket
import statistics
from typing import Any

import dns.message
import dns.rrset

from k8e import errors
from k8e.conformance.behaviour import BrokenPromise, equal, expect, in_a_room
from k8e.conformance.lab.far import CALLING_PORT, DOH, METADATA, OTHER, PRIVATE, PUBLIC, WEB, WEB6
from k8e.conformance.lab.gateways import eventually
from k8e.conformance.lab.internet import FAR, FAR6, HOST, HOST6, RESOLVER
from k8e.conformance.lab.rooms import QUICKLY, Room, Words
from k8e.egress import namespaces
from k8e.egress.netlink import Netlink
from k8e.model import DNS_ADDRESS

EVERYTHING = ("0.0.0.0/0", "::/0")
PUBLIC_HOST, PUBLIC_HOST6, HOST_PORT = "93.184.220.7", "2606:4700:220::7", 8080
FOREIGN6 = "fd6b:3865:0:1::77"
PRIVATE_RULE = "private, local and metadata addresses cannot be reached"
_TCP_INFO, _RETRANSMITS = (socket.IPPROTO_TCP, socket.TCP_INFO, 8), 2
LOCAL = ("127.0.0.2", "127.0.0.1", "::1", "0.0.0.0", "::")  # noqa: S104 - a target, not a listener
# Raw IP, ICMP, packets, vsock, netlink of firewalls and audit, cryptography, Bluetooth, SCTP.
KINDS = (
    *((2, 3, 1), (2, 3, 255), (10, 3, 58), (17, 3, 3), (17, 2, 3), (40, 1), (40, 2)),
    *((16, 3, 12), (16, 3, 9), (38, 5), (31, 3, 1), (2, 1, 132), (2, 5)),
)
# Other ways of writing 169.254.169.254 and 10.9.9.9, and other addresses that carry them.
DISGUISED = (
    "2852039166",
    "0xA9FEA9FE",
    "0251.0376.0251.0376",
    "0xa9.0xfe.0xa9.0xfe",
    "169.254.43518",
    "169.16689662",
    "::ffff:169.254.169.254",
    "::ffff:a9fe:a9fe",
    "::169.254.169.254",
    "64:ff9b::169.254.169.254",
    "64:ff9b:1::169.254.169.254",
    "2002:a9fe:a9fe::1",
    "2001:0:a9fe:a9fe::1",
    "167901449",
    "012.9.9.9",
    "::ffff:10.9.9.9",
)
RESERVED = (
    "192.0.0.8",
    "192.0.2.9",
    "192.88.99.1",
    "198.18.77.1",
    "198.51.100.9",
    "203.0.113.9",
    "240.0.0.1",
    "2001:db8::9",
    "fd6b:3865:0:2::1",
)
TRIES: list[Words] = [
    *(["lookup", name] for name in ("web.test", "secret.evil.test", "sandbox.local")),
    *(["lookup", name] for name in ("metadata.google.internal", "instance-data")),
    ["fetch", "http://web.test/"],
    *(["tcp", WEB, port] for port in (22, 53, 80, 443, 853, 8080)),
    *(["tcp", WEB6, port] for port in (80, 443)),
    *(["tcp", DOH, port] for port in (443, 853)),
    *(["udp", WEB, port] for port in (53, 123, 443, 853, 8080)),
    *(["udp", WEB6, port] for port in (443, 5353)),
    *(["dns", server, "web.test"] for server in (DNS_ADDRESS, RESOLVER, DOH)),
    *(["dns", server, "web.test", "TXT", "tcp"] for server in (DNS_ADDRESS, RESOLVER, DOH)),
]


def tcp(addresses: tuple[str, ...], port: int = 8080) -> list[Words]:
    return [["tcp", address, port] for address in addresses]


def _opened(room: Room, *words: str) -> None:
    """Open what others could be reached by, so that a refusal means something."""
    room.allow(*(words or ("open",)))
    room.speak(WEB, 8080)


@in_a_room("network.off")
def off(room: Room) -> None:
    """With no host allowed no name, TCP, UDP or DNS of any port gets out; refusals are reported."""
    tried = room.refused(*TRIES)
    room.silence()
    equal(room.scene.internet.asked, [], "questions that reached a resolver")
    wanted = {"this session has no network (its allow-list is empty)"}
    equal(tried.rules, wanted, "reasons of the refusals")
    expect(
        {"web.test", "secret.evil.test"} <= {denial.name for denial in tried.denials},
        "a refused name is not told",
    )
    many: list[Words] = [["udp", WEB, 443], ["udp", WEB6, 443], ["lookup", "web.test"]]
    room.refused(*(many * 10))


@in_a_room("network.off-groups")
def off_groups(room: Room) -> None:
    """With no host allowed neither multicast, mDNS nor ICMP in IPv4 or IPv6 gets out."""
    groups = [["shout", group, 5353] for group in ("224.0.0.251", "ff02::fb", "ff0e::fb")]
    echoes = [["ping", host] for host in (WEB, WEB6, DNS_ADDRESS, str(room.slot.routers[0]))]
    tried = room.attempt(*groups, *echoes, at_once=True)
    answered = [item for item in tried.outcomes[len(groups) :] if not item.error]
    equal(answered, [], "echoes that came back")
    room.silence()


@in_a_room("network.other-sockets")
def other_sockets(room: Room) -> None:
    """Sockets that go around the network cannot be made, whatever is allowed."""
    _opened(room)
    room.refused(*(["make", *kind] for kind in KINDS), *(["vsock", i, 1] for i in (1, 2)))
    room.silence()


@in_a_room("network.private-addresses")
def private_addresses(room: Room) -> None:
    """Metadata services, private networks and loopback are out of reach under every policy."""
    for words in (("open",), EVERYTHING, ("strict", *EVERYTHING)):
        _opened(room, *words)
        places = (*METADATA, *PRIVATE)
        tried = room.refused(
            *tcp(places), *tcp(METADATA, 80), *(["udp", it, 8080] for it in places)
        )
        equal(tried.rules, {PRIVATE_RULE}, f"reasons under {words}")
        room.refused(*tcp(LOCAL))
        room.silence()


@in_a_room("network.disguised-addresses")
def disguised_addresses(room: Room) -> None:
    """Decimal, octal, IPv4-mapped, NAT64 and reserved forms of an address lead nowhere else."""
    _opened(room)
    room.refused(*tcp((*DISGUISED, *RESERVED)))
    room.silence()


@in_a_room("network.operator-only")
def operator_only(room: Room) -> None:
    """No word that a client says opens a private address."""
    near = ("198.18.0.0/30", str(room.slot.routers[1]), "127.0.0.1")
    for words in ((), ("strict",)):
        for address in (*METADATA, *PRIVATE, *near):
            try:
                room.allow(*words, address)
            except errors.InvalidRequest:
                continue
            raise BrokenPromise(f"a client may allow {address}")


@in_a_room("network.rebinding")
def rebinding(room: Room) -> None:
    """A name that leads to a private address, at first or later, opens nothing."""
    names = room.scene.internet.names

    def rebind(*addresses: str) -> None:
        names["rebind.test"] = list(addresses)
        room.allow("rebind.test")  # no answer outlives its policy, so this one is asked for

    for address in (*METADATA, *PRIVATE, "127.0.0.1", "::1", "::ffff:10.9.9.9"):
        rebind(address)
        room.scene.tap.take()
        tried = room.refused(["tcp", "rebind.test", 8080], ["tcp", address, 8080])
        told = {denial.rule for denial in tried.denials if denial.name == "rebind.test"}
        expect(any("resolves to a private address" in rule for rule in told), f"reasons: {told}")
        room.silence(f"to {address}")
    rebind(WEB)
    equal(room.ask("tcp", "rebind.test", 8080).said, WEB, "its public address")
    rebind("169.254.169.254")
    room.refused(["tcp", "rebind.test", 8080], ["tcp", "169.254.169.254", 8080])
    rebind("169.254.169.254", OTHER, "10.9.9.9")
    equal(room.ask("lookup", "rebind.test").said, [OTHER], "what is left of a mixed answer")
    names["inner.test"] = ["10.9.9.9"]
    rebind("=inner.test")
    room.refused(["tcp", "rebind.test", 8080])


@in_a_room("network.host")
def host(room: Room) -> None:
    """The host cannot be reached by any of its addresses, nor by a name for one."""
    listener, addresses = namespaces.run_in(room.scene.internet.world, _host_with_a_listener)
    with listener:
        # The gateway is told of the new address, and then holds it back.
        _opened(room)
        eventually(lambda: PUBLIC_HOST in room.scene.rules())
        room.scene.internet.names["host.test"] = [PUBLIC_HOST, PUBLIC_HOST6]
        for words in (
            ("open",),
            EVERYTHING,
            (PUBLIC_HOST, PUBLIC_HOST6, "host.test"),
            ("strict", *EVERYTHING),
        ):
            room.allow(*words)
            room.scene.tap.take()
            tries = [*tcp(addresses, HOST_PORT), ["tcp", "host.test", HOST_PORT]]
            room.refused(*tries, ["udp", PUBLIC_HOST, 53])
            room.silence(f"under {words}")
        with contextlib.suppress(BlockingIOError):
            raise BrokenPromise(f"the host was reached from {listener.accept()[1]}")


def _host_with_a_listener() -> tuple[socket.socket, tuple[str, ...]]:
    with contextlib.closing(Netlink()) as netlink:
        added = [ipaddress.ip_interface(text) for text in (PUBLIC_HOST, PUBLIC_HOST6)]
        with contextlib.suppress(FileExistsError):
            netlink.configure(socket.if_nametoindex("lo"), added)
        found = {address for _, address in netlink.addresses() if not address.is_link_local}
    made = socket.create_server(("::", HOST_PORT), family=socket.AF_INET6, dualstack_ipv6=True)
    made.setblocking(False)
    return made, tuple(map(str, found))


@in_a_room("network.gateway")
def gateway(room: Room) -> None:
    """The gateway's own ports, the router and the uplink cannot be reached from a sandbox."""
    listen = int(room.scene.place.environ["K8E_LISTEN"].rpartition(":")[2])
    room.scene.place.wait_for_grpc()
    routers = [str(address) for address in room.slot.routers]
    near = [*routers, DNS_ADDRESS, "198.18.0.1", "198.19.0.1", "198.19.0.2", "fd6b:3865:0:2::1"]
    near += [text.partition("/")[0] for text in (HOST, HOST6, FAR, FAR6)]
    own = [str(address) for address in _machine() if not address.is_loopback]
    _opened(room)
    tries = [["tcp", address, port] for address in near for port in (22, 443, 17380, listen)]
    room.refused(*tries, *tcp((*own, "127.0.0.1", "::1"), listen))
    # The wire itself has no addresses that hold on it alone.
    equal(_wire_addresses(room), [], "the router's addresses of this wire alone")
    beside = (*tcp(("fe80::1%eth0", "ff02::2%eth0")), *tcp(("fe80::1%eth0",), 53))
    unanswered = room.attempt(*beside, at_once=True)
    equal([it.said for it in unanswered.outcomes], [None] * 3, "answers on the wire itself")
    room.silence()


def _wire_addresses(room: Room) -> list[str]:
    def there() -> list[str]:
        index = socket.if_nametoindex(room.slot.interface)
        with contextlib.closing(Netlink()) as netlink:
            found = [address for at, address in netlink.addresses() if at == index]
        return [str(address) for address in found if address.is_link_local]

    return namespaces.run_in(room.scene.router, there)


def _machine() -> list[Any]:
    """The addresses of the machine that the gateway really runs on."""
    with contextlib.closing(Netlink()) as netlink:
        found = {address for _, address in netlink.addresses()}
    return [address for address in found if not address.is_link_local]


@in_a_room("network.siblings")
def siblings(room: Room) -> None:
    """Another sandbox cannot be reached, by its addresses or by a name for them."""
    with room.beside() as sibling:
        addresses = [str(sibling.slot.address4), str(sibling.slot.address6)]
        equal(sibling.ask("address").said, addresses, "the sibling's addresses")
        with sibling.start("listen", 8080) as program:
            for words in (("open",), EVERYTHING, ("sibling.test",)):
                room.scene.internet.names["sibling.test"] = addresses
                room.allow(*words)
                tries = [[kind, to, 8080] for kind in ("tcp", "udp") for to in addresses]
                room.refused(*tries, ["tcp", "sibling.test", 8080])
            equal(sibling.ask("tcp", addresses[0], 8080).said, "sibling", "that it listens")
            first = program.line()
            expect(first.endswith(addresses[0]), f"somebody was there before: {first}")


@in_a_room("network.foreign-source")
def foreign_source(room: Room) -> None:
    """A foreign source address gets nothing out, and carries no refusal to a sibling."""
    own = {str(room.slot.address4), str(room.slot.address6)}
    for words in ((), ("open",)):
        room.allow(*words)
        room.scene.tap.take()
        for source in {"198.18.0.2", "198.18.77.2", OTHER, FOREIGN6, "2606:4700::77"} - own:
            room.ask("disguised", source, WEB6 if ":" in source else WEB, 443)
            found = [it for it in room.scene.tap.take() if it.startswith("udp")]
            equal(found, [], f"datagrams that got out from {source}")
    with room.beside() as sibling, sibling.start("overhear", 5555, WEB6, 443) as program:
        for _ in range(3):
            room.ask("disguised", str(sibling.slot.address6), WEB6, 443, 5555)
        equal(program.outcome().error, "TimeoutError", "what the sibling heard")


@in_a_room("network.late-answers")
def late_answers(room: Room) -> None:
    """What still comes for a sandbox that is gone does not leave the router again."""
    _opened(room)
    for host in (WEB, WEB6):
        gone = Room(room.scene, room.runtime, "open", tenant="other")
        wire = gone.slot.interface
        with gone.start("obey", host, CALLING_PORT), room.scene.far.caller() as connection:
            gone.allow()  # from now on the other end of the connection hears nothing
            gone.close()
            eventually(lambda wire=wire: wire not in room.scene.links())
            room.scene.tap.take()
            connection.sendall(b"late")
            eventually(lambda it=connection: it.getsockopt(*_TCP_INFO)[_RETRANSMITS] > 0)
            equal(room.ask("tcp", OTHER, 8080).said, OTHER, "what is allowed elsewhere")
            expect(f"tcp {OTHER} 8080" in (taken := room.scene.tap.take()), "the tap is blind")
            others = [packet for packet in taken if packet.split()[1] not in PUBLIC]
            equal(others, [], f"packets that left again after one of {host} came in")


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
    """A wildcard means the names below it: no sibling, no suffix, no dot within a label."""
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
    """Repeated questions are answered here: no order and no type of known names gets out."""
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
    """A resolver's answer: eight addresses of its own for every name, valid for an hour."""
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
    """A flood of questions, by datagrams or connections, is capped and delays no other sandbox."""
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
