"""What a hostile program in a real sandbox tries against its network, on each runtime."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import socket
from collections.abc import Generator
from typing import Any

import pytest

from k8e import errors
from k8e.egress import namespaces
from k8e.egress.netlink import Netlink
from k8e.model import DNS_ADDRESS
from tests.egress.far import DOH, METADATA, OTHER, PRIVATE, WEB, WEB6
from tests.egress.internet import FAR, FAR6, HOST, HOST6, RESOLVER
from tests.egress.places import Room, Scene, Words
from tests.places import eventually

PUBLIC_HOST, PUBLIC_HOST6 = "93.184.220.7", "2606:4700:220::7"
HOST_PORT = 8080
SYN = b"\0\0\0\1\0\0\0\0\x50\x02\xff\xff\0\0\0\0"  # of TCP, behind its ports
# Raw IP, packets, IPv6's raw, virtual machines' sockets, netfilter's, the kernel's cryptography,
# Bluetooth: what could leave, or reach the host's kernel.
KINDS = (
    *((2, 3, 1), (2, 3, 255), (10, 3, 58), (17, 3, 3), (17, 2, 3), (40, 1), (40, 2)),
    *((16, 3, 12), (16, 3, 9), (38, 5), (31, 3, 1), (2, 1, 132), (2, 5)),
)


@pytest.fixture(scope="module")
def kept(scene: Scene, runtime: str) -> Generator[Room]:
    """A session that all tests of a runtime share."""
    room = Room(scene, runtime)
    room.allow("open")  # so that there is an uplink: what is held back is held back by policy
    yield room
    room.close()


def tcp(addresses: tuple[str, ...], port: int = 8080) -> list[Words]:
    return [["tcp", address, port] for address in addresses]


# Nothing is allowed.

TRIES: list[Words] = [
    *(["lookup", name] for name in ("web.test", "secret.evil.test", "sandbox.local")),
    ["fetch", "http://web.test/"],
    *(["tcp", WEB, port] for port in (22, 53, 80, 443, 853, 8080)),
    *(["tcp", WEB6, port] for port in (80, 443)),
    *(["tcp", DOH, port] for port in (443, 853)),
    *(["udp", WEB, port] for port in (53, 123, 443, 853, 8080)),
    *(["udp", WEB6, port] for port in (443, 5353)),
    *(["dns", server, "web.test"] for server in (DNS_ADDRESS, RESOLVER, DOH)),
    *(["dns", server, "web.test", "TXT", "tcp"] for server in (DNS_ADDRESS, RESOLVER, DOH)),
]


def test_nothing_gets_out_where_nothing_is_allowed(room: Room) -> None:
    tried = room.attempt(*TRIES)
    assert tried.not_refused() == []
    assert room.scene.tap.take() == []
    assert room.scene.internet.asked == []
    assert {denial.rule for denial in tried.denials} == {
        "this session has no network (its allow-list is empty)"
    }
    assert {"web.test", "secret.evil.test"} <= {denial.name for denial in tried.denials}


def test_groups_neighbours_and_echoes_are_not_reached_either(room: Room) -> None:
    groups = [["shout", group, 5353] for group in ("224.0.0.251", "ff02::fb", "ff0e::fb")]
    echoes = [["ping", host] for host in (WEB, WEB6, DNS_ADDRESS, str(room.slot.routers[0]))]
    tried = room.attempt(*groups, *echoes, at_once=True)
    assert all(outcome.error for outcome in tried.outcomes[len(groups) :])
    assert room.scene.tap.take() == []


def test_sockets_that_go_around_the_network_cannot_be_made(room: Room) -> None:
    room.allow("open")
    tried = room.attempt(*(["make", *kind] for kind in KINDS), *(["vsock", i, 1] for i in (1, 2)))
    assert tried.not_refused() == []


def test_refusals_stay_quick_however_many_there_are(room: Room) -> None:
    many: list[Words] = [["udp", WEB, 443], ["udp", WEB6, 443], ["lookup", "web.test"]]
    assert room.attempt(*(many * 10)).not_refused() == []
    room.allow("web.test")
    assert room.attempt(*([["udp", OTHER, 443]] * 10)).not_refused() == []


# Addresses that nobody may reach.

EVERYTHING = ("0.0.0.0/0", "::/0")
LOCAL = ("127.0.0.2", "127.0.0.1", "::1", "0.0.0.0", "::")
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


def test_metadata_services_and_private_addresses_are_out_of_reach(room: Room) -> None:
    room.allow("open")
    assert room.ask("tcp", WEB, 8080).said == WEB, "the others would be reached"
    room.scene.tap.take()
    tried = room.attempt(*tcp(METADATA), *tcp(METADATA, 80), *tcp(PRIVATE), *tcp(LOCAL))
    assert tried.not_refused() == []
    tried = room.attempt(*(["udp", address, 8080] for address in (*METADATA, *PRIVATE)))
    assert tried.not_refused() == []
    assert {denial.rule for denial in tried.denials} == {
        "private, local and metadata addresses cannot be reached"
    }
    assert room.scene.tap.take() == []


def test_other_forms_of_an_address_lead_nowhere_else(room: Room) -> None:
    room.allow("open")
    room.scene.tap.take()
    assert room.attempt(*tcp((*DISGUISED, *RESERVED))).not_refused() == []
    assert room.scene.tap.take() == []


@pytest.mark.parametrize("words", [[], ["strict"]])
def test_no_word_of_a_client_opens_a_private_address(room: Room, words: list[str]) -> None:
    for address in (*METADATA, *PRIVATE, "198.18.0.0/30", str(room.slot.routers[1])):
        with pytest.raises(errors.InvalidRequest, match="only the operator can allow it"):
            room.allow(*words, address)
    room.allow(*words, *EVERYTHING)
    assert room.ask("tcp", WEB, 8080).said == WEB, "the others would be reached"
    room.scene.tap.take()
    tries = [["udp", address, 8080] for address in (*METADATA, *PRIVATE)]
    assert room.attempt(*tries, *tcp((*METADATA, *PRIVATE))).not_refused() == []
    assert room.scene.tap.take() == []


@pytest.mark.parametrize("address", [*METADATA, *PRIVATE, "127.0.0.1", "::1", "::ffff:10.9.9.9"])
def test_a_name_that_leads_to_a_private_address_opens_nothing(room: Room, address: str) -> None:
    room.scene.internet.names["metadata.test"] = [address]
    room.allow("metadata.test")
    room.scene.tap.take()
    tried = room.attempt(
        ["lookup", "metadata.test"], ["tcp", "metadata.test", 8080], ["tcp", address, 8080]
    )
    assert tried.not_refused() == []
    told = {denial.rule for denial in tried.denials if denial.name == "metadata.test"}
    assert any("it resolves to a private address (" in rule for rule in told)
    assert room.scene.tap.take() == []


def test_a_name_that_changes_its_address_opens_only_public_ones(room: Room) -> None:
    names = room.scene.internet.names
    room.allow("rebind.test")
    names["rebind.test"] = [WEB]
    assert room.ask("tcp", "rebind.test", 8080).said == WEB
    names["rebind.test"] = ["169.254.169.254"]
    tried = room.attempt(["tcp", "rebind.test", 8080], ["tcp", "169.254.169.254", 8080])
    assert tried.not_refused() == []
    names["rebind.test"] = ["169.254.169.254", OTHER, "10.9.9.9"]
    assert room.ask("lookup", "rebind.test").said == [OTHER]
    names["rebind.test"] = ["=inner.test"]
    names["inner.test"] = ["10.9.9.9"]
    assert room.ask("tcp", "rebind.test", 8080).refused


# Whoever is near.


@pytest.fixture(scope="module")
def host(scene: Scene) -> Generator[tuple[str, ...]]:
    """The host's addresses; on all of them something listens that must never be reached."""

    def set_up() -> tuple[socket.socket, tuple[str, ...]]:
        with contextlib.closing(Netlink()) as netlink:
            added = [ipaddress.ip_interface(text) for text in (PUBLIC_HOST, PUBLIC_HOST6)]
            netlink.configure(socket.if_nametoindex("lo"), added)
            found = {address for _, address in netlink.addresses() if not address.is_link_local}
        made = socket.create_server(("::", HOST_PORT), family=socket.AF_INET6, dualstack_ipv6=True)
        made.setblocking(False)
        return made, tuple(map(str, found))

    listener, addresses = namespaces.run_in(scene.internet.world, set_up)
    with listener:
        eventually(lambda: PUBLIC_HOST in scene.rules())  # the gateway was told of the new address
        yield addresses
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_the_host_cannot_be_reached_by_any_of_its_addresses(
    room: Room, host: tuple[str, ...]
) -> None:
    assert len(host) > 6
    room.scene.internet.names["host.test"] = [PUBLIC_HOST, PUBLIC_HOST6]
    for words in (
        ["open"],
        EVERYTHING,
        [PUBLIC_HOST, PUBLIC_HOST6, "host.test"],
        ["strict", *EVERYTHING],
    ):
        room.allow(*words)
        room.scene.tap.take()
        tries = [*tcp(host, HOST_PORT), ["tcp", "host.test", HOST_PORT], ["udp", PUBLIC_HOST, 53]]
        assert room.attempt(*tries).not_refused() == [], words
        assert room.scene.tap.take() == []


