"""Elements of nftables' sets, changed by nfnetlink: one transaction, a tenth of a millisecond.

libnftables would read whole sets back before it adds to one with intervals. It makes the rules;
what changes with every session and every DNS answer goes this way.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from k8e.egress.netlink import NLM_F_ACK, NLM_F_CREATE, NLM_F_REQUEST, NLMSG_ERROR, attribute
from k8e.egress.nftables import NftFailed
from k8e.egress.policy import Address, Network

NETLINK_NETFILTER = 12
NFPROTO_INET = 1
_NFTABLES = 10  # the subsystem
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NEW, _DELETE = _NFTABLES << 8 | 12, _NFTABLES << 8 | 14
_LIST_TABLE, _LIST_SET, _LIST_ELEMENTS, _LIST_ELEMENT = 1, 2, 3, 1
_KEY, _DATA, _TIMEOUT, _KEY_END, _VALUE = 1, 2, 4, 10, 1
_NESTED = 0x8000
_HEADER = struct.Struct("=IHHII")
_IFNAMSIZ = 16
_BUFFER = 1 << 16
SECONDS = 5.0


@dataclass(frozen=True)
class Element:
    """One element: a key, or a range of keys, of a set; with data, of a map."""

    name: str
    """Of the set."""
    key: bytes
    key_end: bytes = b""
    data: bytes = b""
    seconds: int = 0
    """After which the kernel drops it; 0 means never."""


class Change(NamedTuple):
    """An element to add or delete; without one, the whole set is emptied."""

    verb: str
    name: str
    element: Element | None = None


def add(element: Element) -> Change:
    return Change("add", element.name, element)


def delete(element: Element) -> Change:
    return Change("delete", element.name, element)


def flush(name: str) -> Change:
    return Change("delete", name)


# The parts of keys; each takes a multiple of four bytes.


def of_interface(name: str) -> bytes:
    return name.encode().ljust(_IFNAMSIZ, b"\0")


def of_mark(mark: int) -> bytes:
    return struct.pack("=I", mark)


def of_port(port: int) -> bytes:
    return struct.pack("!Hxx", port)


def of_address(address: Address) -> bytes:
    return address.packed


def of_network(network: Network) -> tuple[bytes, bytes]:
    """The first and the last address."""
    return network.network_address.packed, network.broadcast_address.packed


class Elements:
    """Changes sets of one table, in the network namespace of the thread that made it."""

    def __init__(self, table: str) -> None:
        self._table = attribute(_LIST_TABLE, table.encode() + b"\0")
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
        self._socket.bind((0, 0))
        self._socket.settimeout(SECONDS)
        self._number = 0

    def close(self) -> None:
        self._socket.close()

    def change(self, changes: Sequence[Change]) -> None:
        """Make all of these changes or none."""
        if not changes:
            return
        first = self._number + 1
        batch = self._message(_BATCH_BEGIN, NLM_F_REQUEST, _NFTABLES)
        for position, item in enumerate(changes, 1):
            flags = NLM_F_REQUEST | (NLM_F_CREATE if item.verb == "add" else 0)
            flags |= NLM_F_ACK if position == len(changes) else 0
            kind = _NEW if item.verb == "add" else _DELETE
            batch += self._message(kind, flags, 0, self._table + _body(item))
        last = self._number
        batch += self._message(_BATCH_END, NLM_F_REQUEST, _NFTABLES)
        self._socket.send(batch)
        failed = self._outcome(first, last)
        if failed:
            at, number = failed
            what = changes[max(0, at - first - 1)]
            raise NftFailed(
                f"nftables refused to {what.verb} an element of {what.name}: {os.strerror(number)}"
            )

    def _message(self, kind: int, flags: int, resource: int, body: bytes = b"") -> bytes:
        self._number += 1
        family = NFPROTO_INET if body else socket.AF_UNSPEC
        body = struct.pack("!BBH", family, 0, resource) + body
        return _HEADER.pack(_HEADER.size + len(body), kind, flags, self._number, 0) + body

    def _outcome(self, first: int, last: int) -> tuple[int, int] | None:
        """Wait for the kernel's word on the batch: which message failed, and why."""
        failed: tuple[int, int] | None = None
        while True:
            answer = self._socket.recv(_BUFFER)
            while len(answer) >= _HEADER.size:
                length, kind, _, number, _ = _HEADER.unpack_from(answer)
                if kind == NLMSG_ERROR and first <= number <= last:
                    error = -struct.unpack_from("=i", answer, _HEADER.size)[0]
                    if error and failed is None:
                        failed = number, error
                    if number in (first, last):  # the first stands for the batch as a whole
                        return failed
                answer = answer[length + (-length % 4) :]


def _body(change: Change) -> bytes:
    name = attribute(_LIST_SET, change.name.encode() + b"\0")
    item = change.element
    if item is None:
        return name
    parts = _nested(_KEY, attribute(_VALUE, item.key))
    if item.key_end:
        parts += _nested(_KEY_END, attribute(_VALUE, item.key_end))
    if item.data and change.verb == "add":
        parts += _nested(_DATA, attribute(_VALUE, item.data))
    if item.seconds and change.verb == "add":
        parts += attribute(_TIMEOUT, struct.pack("!Q", item.seconds * 1000))
    return name + _nested(_LIST_ELEMENTS, _nested(_LIST_ELEMENT, parts))


def _nested(kind: int, body: bytes) -> bytes:
    return attribute(kind | _NESTED, body)


def renewed(elements: Iterable[Element]) -> list[Change]:
    """Add elements whose time begins anew if they are there already."""
    # The kernel refuses a changed time-out of an existing element, so it is made anew.
    return [change for item in elements for change in (add(item), delete(item), add(item))]
