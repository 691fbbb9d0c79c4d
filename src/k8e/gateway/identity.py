"""Identity of a caller: an API key, a client certificate, or a local user.

Only a socket that is established and still held by a process counts. A socket that its process has
closed has no owner any more, and the kernel reports it with uid 0: if that were believed, any user
could send a request, close the socket and be root.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from k8e import errors
from k8e.audit.act import AuditCaller as Described
from k8e.auth import keys
from k8e.auth.keys import Keys, Unknown
from k8e.auth.store import Key
from k8e.model import Principal, Role

if TYPE_CHECKING:
    from k8e.gateway.rpc.front import TlsPeer


LOCAL = Principal("local", frozenset({Role.AGENT, Role.ADMIN}))
"""The user whose gateway this is. Not an approver: the user's agents have the same uid."""

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLMSG_ERROR = 2
_NLM_F_REQUEST = 1
_ESTABLISHED = 1
_PATIENCE = 1.0  # seconds; the kernel answers within the system call that asks
_NLMSG = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_REQUEST = struct.Struct("=BBBBI")  # family, protocol, extensions, padding, states
_SOCKET_ID = struct.Struct("!HH16s16s")  # source port, destination port, their addresses
_INTERFACE_COOKIE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # any interface, any cookie
_HEAD = struct.Struct("=BBBB")  # family, state, timer, retransmissions
_TAIL = struct.Struct("=IIIII")  # expires, receive queue, send queue, uid, inode
_TAIL_AT = _HEAD.size + _SOCKET_ID.size + len(_INTERFACE_COOKIE)
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class TcpEnd(NamedTuple):
    """One end of a TCP connection."""

    address: Address
    port: int

    def __str__(self) -> str:
        host = f"[{self.address}]" if self.address.version == 6 else str(self.address)
        return f"{host}:{self.port}"


class UnknownPeer(Exception):
    """The caller cannot be identified; the text says why."""


def identify_peer(caller: TcpEnd, listening_on: TcpEnd) -> Principal:
    """The principal behind a connection from ``caller`` to ``listening_on``, by its uid.

    Asked for each call and never remembered: another process may get the same port later.

    Raises:
        UnknownPeer: it is not a loopback connection of the gateway's own user or of root.
    """
    if not caller.address.is_loopback or not listening_on.address.is_loopback:
        raise UnknownPeer(
            "callers from elsewhere need an API key or a client certificate: set K8E_SANDBOX_APIKEY"
        )
    uid = owner(caller, listening_on)
    if uid is None:
        raise UnknownPeer("the owner of this connection could not be found")
    if uid not in (0, os.geteuid()):
        raise UnknownPeer(
            f"this gateway belongs to uid {os.geteuid()} and does not serve uid {uid}"
        )
    return LOCAL


def endpoint(host: str, port: int) -> TcpEnd:
    """An end as ``getpeername`` reports it; IPv4 inside IPv6 counts as IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return TcpEnd(mapped or address, port)


def owner(local: TcpEnd, remote: TcpEnd) -> int | None:
    """The uid that owns the established socket at ``local`` which talks to ``remote``."""
    try:
        return _ask_kernel(local, remote)
    except OSError:  # netlink is closed to us, or its tcp_diag module is not there
        return _search_tables(local, remote)


def _ask_kernel(local: TcpEnd, remote: TcpEnd) -> int | None:
    """Look one socket up with sock_diag(7)."""
    family = socket.AF_INET if local.address.version == 4 else socket.AF_INET6
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 1 << _ESTABLISHED)
    body += _socket_id(local, remote) + _INTERFACE_COOKIE
    head = _NLMSG.pack(_NLMSG.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
    with socket.socket(socket.AF_NETLINK, kind, _NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(_PATIENCE)
        netlink.sendto(head + body, (0, 0))
        answer = netlink.recv(4096)
    length, kind = struct.unpack_from("=IH", answer)
    if kind == _NLMSG_ERROR:
        number = -struct.unpack_from("=i", answer, _NLMSG.size)[0]
        raise OSError(number, os.strerror(number))
    if kind != _SOCK_DIAG_BY_FAMILY or length > len(answer):
        raise OSError(errno.EPROTO, "unexpected answer from netlink")
    return _read_answer(answer[_NLMSG.size : length], _forms(local, remote))


def _read_answer(answer: bytes, forms: list[tuple[TcpEnd, TcpEnd]]) -> int | None:
    _, state, _, _ = _HEAD.unpack_from(answer)
    _, _, _, uid, inode = _TAIL.unpack_from(answer, _TAIL_AT)
    found = answer[_HEAD.size : _HEAD.size + _SOCKET_ID.size]
    # Where no connection matches, the kernel offers a socket that listens on the same port.
    same = found in [_socket_id(*form) for form in forms]
    return uid if same and state == _ESTABLISHED and inode else None


def _socket_id(local: TcpEnd, remote: TcpEnd) -> bytes:
    return _SOCKET_ID.pack(local.port, remote.port, local.address.packed, remote.address.packed)


def _search_tables(local: TcpEnd, remote: TcpEnd) -> int | None:
    """The same from /proc; slower, because it lists all connections of the machine."""
    wanted = [(_spell(one), _spell(other)) for one, other in _forms(local, remote)]
    for table in _TABLES:
        try:
            lines = table.read_text("ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            # sl local_address rem_address st queues timer retransmits uid timeout inode
            fields = line.split()
            if (fields[1], fields[2]) in wanted:
                established = int(fields[3], 16) == _ESTABLISHED and fields[9] != "0"
                return int(fields[7]) if established else None
    return None


def _forms(local: TcpEnd, remote: TcpEnd) -> list[tuple[TcpEnd, TcpEnd]]:
    """The spellings of a connection in the kernel: an IPv6 socket can talk to an IPv4 address."""
    forms = [(local, remote)]
    if local.address.version == 4:
        forms.append((_as_ipv6(local), _as_ipv6(remote)))
    return forms


def _as_ipv6(end: TcpEnd) -> TcpEnd:
    return TcpEnd(ipaddress.IPv6Address(f"::ffff:{end.address}"), end.port)


def _spell(end: TcpEnd) -> str:
    """Words of four bytes in the machine's own order, in hexadecimal."""
    words = struct.unpack(f"={len(end.address.packed) // 4}I", end.address.packed)
    return "".join(f"{word:08X}" for word in words) + f":{end.port:04X}"


