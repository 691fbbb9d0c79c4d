"""libnftables by ctypes, and elements of sets by nfnetlink.

libnftables would read whole sets back before it adds to one. So it only makes the rules; elements,
which change with every session and every DNS answer, go by nfnetlink.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import os
import socket
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from k8e import errors
from k8e.egress import netlink
from k8e.egress.netlink import NLM_F_ACK, NLM_F_CREATE, NLM_F_REQUEST, NLMSG_ERROR, attribute
from k8e.egress.policy import Address

JSON, HANDLES = 1 << 4, 1 << 3  # output flags of libnftables


class NftFailed(errors.K8eError):
    """The kernel or libnftables refused a change; nothing of it was applied."""

    code = "nft_failed"


_ONE_AT_A_TIME = threading.Lock()
"""libnftables has one list of network devices for all contexts of a process: two threads that run
commands at once free it twice, and the process ends."""


class Nftables:
    """A context of libnftables. Not for use by two threads."""

    def __init__(self) -> None:
        name = ctypes.util.find_library("nftables") or "libnftables.so.1"
        try:
            self._lib = ctypes.CDLL(name)
        except OSError as error:
            raise errors.RuntimeUnusable(
                f"libnftables cannot be loaded: {error}", hint="run install.sh again"
            ) from None
        self._lib.nft_ctx_new.restype = ctypes.c_void_p
        for call in ("nft_ctx_get_output_buffer", "nft_ctx_get_error_buffer"):
            getattr(self._lib, call).restype = ctypes.c_char_p
        self._context = ctypes.c_void_p(self._lib.nft_ctx_new(0))
        self._lib.nft_ctx_buffer_output(self._context)
        self._lib.nft_ctx_buffer_error(self._context)

    def run(self, commands: str) -> str:
        """Run all of ``commands`` or nothing; return their output."""
        with _ONE_AT_A_TIME:
            status = self._lib.nft_run_cmd_from_buffer(self._context, commands.encode())
        output = self._lib.nft_ctx_get_output_buffer(self._context).decode()
        error = self._lib.nft_ctx_get_error_buffer(self._context).decode()
        if status:
            raise NftFailed(f"nftables refused a change: {' '.join(error.split())[:500]}")
        return output

    def run_json(self, command: str) -> str:
        """A listing as JSON, with handles."""
        self._lib.nft_ctx_output_set_flags(self._context, JSON | HANDLES)
        try:
            return self.run(command)
        finally:
            self._lib.nft_ctx_output_set_flags(self._context, 0)

    def close(self) -> None:
        self._lib.nft_ctx_free(self._context)


NETLINK_NETFILTER = 12
NFPROTO_INET = 1
_NFTABLES = 10  # the subsystem
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NEW, _GET, _DELETE = (_NFTABLES << 8 | number for number in (12, 13, 14))
_LIST_TABLE, _LIST_SET, _LIST_ELEMENTS, _LIST_ELEMENT = 1, 2, 3, 1
_KEY, _DATA, _TIMEOUT, _EXPIRATION, _KEY_END, _VALUE = 1, 2, 4, 5, 10, 1
_NESTED = 0x8000
_HEADER = struct.Struct("=IHHII")
_IFNAMSIZ = 16
_BUFFER = 1 << 16
SECONDS = 5.0
MAX_LIST = 48 * 1024  # bytes of elements in one message; an attribute's length has 16 bits
AT_ONCE = 128  # elements of one transaction, where they need not all change together
SEND_BUFFER = 1 << 20  # bytes of one transaction; the kernel takes no more than the socket may hold
_SOL_NETLINK, _CAP_ACK, _SO_SNDBUFFORCE = 270, 10, 32


class Element(NamedTuple):
    """One element: a key, or a range of keys, of a set; with data, of a map."""

    name: str
    """Of the set."""
    key: bytes
    key_end: bytes = b""
    data: bytes = b""
    seconds: int = 0
    """After which the kernel drops it; 0 means never."""


class ElementChange(NamedTuple):
    """An element to add or delete; without one, the whole set is emptied."""

    verb: str
    name: str
    element: Element | None = None


def add(element: Element) -> ElementChange:
    return ElementChange("add", element.name, element)


def delete(element: Element) -> ElementChange:
    return ElementChange("delete", element.name, element)


def flush(name: str) -> ElementChange:
    return ElementChange("delete", name)


# The parts of keys; each takes a multiple of four bytes.


def of_interface(name: str) -> bytes:
    return name.encode().ljust(_IFNAMSIZ, b"\0")


def of_mark(mark: int) -> bytes:
    return struct.pack("=I", mark)


def read_mark(key: bytes) -> int:
    """The mark at the beginning of a key."""
    return struct.unpack_from("=I", key)[0]


def of_port(port: int) -> bytes:
    return struct.pack("!Hxx", port)


def of_address(address: Address) -> bytes:
    return address.packed


class Elements:
    """Changes sets of one table, in the network namespace of the thread that made it."""

    def __init__(self, table: str) -> None:
        self._table = attribute(_LIST_TABLE, table.encode() + b"\0")
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
        self._socket.bind((0, 0))
        self._socket.settimeout(SECONDS)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        with contextlib.suppress(OSError):  # more than the system's limit, where we may
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, SEND_BUFFER)
        # Errors without the message that they are about, which may be larger than our buffer.
        self._socket.setsockopt(_SOL_NETLINK, _CAP_ACK, 1)
        self._number = 0

    def close(self) -> None:
        self._socket.close()

    def change(self, changes: Sequence[ElementChange]) -> None:
        """Make all of these changes or none; NftFailed says that it was none, and why."""
        if not changes:
            return
        first = self._number + 1
        batch = [self._message(_BATCH_BEGIN, NLM_F_REQUEST, _NFTABLES)]
        parts = list(_lists(changes))
        for position, (verb, name, body) in enumerate(parts, 1):
            flags = NLM_F_REQUEST | (NLM_F_CREATE if verb == "add" else 0)
            flags |= NLM_F_ACK if position == len(parts) else 0
            kind = _NEW if verb == "add" else _DELETE
            body = self._table + attribute(_LIST_SET, name.encode() + b"\0") + body
            batch.append(self._message(kind, flags, 0, body))
        last = self._number
        batch.append(self._message(_BATCH_END, NLM_F_REQUEST, _NFTABLES))
        try:
            self._socket.send(b"".join(batch))
            failed = self._outcome(first, last)
        except OSError as error:  # it is too large, or the kernel has no memory for it
            raise NftFailed(f"nftables was not given a change: {error}") from None
        if failed:
            at, number = failed
            verb, name, _ = parts[max(0, at - first - 1)]
            raise NftFailed(f"nftables refused to {verb} elements of {name}: {os.strerror(number)}")

    def listing(self, name: str) -> list[Element]:
        """What a set holds; ``seconds`` is what is left of an element's time."""
        body = struct.pack("!BBH", NFPROTO_INET, 0, 0) + self._table
        body += attribute(_LIST_SET, name.encode() + b"\0")
        try:
            messages = netlink.dump(self._socket, _GET, body)
        except OSError as error:
            raise NftFailed(f"the set {name} cannot be read: {error}") from None
        return [item for message in messages for item in _parsed(name, message[4:])]

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


