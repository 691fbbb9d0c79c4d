"""Links, addresses and routes by rtnetlink, without a subprocess: a network slot takes 5 ms.

A :class:`Netlink` belongs to the network namespace of the thread that opened it.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable

from k8e.egress.policy import Address, Network

NLM_F_REQUEST, NLM_F_ACK, NLM_F_EXCL, NLM_F_CREATE = 0x1, 0x4, 0x200, 0x400
NLMSG_ERROR = 2
RTM_NEWLINK, RTM_DELLINK, RTM_NEWADDR, RTM_NEWROUTE = 16, 17, 20, 24
IFLA_ADDRESS, IFLA_IFNAME, IFLA_MTU, IFLA_LINKINFO, IFLA_NET_NS_FD = 1, 3, 4, 18, 28
IFLA_INFO_KIND, IFLA_INFO_DATA, VETH_INFO_PEER = 1, 2, 1
IFA_ADDRESS, IFA_LOCAL, IFA_FLAGS = 1, 2, 8
IFA_F_NODAD = 0x02
RTA_DST, RTA_OIF, RTA_GATEWAY = 1, 4, 5
RT_TABLE_MAIN, RTPROT_STATIC, RT_SCOPE_UNIVERSE, RT_SCOPE_LINK, RTN_UNICAST = 254, 4, 0, 253, 1
IFF_UP = 1
_HEADER = struct.Struct("=IHHII")
_LINK = struct.Struct("=BxHiII")
_ADDR = struct.Struct("=BBBBI")
_ROUTE = struct.Struct("=BBBBBBBBI")
ANSWER_SIZE = 65536


def _attribute(kind: int, value: bytes) -> bytes:
    length = 4 + len(value)
    return struct.pack("=HH", length, kind) + value + b"\0" * (-length % 4)


def _text(kind: int, value: str) -> bytes:
    return _attribute(kind, value.encode() + b"\0")


def _link_body(index: int = 0, *, up: bool = False) -> bytes:
    flag = IFF_UP if up else 0
    return _LINK.pack(socket.AF_UNSPEC, 0, index, flag, flag)


def veth_body(name: str, peer: str, peer_namespace: int, *, mtu: int = 0) -> bytes:
    """A veth pair: ``name`` here and ``peer`` in the namespace of a descriptor."""
    there = _link_body() + _text(IFLA_IFNAME, peer)
    there += _attribute(IFLA_NET_NS_FD, struct.pack("=I", peer_namespace))
    if mtu:
        there += _attribute(IFLA_MTU, struct.pack("=I", mtu))
    data = _attribute(IFLA_INFO_DATA, _attribute(VETH_INFO_PEER, there))
    info = _attribute(IFLA_LINKINFO, _text(IFLA_INFO_KIND, "veth") + data)
    return _link_body() + _text(IFLA_IFNAME, name) + info


def address_body(index: int, address: Address, prefix: int) -> bytes:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    body = _ADDR.pack(family, prefix, 0, RT_SCOPE_UNIVERSE, index)
    body += _attribute(IFA_LOCAL, address.packed) + _attribute(IFA_ADDRESS, address.packed)
    if address.version == 6:  # waiting for duplicates would take a second, and there is nobody
        body += _attribute(IFA_FLAGS, struct.pack("=I", IFA_F_NODAD))
    return body


def route_body(network: Network, index: int, gateway: Address | None) -> bytes:
    family = socket.AF_INET if network.version == 4 else socket.AF_INET6
    scope = RT_SCOPE_UNIVERSE if gateway is not None or network.version == 6 else RT_SCOPE_LINK
    fixed = (family, network.prefixlen, 0, 0, RT_TABLE_MAIN, RTPROT_STATIC, scope, RTN_UNICAST, 0)
    body = _ROUTE.pack(*fixed)
    if network.prefixlen:
        body += _attribute(RTA_DST, network.network_address.packed)
    if gateway is not None:
        body += _attribute(RTA_GATEWAY, gateway.packed)
    return body + _attribute(RTA_OIF, struct.pack("=I", index))


class Netlink:
    """A connection to the routing subsystem of one network namespace."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._socket.bind((0, 0))
        self._socket.settimeout(5)
        self._number = 0

    def close(self) -> None:
        self._socket.close()

    def add_veth(self, name: str, peer: str, peer_namespace: int, *, mtu: int = 0) -> int:
        """Make a veth pair and return the index of the end that is here."""
        self._do([(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, veth_body(name, peer, peer_namespace, mtu=mtu))])
        return socket.if_nametoindex(name)

    def configure(
        self,
        index: int,
        addresses: Iterable[ipaddress.IPv4Interface | ipaddress.IPv6Interface],
        routes: Iterable[tuple[Network, Address | None]] = (),
    ) -> None:
        """Bring a link up with its addresses and routes, in one batch."""
        messages = [(RTM_NEWLINK, 0, _link_body(index, up=True))]
        for item in addresses:
            body = address_body(index, item.ip, item.network.prefixlen)
            messages.append((RTM_NEWADDR, NLM_F_CREATE, body))
        for network, gateway in routes:
            messages.append((RTM_NEWROUTE, NLM_F_CREATE, route_body(network, index, gateway)))
        self._do(messages)

    def delete_link(self, name: str) -> None:
        """Remove a link (and its peer); nothing happens if there is none."""
        try:
            self._do([(RTM_DELLINK, 0, _link_body() + _text(IFLA_IFNAME, name))])
        except OSError as error:
            if error.errno != errno.ENODEV:
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