log = logging.getLogger(__name__)

_KEY_HEADERS = ("authorization", "x-api-key")


@contextlib.asynccontextmanager
async def identified(
    known: Keys, caller: TlsPeer | None, metadata: Iterable[tuple[str, str | bytes]]
) -> AsyncGenerator[Principal]:
    """The principal of a call, for as long as it may make it.

    Raises:
        UnknownPeer: the caller is not known, or its key has ended.
        LimitExceeded: the same, and too often.
    """
    if caller is None:
        raise UnknownPeer("this connection did not come through the endpoint")
    try:
        _refuse_pages(metadata)
        found = _key(known, caller, metadata) or _local(caller)
    except (Unknown, UnknownPeer) as error:
        raise _failed(known, caller, error) from None
    if isinstance(found, Principal):
        yield found
        return
    try:
        async with known.while_valid(found):
            yield keys.principal(found)
    except Unknown as error:
        raise UnknownPeer(str(error)) from None


def _refuse_pages(metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """Refuse web pages: only browsers send these headers, and a page cannot omit them.

    A page can make the browser of our own user dial us, and then its uid would be ours.
    """
    for header, _ in metadata:
        if header == "origin" or header.startswith("sec-fetch-"):
            raise UnknownPeer("this service is not for web pages")


def _local(caller: TlsPeer) -> Principal:
    """The local user, as the kernel reports it."""
    if not caller.by_our_name:
        raise UnknownPeer(
            "the name that was dialled is not one of this gateway (K8E_ADVERTISE_NAMES)"
        )
    return identify_peer(caller.client, caller.server)


def described(caller: TlsPeer | None, principal: Principal | None) -> Described:
    """The caller as the audit trail describes it; without a principal it is not identified yet."""
    peer = str(caller.client) if caller is not None else ""
    if principal is None:
        return Described("", "grpc", peer)
    if not principal.name.startswith(keys.OWNER_PREFIX):
        return Described(principal.name, "loopback", peer)
    shown = caller.certificate if caller is not None else None
    return Described(principal.name, "certificate" if shown else "key", peer)


def _key(known: Keys, caller: TlsPeer, metadata: Iterable[tuple[str, str | bytes]]) -> Key | None:
    """The key of a call, from its secret or a certificate. A wrong credential is an error."""
    found: list[Key] = []
    if caller.certificate is not None:
        found.append(known.of_certificate(caller.certificate.serial, caller.certificate.name))
    found += [known.of_secret(secret) for secret in _secrets(metadata)]
    if len({key.key_id for key in found}) > 1:
        raise Unknown("the credentials of this call belong to different keys")
    return found[0] if found else None


def _secrets(metadata: Iterable[tuple[str, str | bytes]]) -> Iterable[str]:
    for header, value in metadata:
        if header not in _KEY_HEADERS:
            continue
        text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
        if header == "authorization":
            scheme, _, text = text.partition(" ")
            if scheme.lower() != "bearer":
                raise Unknown("authorization must be 'Bearer ' and an API key")
        yield text.strip()


def _failed(known: Keys, caller: TlsPeer, error: Unknown | UnknownPeer) -> Exception:
    address = str(caller.client.address)
    if not known.attempts.failed(address):
        return errors.LimitExceeded(
            f"too many wrong credentials from {address}", hint="correct them, and wait a minute"
        )
    log.warning("refused a call from %s: %s", address, error)
    return UnknownPeer(str(error))