def _lists(changes: Sequence[ElementChange]) -> Iterator[tuple[str, str, bytes]]:
    """Changes as messages: neighbours of one set and one verb are one list, while that has room."""
    verb, name, parts, size = "", "", list[bytes](), 0
    for change in changes:
        part = b"" if change.element is None else _element(change.verb, change.element)
        if parts and ((verb, name) != change[:2] or not part or size + len(part) > MAX_LIST):
            yield verb, name, _nested(_LIST_ELEMENTS, b"".join(parts))
            parts, size = [], 0
        verb, name = change.verb, change.name
        if not part:
            yield verb, name, b""
            continue
        parts.append(part)
        size += len(part)
    if parts:
        yield verb, name, _nested(_LIST_ELEMENTS, b"".join(parts))


def _element(verb: str, item: Element) -> bytes:
    data, seconds = (item.data, item.seconds) if verb == "add" else (b"", 0)
    head, end, value, time = _headers(len(item.key), len(item.key_end), len(data), bool(seconds))
    timeout = struct.pack("!Q", seconds * 1000) if seconds else b""
    return b"".join((head, item.key, end, item.key_end, value, data, time, timeout))


@lru_cache(64)
def _headers(key: int, end: int, data: int, timed: bool) -> tuple[bytes, bytes, bytes, bytes]:
    """The headers in an element whose parts have these sizes, each a multiple of four."""

    def nested(kind: int, size: int) -> bytes:
        if not size:
            return b""
        return struct.pack("=HHHH", size + 8, kind | _NESTED, size + 4, _VALUE)

    parts = nested(_KEY, key), nested(_KEY_END, end), nested(_DATA, data)
    time = struct.pack("=HH", 12, _TIMEOUT) if timed else b""
    whole = 4 + key + end + data + sum(map(len, parts)) + (12 if timed else 0)
    return struct.pack("=HH", whole, _LIST_ELEMENT | _NESTED) + parts[0], *parts[1:], time


def _nested(kind: int, body: bytes) -> bytes:
    return attribute(kind | _NESTED, body)


def _parsed(name: str, body: bytes) -> Iterator[Element]:
    """The elements in a message of a listing."""
    found = netlink.attributes(body).get(_LIST_ELEMENTS, b"")
    for _, data in netlink.pairs(found):
        values = netlink.attributes(data)
        key, end, value = (
            netlink.attributes(values.get(kind, b"")).get(_VALUE, b"")
            for kind in (_KEY, _KEY_END, _DATA)
        )
        left = struct.unpack("!Q", values.get(_EXPIRATION, bytes(8)))[0]
        yield Element(name, key, end, value, -(-left // 1000))


def parts(elements: Sequence[Element]) -> list[Sequence[Element]]:
    """Split elements that need not change together into parts that do not block others for long."""
    return [elements[start : start + AT_ONCE] for start in range(0, len(elements), AT_ONCE)]


def removed(elements: Iterable[Element]) -> list[ElementChange]:
    """Changes that delete elements; those with a time-out may have expired already."""
    # Deleting a missing element would fail the whole transaction, so those with a time-out are
    # added first.
    found = list(elements)
    return [*(add(item) for item in found if item.seconds), *map(delete, found)]


def of_other_interfaces(elements: Iterable[Element], kept: Iterable[str]) -> list[Element]:
    """Elements of interfaces that are not ``kept``."""
    known = {name.encode() for name in kept}
    names = ((item, item.key[:16].rstrip(b"\0")) for item in elements)
    return [item for item, name in names if name.startswith(b"sb") and name not in known]
