"""Links, addresses and routes by rtnetlink, without a subprocess: a network slot takes 5 ms.

A :class:`Netlink` belongs to the network namespace of the thread that opened it.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import secrets
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from k8e.egress.policy import Address, Network

NLM_F_REQUEST, NLM_F_ACK, NLM_F_EXCL, NLM_F_CREATE = 0x1, 0x4, 0x200, 0x400
NLM_F_REPLACE = 0x100
NLMSG_ERROR = 2
RTM_NEWLINK, RTM_DELLINK, RTM_NEWADDR, RTM_NEWROUTE, RTM_NEWNEIGH = 16, 17, 20, 24, 28
IFLA_ADDRESS, IFLA_IFNAME, IFLA_MTU, IFLA_LINKINFO, IFLA_NET_NS_FD = 1, 3, 4, 18, 28
IFLA_INFO_KIND, IFLA_INFO_DATA, VETH_INFO_PEER = 1, 2, 1
IFA_ADDRESS, IFA_LOCAL, IFA_FLAGS = 1, 2, 8
IFA_F_NODAD = 0x02
RTA_DST, RTA_OIF, RTA_GATEWAY, RTA_PRIORITY, RTA_VIA = 1, 4, 5, 6, 18
RTM_NEWRULE = 32
FRA_PRIORITY, FRA_FWMARK, FRA_FWMASK, FR_ACT_TO_TBL = 6, 10, 16, 1
RT_TABLE_DEFAULT, RT_TABLE_MAIN, RT_TABLE_LOCAL, RTPROT_STATIC = 253, 254, 255, 4
RT_SCOPE_UNIVERSE, RT_SCOPE_LINK, RT_SCOPE_HOST = 0, 253, 254
RTN_UNICAST, RTN_LOCAL, RTN_BLACKHOLE = 1, 2, 6
IFF_UP, IFF_LOOPBACK, IFF_POINTOPOINT, IFF_NOARP = 0x1, 0x8, 0x10, 0x80
NDA_DST, NDA_LLADDR, NUD_PERMANENT = 1, 2, 0x80
_HEADER = struct.Struct("=IHHII")
_LINK = struct.Struct("=BxHiII")
_ADDR = struct.Struct("=BBBBI")
_ROUTE = struct.Struct("=BBBBBBBBI")
_NEIGHBOUR = struct.Struct("=BxxxiHBB")
ANSWER_SIZE = 65536
EVERYWHERE: tuple[Network, Network] = (
    ipaddress.ip_network("0.0.0.0/0"),
    ipaddress.ip_network("::/0"),
)


def attribute(kind: int, value: bytes) -> bytes:
    length = 4 + len(value)
    return struct.pack("=HH", length, kind) + value + b"\0" * (-length % 4)


def _text(kind: int, value: str) -> bytes:
    return attribute(kind, value.encode() + b"\0")


class Route(NamedTuple):
    """A route to a network: through a gateway, or directly to the hosts on the link."""

    network: Network
    gateway: Address | None = None
    table: int = RT_TABLE_MAIN
    kind: int = RTN_UNICAST
    priority: int = 0
    """Of routes to the same network, the kernel takes the one with the smallest number."""


def _link_body(index: int = 0, flags: int = 0) -> bytes:
    return _LINK.pack(socket.AF_UNSPEC, 0, index, flags, flags)


def veth_body(
    index: int,
    name: str,
    peer: str,
    peer_namespace: int,
    *,
    mtu: int = 0,
    hardware: tuple[bytes, bytes] | None = None,
) -> bytes:
    """A veth pair: ``name`` here and ``peer`` in the namespace of a descriptor."""
    here = _link_body(index) + _text(IFLA_IFNAME, name)
    there = _link_body() + _text(IFLA_IFNAME, peer)
    there += attribute(IFLA_NET_NS_FD, struct.pack("=I", peer_namespace))
    if mtu:
        there += attribute(IFLA_MTU, struct.pack("=I", mtu))
    if hardware:
        here += attribute(IFLA_ADDRESS, hardware[0])
        there += attribute(IFLA_ADDRESS, hardware[1])
    data = attribute(IFLA_INFO_DATA, attribute(VETH_INFO_PEER, there))
    return here + attribute(IFLA_LINKINFO, _text(IFLA_INFO_KIND, "veth") + data)


def address_body(index: int, address: Address, prefix: int) -> bytes:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    body = _ADDR.pack(family, prefix, 0, RT_SCOPE_UNIVERSE, index)
    body += attribute(IFA_LOCAL, address.packed) + attribute(IFA_ADDRESS, address.packed)
    if address.version == 6:  # waiting for duplicates would take a second, and there can be none
        body += attribute(IFA_FLAGS, struct.pack("=I", IFA_F_NODAD))
    return body


def route_body(route: Route, index: int = 0) -> bytes:
    """``index`` is the link's; a route that drops everything needs none."""
    network, gateway = route.network, route.gateway
    family = socket.AF_INET if network.version == 4 else socket.AF_INET6
    scope = RT_SCOPE_UNIVERSE
    if network.version == 4 and gateway is None and route.kind != RTN_BLACKHOLE:
        scope = RT_SCOPE_HOST if route.kind == RTN_LOCAL else RT_SCOPE_LINK
    fixed = (family, network.prefixlen, 0, 0, route.table, RTPROT_STATIC, scope, route.kind, 0)
    body = _ROUTE.pack(*fixed)
    if network.prefixlen:
        body += attribute(RTA_DST, network.network_address.packed)
    if gateway is not None:
        body += attribute(RTA_GATEWAY, gateway.packed)
    if route.priority:
        body += attribute(RTA_PRIORITY, struct.pack("=I", route.priority))
    return body + (attribute(RTA_OIF, struct.pack("=I", index)) if index else b"")