def test_the_router_the_uplink_and_the_gateway_cannot_be_reached(room: Room) -> None:
    listen = int(room.scene.place.environ["K8E_LISTEN"].rpartition(":")[2])
    routers = [str(address) for address in room.slot.routers]
    near = [*routers, DNS_ADDRESS, "198.18.0.1", "198.19.0.1", "198.19.0.2", "fd6b:3865:0:2::1"]
    near += [text.partition("/")[0] for text in (HOST, HOST6, FAR, FAR6)]
    own = [str(address) for address in _machine() if not address.is_loopback]
    room.allow("open")
    room.scene.tap.take()
    tries = [["tcp", address, port] for address in near for port in (22, 443, 17380, listen)]
    tried = room.attempt(*tries, *tcp((*own, "127.0.0.1", "::1"), listen))
    assert tried.not_refused() == []
    # Packets of this wire alone are not answered at all; nobody uses these addresses.
    unanswered = room.attempt(*tcp(_neighbours(room)), *tcp(_neighbours(room), 53), at_once=True)
    assert [outcome.said for outcome in unanswered.outcomes] == [None, None]
    assert room.scene.tap.take() == []


def _neighbours(room: Room) -> tuple[str, ...]:
    """The router's addresses that hold on this one wire only."""

    def inside() -> tuple[str, ...]:
        index = socket.if_nametoindex(room.slot.interface)
        with contextlib.closing(Netlink()) as netlink:
            found = [address for at, address in netlink.addresses() if at == index]
        return tuple(f"{address}%eth0" for address in found if address.is_link_local)

    return namespaces.run_in(room.scene.router, inside)


