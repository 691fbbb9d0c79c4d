"""Asking the world's resolvers: a fresh question from a fresh port, and nobody else's answer."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import struct
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import NamedTuple

import dns.exception
import dns.flags
import dns.message

from k8e import errors

SECONDS = 2.0  # for one resolver to answer once
ROUNDS = 2
# What strangers answer is read on the event loop, at 40 microseconds a record.
MAX_ANSWER = 4096  # bytes
MAX_RECORDS = 24  # that are read: aliases on the way, and more addresses than are used
PORT = 53


class Upstream(NamedTuple):
    """A resolver of the world's."""

    address: str
    port: int = PORT


UNREADABLE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    struct.error,
    dns.exception.DNSException,
)
"""What the library raises that reads messages; they come from strangers, and it is not ours."""
MakeSocket = Callable[[int, int], socket.socket]


class NoAnswer(Exception):
    """No resolver answered."""


async def ask(
    query: dns.message.Message, upstreams: list[Upstream], make_socket: MakeSocket
) -> dns.message.Message:
    """The first answer that a resolver gives; they are asked in turn, twice."""
    for _ in range(ROUNDS):
        for upstream in upstreams:
            with contextlib.suppress(OSError, TimeoutError, EOFError, *UNREADABLE):
                async with asyncio.timeout(SECONDS):
                    return await _ask_one(query, upstream, make_socket)
    raise NoAnswer


async def _ask_one(
    query: dns.message.Message, upstream: Upstream, make_socket: MakeSocket
) -> dns.message.Message:
    question = query.to_wire()
    loop = asyncio.get_running_loop()
    async with _connected(upstream, socket.SOCK_DGRAM, make_socket) as connection:
        await loop.sock_sendall(connection, question)
        while True:
            data = await loop.sock_recv(connection, MAX_ANSWER)
            with contextlib.suppress(*UNREADABLE):
                reply = read(data)
                if query.is_response(reply):
                    break
            await asyncio.sleep(0)  # a flood of others would leave nobody else a turn
    if not reply.flags & dns.flags.TC:
        return reply
    async with _connected(upstream, socket.SOCK_STREAM, make_socket) as connection:
        await loop.sock_sendall(connection, len(question).to_bytes(2, "big") + question)
        size = int.from_bytes(await _exactly(connection, 2), "big")
        if size > MAX_ANSWER:
            raise EOFError
        reply = read(await _exactly(connection, size))
    if not query.is_response(reply):
        raise EOFError
    return reply


def read(data: bytes) -> dns.message.Message:
    """A reply, without what nobody needs of it: further records of a long one, additional ones."""
    if len(data) >= 12:
        count, authority = struct.unpack_from("!HH", data, 6)
        kept = (count, min(authority, 1)) if count <= MAX_RECORDS else (MAX_RECORDS, 0)
        data = data[:6] + struct.pack("!HHH", *kept, 0) + data[12:]
    return dns.message.from_wire(data, ignore_trailing=True)


@contextlib.asynccontextmanager
async def _connected(
    upstream: Upstream, kind: int, make_socket: MakeSocket
) -> AsyncGenerator[socket.socket]:
    """A socket that hears nobody but this resolver."""
    family = socket.AF_INET6 if ":" in upstream.address else socket.AF_INET
    with make_socket(family, kind) as connection:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, tuple(upstream))
        yield connection


async def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = await asyncio.get_running_loop().sock_recv(connection, size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def host_resolvers(path: Path = Path("/etc/resolv.conf")) -> list[Upstream]:
    """The resolvers that this host itself uses."""
    with contextlib.suppress(OSError):
        words = [line.split() for line in path.read_text("utf-8", "replace").splitlines()]
        return [Upstream(word[1]) for word in words if len(word) > 1 and word[0] == "nameserver"]
    return []


def parse_upstreams(text: str) -> list[Upstream]:
    """The operator's resolvers: addresses with optional ports, separated by commas."""
    found: list[Upstream] = []
    for word in text.replace(",", " ").split():
        address, port = word, str(PORT)
        if word.startswith("["):
            address, _, rest = word[1:].partition("]")
            port = rest.removeprefix(":") or port
        elif word.count(":") == 1:
            address, _, port = word.partition(":")
        try:
            found.append(Upstream(str(ipaddress.ip_address(address)), int(port)))
        except ValueError:
            raise errors.InvalidRequest(
                f"K8E_RESOLVERS: {word!r} is not an address", hint="for example 192.0.2.53:53"
            ) from None
    return found