def neighbour_body(index: int, address: Address, hardware: bytes) -> bytes:
    """A permanent neighbour: the kernel never asks for it, and no limit counts it."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    body = _NEIGHBOUR.pack(family, index, NUD_PERMANENT, 0, 0)
    return body + attribute(NDA_DST, address.packed) + attribute(NDA_LLADDR, hardware)


def mark_rule_body(family: int, mark: int, table: int, priority: int) -> bytes:
    """A rule that sends packets with a mark to a small routing table."""
    # The header of a rule is laid out as a route's; its type is the action.
    body = _ROUTE.pack(family, 0, 0, 0, table, 0, 0, FR_ACT_TO_TBL, 0)
    for kind, value in (
        (FRA_PRIORITY, priority),
        (FRA_FWMARK, mark),
        (FRA_FWMASK, 0xFFFFFFFF),
    ):
        body += attribute(kind, struct.pack("=I", value))
    return body


class Netlink:
    """A connection to the routing subsystem of one network namespace."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._socket.bind((0, 0))
        self._socket.settimeout(5)
        self._number = 0

    def close(self) -> None:
        self._socket.close()

    def add_veth(
        self,
        name: str,
        peer: str,
        peer_namespace: int,
        *,
        mtu: int = 0,
        hardware: tuple[bytes, bytes] | None = None,
    ) -> int:
        """Make a veth pair and return the index of the end that is here.

        ``hardware`` has the addresses of both ends; the kernel chooses where there are none.

        Where both ends have the same index, each in its namespace, the kernel takes up to a second
        to see that they are connected, and IPv6 waits for that. So ours is out of the way.
        """
        index = (1 << 16) + secrets.randbelow(1 << 29)
        body = veth_body(index, name, peer, peer_namespace, mtu=mtu, hardware=hardware)
        self._do([(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, body)])
        return index

    def configure(
        self,
        index: int,
        addresses: Iterable[ipaddress.IPv4Interface | ipaddress.IPv6Interface],
        routes: Iterable[Route] = (),
        neighbours: Iterable[tuple[Address, bytes]] = (),
        *,
        mute: bool = False,
    ) -> None:
        """Bring a link up with its addresses, neighbours and routes, in one batch. Works twice.

        A ``mute`` link neither asks for the hardware addresses of neighbours nor tells its own.
        """
        flags = NLM_F_CREATE | NLM_F_REPLACE
        messages = [(RTM_NEWLINK, 0, _link_body(index, IFF_UP | (IFF_NOARP if mute else 0)))]
        bodies = [
            *((RTM_NEWADDR, address_body(index, it.ip, it.network.prefixlen)) for it in addresses),
            *((RTM_NEWNEIGH, neighbour_body(index, *neighbour)) for neighbour in neighbours),
            *((RTM_NEWROUTE, route_body(route, index)) for route in routes),
        ]
        self._do(messages + [(kind, flags, body) for kind, body in bodies])

    def add_blackholes(self, networks: Iterable[Network]) -> None:
        """Drop packets to networks, unless there is a more specific route. Works twice."""
        holes = [Route(network, kind=RTN_BLACKHOLE) for network in networks]
        flags = NLM_F_CREATE | NLM_F_REPLACE
        self._do([(RTM_NEWROUTE, flags, route_body(hole)) for hole in holes])

    def delete_link(self, name: str) -> None:
        """Remove a link (and its peer); nothing happens if there is none."""
        try:
            self._do([(RTM_DELLINK, 0, _link_body() + _text(IFLA_IFNAME, name))])
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise

    def add_local_default(self, network: Network, table: int) -> None:
        """Make every address local for packets that are routed by ``table``. Works twice."""
        body = route_body(Route(network, None, table, RTN_LOCAL), socket.if_nametoindex("lo"))
        self._do([(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_REPLACE, body)])

    def add_mark_rule(self, family: int, mark: int, table: int, *, priority: int) -> None:
        """Route packets that carry ``mark`` by ``table``. Works twice."""
        body = mark_rule_body(family, mark, table, priority)
        try:
            self._do([(RTM_NEWRULE, NLM_F_CREATE | NLM_F_EXCL, body)])
        except OSError as error:
            if error.errno != errno.EEXIST:
                raise

    def _do(self, messages: list[tuple[int, int, bytes]]) -> None:
        """Send all messages at once; raises for the first that the kernel refuses."""
        first = self._number + 1
        batch = b""
        for kind, flags, body in messages:
            self._number += 1
            length = _HEADER.size + len(body)
            flags |= NLM_F_REQUEST | NLM_F_ACK
            batch += _HEADER.pack(length, kind, flags, self._number, 0) + body
            batch += b"\0" * (-len(batch) % 4)
        self._socket.send(batch)
        waiting = set(range(first, self._number + 1))
        failed = 0
        while waiting:
            answer = self._socket.recv(ANSWER_SIZE)
            while answer:
                length, kind, _, number, _ = _HEADER.unpack_from(answer)
                if kind == NLMSG_ERROR and number in waiting:
                    waiting.discard(number)
                    failed = failed or -struct.unpack_from("=i", answer, _HEADER.size)[0]
                answer = answer[length + (-length % 4) :]
        if failed:
            raise OSError(failed, os.strerror(failed))

    # Reading, and what an uplink needs besides.

    def dump(self, kind: int, body: bytes) -> list[bytes]:
        """Everything of one kind that the kernel has, as message bodies."""
        return dump(self._socket, kind, body)

    def links(self) -> list[NetworkLink]:
        """All links of this namespace."""
        return [_link(body) for body in self.dump(RTM_GETLINK, _link_body())]

    def link(self, index: int) -> NetworkLink:
        """One link as it really is: :meth:`links` may include changes that are still to come."""
        return _link(self._get(RTM_GETLINK, _link_body(index)))

    def is_local(self, address: Address) -> bool:
        """Whether packets to an address arrive here; for IPv6 that is a moment after adding it."""
        family, bits = (socket.AF_INET, 32) if address.version == 4 else (socket.AF_INET6, 128)
        body = _ROUTE.pack(family, bits, *[0] * 7) + attribute(RTA_DST, address.packed)
        try:
            return self._get(RTM_GETROUTE, body)[7] == RTN_LOCAL  # the type of the route
        except OSError:
            return False

    def _get(self, kind: int, body: bytes) -> bytes:
        """The kernel's one answer to a request, as a body."""
        header = _HEADER.pack(_HEADER.size + len(body), kind, NLM_F_REQUEST, 0, 0)
        self._socket.send(header + body)
        kind, _, answer = next(messages(self._socket.recv(ANSWER_SIZE)))
        if kind == NLMSG_ERROR:
            number = -struct.unpack_from("=i", answer)[0]
            raise OSError(number, os.strerror(number))
        return answer

    def addresses(self) -> list[tuple[int, Address]]:
        """All addresses of this namespace, each with the index of its link."""
        found: list[tuple[int, Address]] = []
        for body in self.dump(RTM_GETADDR, _ADDR.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
            values = attributes(body[_ADDR.size :])
            # Of a point-to-point link, IFA_ADDRESS is the other end's.
            packed = values.get(IFA_LOCAL) or values.get(IFA_ADDRESS)
            if packed:
                found.append((_ADDR.unpack_from(body)[4], ipaddress.ip_address(packed)))
        return found

    def neighbours(self) -> list[Address]:
        """All neighbours that the kernel remembers here, known or asked for."""
        found: list[Address] = []
        for family in (socket.AF_INET, socket.AF_INET6):
            for body in self.dump(RTM_GETNEIGH, _NEIGHBOUR.pack(family, 0, 0, 0, 0)):
                packed = attributes(body[_NEIGHBOUR.size :]).get(NDA_DST, b"")
                found += [ipaddress.ip_address(packed)] if packed else []
        return found

    def default_links(self) -> set[int]:
        """The indexes of the links by which default routes go, whatever their table."""
        found: set[int] = set()
        for family in (socket.AF_INET, socket.AF_INET6):
            for body in self.dump(RTM_GETROUTE, _ROUTE.pack(family, *[0] * 8)):
                if body[1] == 0 and body[7] == RTN_UNICAST:  # the prefix's length, the type
                    found |= _route_links(attributes(body[_ROUTE.size :]))
        return found

    def near_networks(self) -> list[Network]:
        """The networks on links whose hosts the kernel remembers one by one."""
        links = {link.index for link in self.links() if link.resolves}
        found: set[Network] = set()
        for family, bits in ((socket.AF_INET, 32), (socket.AF_INET6, 128)):
            for body in self.dump(RTM_GETROUTE, _ROUTE.pack(family, *[0] * 8)):
                values, length = attributes(body[_ROUTE.size :]), body[1]
                direct = RTA_GATEWAY not in values and RTA_VIA not in values
                if body[7] == RTN_UNICAST and direct and _route_links(values) & links:
                    packed = values.get(RTA_DST, bytes(bits // 8))
                    network = ipaddress.ip_network((packed, length))
                    if 0 < length < bits and not network.is_link_local:
                        found.add(network)
        return sorted(found, key=lambda network: (network.version, network))

    def set_hardware_address(self, index: int, address: bytes) -> None:
        self._do([(RTM_NEWLINK, 0, _link_body(index) + attribute(IFLA_ADDRESS, address))])


NLM_F_DUMP, NLM_F_DUMP_INTR, NLMSG_DONE = 0x300, 0x10, 3
RTM_GETLINK, RTM_GETADDR, RTM_GETROUTE, RTM_GETNEIGH = 18, 22, 26, 30
IFLA_LINK, RTA_MULTIPATH, IFF_RUNNING = 5, 9, 0x40
_DUMPS = 5  # times that something is read again because it changed meanwhile


@dataclass(frozen=True)
class NetworkLink:
    """A network interface."""

    index: int
    name: str
    running: bool
    """Whether packets can be sent: up, connected, and seen to be so."""
    resolves: bool
    """Whether the kernel asks for neighbours there, and remembers each of them."""
    kind: str
    """``veth``, ``bridge`` and the like; empty for hardware."""
    peer: int
    """The index of a veth's other end, in its own namespace."""
    hardware: bytes


def _link(body: bytes) -> NetworkLink:
    _, _, index, flags, _ = _LINK.unpack_from(body)
    values = attributes(body[_LINK.size :])
    info = attributes(values.get(IFLA_LINKINFO, b""))
    return NetworkLink(
        index=index,
        name=values[IFLA_IFNAME].rstrip(b"\0").decode(errors="surrogateescape"),
        running=bool(flags & IFF_RUNNING),
        resolves=not flags & (IFF_NOARP | IFF_LOOPBACK | IFF_POINTOPOINT),
        kind=info.get(IFLA_INFO_KIND, b"").rstrip(b"\0").decode(),
        peer=struct.unpack("=I", values.get(IFLA_LINK, bytes(4)))[0],
        hardware=values.get(IFLA_ADDRESS, b""),
    )


def _route_links(values: dict[int, bytes]) -> set[int]:
    """The links of a route, which may have several."""
    found = {struct.unpack("=I", values[RTA_OIF])[0]} if RTA_OIF in values else set[int]()
    hops = values.get(RTA_MULTIPATH, b"")
    while len(hops) >= 8:
        length, _, _, index = struct.unpack_from("=HBBi", hops)
        found.add(index)
        hops = hops[max(length + (-length % 4), 8) :]
    return found


def pairs(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The attributes of a message, in order."""
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        if length < 4:
            return
        yield kind & 0x3FFF, data[4:length]  # two bits are flags
        data = data[length + (-length % 4) :]


def attributes(data: bytes) -> dict[int, bytes]:
    return dict(pairs(data))


def messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Kind, flags and body of each message in what was received."""
    while len(data) >= _HEADER.size:
        length, kind, flags, _, _ = _HEADER.unpack_from(data)
        if length < _HEADER.size:
            return
        yield kind, flags, data[_HEADER.size : length]
        data = data[length + (-length % 4) :]


def dump(connection: socket.socket, kind: int, body: bytes) -> list[bytes]:
    """Ask a netlink socket for everything of one kind; message bodies."""
    found: list[bytes] = []
    for _ in range(_DUMPS):
        header = _HEADER.pack(_HEADER.size + len(body), kind, NLM_F_REQUEST | NLM_F_DUMP, 0, 0)
        connection.send(header + body)
        found, whole = _dumped(connection)
        if whole:
            break
    return found


def _dumped(connection: socket.socket) -> tuple[list[bytes], bool]:
    """The answers to one request, and whether they are consistent."""
    found: list[bytes] = []
    whole = True
    while True:
        for kind, flags, body in messages(connection.recv(ANSWER_SIZE)):
            if kind in (NLMSG_ERROR, NLMSG_DONE):
                number = -struct.unpack_from("=i", body)[0]
                if number > 0:
                    raise OSError(number, os.strerror(number))
                return found, whole
            whole = whole and not flags & NLM_F_DUMP_INTR
            found.append(body)