def _machine() -> list[Any]:
    """The addresses of the machine that the gateway really runs on."""
    with contextlib.closing(Netlink()) as netlink:
        found = {address for _, address in netlink.addresses()}
    return [address for address in found if not address.is_link_local]


def test_a_sibling_cannot_be_reached(room: Room, scene: Scene, runtime: str) -> None:
    sibling = Room(scene, runtime)
    try:
        addresses = [str(sibling.slot.address4), str(sibling.slot.address6)]
        assert sibling.ask("address").said == addresses
        with sibling.start("listen", 8080) as program:
            for words in (["open"], EVERYTHING, ["sibling.test"]):
                scene.internet.names["sibling.test"] = addresses
                room.allow(*words)
                tries = [[kind, to, 8080] for kind in ("tcp", "udp") for to in addresses]
                assert room.attempt(*tries, ["tcp", "sibling.test", 8080]).not_refused() == []
            assert sibling.ask("tcp", addresses[0], 8080).said == "sibling", "it listens"
            assert program.line().endswith(addresses[0]), "nobody was there before"
    finally:
        sibling.close()


# Whoever pretends to be somebody else.


def test_a_foreign_source_address_gets_nothing_out(room: Room) -> None:
    """Not even the refusal, which would carry the packet to whoever it names as its source."""
    for words in ([], ["open"]):
        room.allow(*words)
        room.scene.tap.take()
        for source in ("198.18.0.2", "198.18.77.2", OTHER, "fd6b:3865:0:1::77", "2606:4700::77"):
            target = WEB6 if ":" in source else WEB
            room.ask("disguised", source, target, 443)
            assert room.scene.tap.take() == [], source


