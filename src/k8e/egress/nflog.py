"""Packets that the kernel refused, from its log (NFLOG): parsed without trust, without waiting."""

from __future__ import annotations

import errno
import ipaddress
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

from k8e.egress import rules
from k8e.egress.policy import Address

NETLINK_NETFILTER = 12
_ULOG = 4 << 8  # the subsystem
_PACKET, _CONFIG = _ULOG, _ULOG | 1
_CFG_CMD, _CFG_MODE = 1, 2
_CMD_BIND, _COPY_PACKET = 1, 2
_INDEV, _PAYLOAD, _PREFIX = 4, 9, 10
_REQUEST_ACK = 0x5
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_BUFFER = 1 << 20
_MOST_READS = 4096
PROTOCOLS = {1: "icmp", 6: "tcp", 17: "udp", 58: "icmp"}
_MAX_EXTENSIONS = 8  # headers between IPv6 and what it carries


@dataclass(frozen=True)
class Packet:
    """A refused packet, and the interface at which it arrived."""

    index: int
    address: Address
    protocol: str
    port: int
    payload: bytes = b""
    """The beginning of what a UDP packet carries."""
    many: bool = False
    """Whether it was one too many, and otherwise fine."""
    crowded: bool = False
    """Whether that is because of all sandboxes together."""


class PacketLog:
    """The router's log of refused packets. ``make_socket`` makes a socket of its namespace."""

    def __init__(self, make_socket: Callable[[int, int, int], socket.socket]) -> None:
        self._socket = make_socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        self._socket.bind((0, 0))
        self._socket.settimeout(5)
        self._configure(_CFG_CMD, struct.pack("=B", _CMD_BIND))
        self._configure(_CFG_MODE, struct.pack("!IBB", rules.LOG_BYTES, _COPY_PACKET, 0))
        self._socket.setblocking(False)
        # It is read when a run ends, and nearly always there is nothing: to find that out by a
        # read, with its buffer and its exception, would take several times as long.
        self._news = select.poll()
        self._news.register(self._socket, select.POLLIN)

    def _configure(self, kind: int, value: bytes) -> None:
        length = _ATTRIBUTE.size + len(value)
        body = struct.pack("!BBH", socket.AF_UNSPEC, 0, rules.LOG_GROUP)
        body += _ATTRIBUTE.pack(length, kind) + value + b"\0" * (-length % 4)
        self._socket.send(_HEADER.pack(16 + len(body), _CONFIG, _REQUEST_ACK, 0, 0) + body)
        answer = self._socket.recv(_BUFFER)
        number = -struct.unpack_from("=i", answer, _HEADER.size)[0]
        if number:
            raise OSError(number, "the kernel's log of refused packets cannot be had")

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> list[Packet]:
        """All packets that were refused until now; returns at once."""
        found: list[Packet] = []
        if not self._news.poll(0):
            return found
        for _ in range(_MOST_READS):  # what is refused meanwhile is for the next time
            try:
                found += parse(self._socket.recv(_BUFFER))
            except OSError as error:
                if error.errno != errno.ENOBUFS:  # some were lost; the rest is worth knowing
                    break
        return found

    def close(self) -> None:
        self._socket.close()


def parse(data: bytes) -> list[Packet]:
    """The packets in a message of the kernel."""
    found: list[Packet] = []
    while len(data) >= _HEADER.size:
        length, kind, _, _, _ = _HEADER.unpack_from(data)
        if length < _HEADER.size:
            break
        if kind == _PACKET:
            values = _attributes(data[_HEADER.size + 4 : length])
            index = struct.unpack("!I", values.get(_INDEV, b"\0\0\0\0"))[0]
            packet = parse_packet(index, values.get(_PAYLOAD, b""))
            if packet is not None:
                why = values.get(_PREFIX, b"").rstrip(b"\0").decode("ascii", "replace")
                many, crowded = why == rules.TOO_MANY, why == rules.CROWDED
                found.append(replace(packet, many=many, crowded=crowded))
        data = data[length + (-length % 4) :]
    return found


def _attributes(data: bytes) -> dict[int, bytes]:
    values: dict[int, bytes] = {}
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        if length < _ATTRIBUTE.size:
            break
        values[kind & 0x3FFF] = data[_ATTRIBUTE.size : length]
        data = data[length + (-length % 4) :]
    return values


def parse_packet(index: int, data: bytes) -> Packet | None:
    """The destination of an IP packet; None if it is malformed."""
    version = data[0] >> 4 if data else 0
    if version == 4 and len(data) >= 20:
        number, at = data[9], (data[0] & 0xF) * 4
        address: Address = ipaddress.IPv4Address(data[16:20])
    elif version == 6 and len(data) >= 40:
        number, at = _skip_extensions(data)
        address = ipaddress.IPv6Address(data[24:40])
    else:
        return None
    protocol = PROTOCOLS.get(number, str(number))
    port = 0
    if protocol in ("tcp", "udp") and len(data) >= at + 4:
        port = struct.unpack_from("!H", data, at + 2)[0]
    payload = data[at + 8 :] if protocol == "udp" else b""
    return Packet(index, address, protocol, port, payload)


def _skip_extensions(data: bytes) -> tuple[int, int]:
    number, at = data[6], 40
    for _ in range(_MAX_EXTENSIONS):
        if number not in (0, 43, 60) or len(data) < at + 2:
            break
        number, at = data[at], at + (data[at + 1] + 1) * 8
    return number, at