def test_a_foreign_source_address_does_not_speak_to_a_sibling(room: Room, scene: Scene) -> None:
    """The refusal would reach whoever the packet names as its source."""
    sibling = Room(scene, room.runtime)
    try:
        with sibling.start("overhear", 5555, WEB6, 443) as program:
            for _ in range(3):
                room.ask("disguised", str(sibling.slot.address6), WEB6, 443, 5555)
            assert program.outcome().error == "TimeoutError"
    finally:
        sibling.close()


@pytest.mark.parametrize("words", [[], ["open"]])
def test_frames_from_a_sandbox_that_was_broken_out_of_get_nothing_out(
    room: Room, words: list[str]
) -> None:
    """Even whoever owns the sandbox's wire can use its own addresses only."""
    room.allow(*words)
    wire = _Wire(room)
    room.scene.tap.take()
    for source in ("198.18.77.2", OTHER, RESOLVER, str(room.slot.routers[0]), "127.0.0.1"):
        wire.send(source, WEB)
        assert room.scene.tap.take() == [], source
    for source in ("fd6b:3865:0:1::77", "2606:4700::77", str(room.slot.routers[1])):
        wire.send(source, WEB6)
        assert room.scene.tap.take() == [], source
    wire.send(str(room.slot.address4), WEB)
    wire.send(str(room.slot.address6), WEB6)
    expected = {f"udp {WEB} 443", f"udp {WEB6} 443"} if words else set[str]()
    assert {text for text in room.scene.tap.take() if text.startswith("udp")} == expected


class _Wire:
    """The sandbox's own end of its wire, for frames that no kernel would send."""

    def __init__(self, room: Room) -> None:
        self._namespace = room.scene.net / "slots" / str(room.slot.number)

        def inside() -> bytes:
            with contextlib.closing(Netlink()) as netlink:
                return {link.name: link.hardware for link in netlink.links()}[room.slot.interface]

        self._router = namespaces.run_in(room.scene.router, inside)

    def send(self, source: str, target: str) -> None:
        """A datagram and the first packet of a connection."""
        for protocol, body in ((17, b"\0\x0e\0\0secret"), (6, SYN)):
            packet = _packet(source, target, protocol, b"\x9c\x40\x01\xbb" + body)
            kind = b"\x86\xdd" if ":" in source else b"\x08\x00"
            frame = self._router + b"\x02k8e\0\1" + kind + packet
            namespaces.run_in(self._namespace, functools.partial(_transmit, frame))


def _transmit(frame: bytes) -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as raw:
        raw.bind(("eth0", 0))
        raw.send(frame)


def _packet(source: str, target: str, protocol: int, body: bytes) -> bytes:
    """An IP packet with all of its sums; the body's own is where UDP or TCP have it."""
    ends = ipaddress.ip_address(source).packed + ipaddress.ip_address(target).packed
    size = len(body)
    checked = _sum(ends + bytes([0, protocol]) + size.to_bytes(2, "big") + body)
    at = 6 if protocol == 17 else 16
    body = body[:at] + checked + body[at + 2 :]
    if ":" in source:
        return b"\x60\0\0\0" + size.to_bytes(2, "big") + bytes([protocol, 64]) + ends + body
    head = b"\x45\0" + (20 + size).to_bytes(2, "big") + b"\0\1\0\0\x40" + bytes([protocol])
    return head + _sum(head + ends) + ends + body


def _sum(data: bytes) -> bytes:
    data += b"\0" * (len(data) % 2)
    total = sum(int.from_bytes(data[at : at + 2], "big") for at in range(0, len(data), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return (~total & 0xFFFF).to_bytes(2, "big")
