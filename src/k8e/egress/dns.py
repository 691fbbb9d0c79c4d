"""The sandboxes' DNS responder, and the upstream resolvers that it asks.

It listens in the router's namespace and asks from the uplink's. An address is opened before its
answer is sent, and only to the sandbox that asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import struct
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import dns.exception
import dns.flags
import dns.message
import dns.rcode

from k8e import errors, metrics
from k8e.egress import denials, dns_answers, rules
from k8e.egress.dns_answers import DnsAnswer, Share
from k8e.egress.nftables import NftFailed
from k8e.egress.router import DNS_ADDRESS, Router
from k8e.egress.rules import BoundPolicy
from k8e.egress.sandbox import SandboxEgress

SECONDS = 2.0  # for one resolver to answer once
ROUNDS = 2
# Strangers' answers are read on the event loop, at 40 microseconds a record.
MAX_ANSWER = 4096  # bytes
MAX_RECORDS = 24  # that are read: aliases on the way, and more addresses than are used
PORT = 53


class Upstream(NamedTuple):
    """An upstream resolver."""

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


async def ask_upstream(
    query: dns.message.Message, upstreams: list[Upstream], make_socket: MakeSocket
) -> dns.message.Message:
    """The first answer of a resolver; they are asked in turn, twice."""
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
            await asyncio.sleep(0)  # a flood of other packets must not starve the loop
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
    """A reply without parts that are not needed: surplus records of a long one, additional ones."""
    if len(data) >= 12:
        count, authority = struct.unpack_from("!HH", data, 6)
        kept = (count, min(authority, 1)) if count <= MAX_RECORDS else (MAX_RECORDS, 0)
        data = data[:6] + struct.pack("!HHH", *kept, 0) + data[12:]
    return dns.message.from_wire(data, ignore_trailing=True)


@contextlib.asynccontextmanager
async def _connected(
    upstream: Upstream, kind: int, make_socket: MakeSocket
) -> AsyncGenerator[socket.socket]:
    """A socket that receives from this resolver alone."""
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


log = logging.getLogger(__name__)
T = TypeVar("T")

TCP_SECONDS = 10.0
_TOO_MANY = dns_answers.DnsRefusal(dns.rcode.REFUSED)
MAX_AT_ONCE = 64  # questions and connections of one sandbox that may wait for an answer
LEAST_AT_ONCE = 4  # guaranteed to each sandbox
MAX_TOGETHER = 1024  # of all sandboxes; each has a descriptor of the gateway's


class Responder:
    """Serves all sandboxes of a router."""

    def __init__(
        self,
        router: Router,
        clients: dict[str, SandboxEgress],
        upstreams: list[Upstream],
        make_socket: MakeSocket,
    ) -> None:
        """``clients`` are known by their addresses; nftables stops packets with a false sender.

        ``upstreams`` are the resolvers to ask; none means the host's.
        """
        self._router = router
        self._clients = clients
        self._upstreams = upstreams
        self._make_socket = make_socket
        self._transport: asyncio.DatagramTransport | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._share = Share(MAX_TOGETHER, MAX_AT_ONCE, LEAST_AT_ONCE)

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        here = (str(DNS_ADDRESS), rules.DNS_PORT)
        datagrams = self._router.socket(socket.AF_INET, socket.SOCK_DGRAM)
        datagrams.bind(here)
        datagrams.setblocking(False)
        streams = self._router.socket(socket.AF_INET, socket.SOCK_STREAM)
        streams.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        streams.bind(here)
        transport, _ = await loop.create_datagram_endpoint(lambda: _Datagrams(self), sock=datagrams)
        self._transport = transport
        self._server = await asyncio.start_server(self._on_stream, sock=streams)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()

    def on_datagram(self, data: bytes, source: tuple[str, int]) -> None:
        client = self._clients.get(source[0])
        if client is None or self._transport is None:
            return
        transport = self._transport
        if not client.rate.allows() or not self._begin(client):
            client.deny(denials.RATE, protocol="dns")
            transport.sendto(dns_answers.refuse(None, data, _TOO_MANY), source)
            return

        async def reply() -> None:
            try:
                answer = await self._answer(client, data)
            finally:
                self._end(client)
            transport.sendto(answer, source)

        self._spawn(reply())

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _begin(self, client: SandboxEgress) -> bool:
        """Whether a sandbox may have one more waiting question or connection."""
        if not self._share.allows(client.asking):
            return False
        client.asking += 1
        self._share.take()
        return True

    def _end(self, client: SandboxEgress) -> None:
        client.asking -= 1
        self._share.give_back()

    async def _on_stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = self._clients.get(writer.get_extra_info("peername")[0])
        if client is not None and self._begin(client):
            try:
                await self._serve(client, reader, writer)
            finally:
                self._end(client)
        writer.close()

    async def _serve(
        self, client: SandboxEgress, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(TCP_SECONDS):
                while True:
                    size = int.from_bytes(await reader.readexactly(2), "big")
                    if size > dns_answers.MAX_QUESTION or not client.rate.allows():
                        client.deny(denials.RATE, protocol="dns")
                        return
                    answer = await self._answer(client, await reader.readexactly(size))
                    writer.write(len(answer).to_bytes(2, "big") + answer)
                    await writer.drain()

    async def _answer(self, client: SandboxEgress, data: bytes) -> bytes:
        """The answer to any question."""
        message = None
        # The policy by which all of this is judged, even if it changes meanwhile.
        bound = client.bound
        try:
            message = dns_answers.parse(data)
            question = dns_answers.judge(message, bound.policy)
            resolved = await self._resolve(client, question)
            self._open(client, bound, question, resolved)
            metrics.count_query("answered")
            return dns_answers.respond(message, question, resolved)
        except dns_answers.DnsRefusal as refused:
            if refused.reason[0]:
                client.deny(refused.reason, name=refused.name, protocol="dns")
            metrics.count_query("failed" if refused.reason is denials.UPSTREAM else "refused")
            return dns_answers.refuse(message, data, refused)

    async def _resolve(
        self, client: SandboxEgress, question: dns_answers.AllowedQuestion
    ) -> dns_answers.Resolved:
        answer, seconds = await self._find(client, question)
        if answer.rcode != dns.rcode.NOERROR:
            raise dns_answers.DnsRefusal(answer.rcode)
        resolved = dns_answers.reduce(question, answer, seconds)
        if resolved.hidden:
            kind, words = denials.PRIVATE_NAME
            hidden = ", ".join(map(str, resolved.hidden))
            client.deny((kind, words.format(hidden)), name=question.name, protocol="dns")
        return resolved

    async def _find(
        self, client: SandboxEgress, question: dns_answers.AllowedQuestion
    ) -> tuple[DnsAnswer, int]:
        """The upstream answer, fresh or cached, and for how many seconds it is valid."""
        kept = client.cache.get(question.key)
        if kept is not None:
            return kept
        asking_now = client.pending.get(question.key)
        if asking_now is None:
            base = question.base
            if base and not client.budget.allows(question.name, base):
                # An old answer reveals nothing to anyone else.
                kept = client.cache.get(question.key, stale=True)
                if kept is not None:
                    return kept
                raise dns_answers.DnsRefusal(dns.rcode.NXDOMAIN, denials.BUDGET, question.name)
            asking_now = client.pending[question.key] = self._spawn(self._ask(client, question))
        answer = await asyncio.shield(asking_now)
        if answer is None:
            raise dns_answers.DnsRefusal(dns.rcode.SERVFAIL, denials.UPSTREAM, question.name)
        return answer, answer.seconds

    async def _ask(
        self, client: SandboxEgress, question: dns_answers.AllowedQuestion
    ) -> DnsAnswer | None:
        """Ask upstream, once for all who wait for it; None if there is no answer."""
        try:
            query = dns_answers.ask(question)
            # The host's resolvers may change with the network that it is in.
            upstreams = self._upstreams or host_resolvers()
            reply = await ask_upstream(query, upstreams, self._make_socket)
            answer = dns_answers.read(question, reply)
            if answer.seconds:
                client.cache.put(question.key, answer)
            return answer
        except NoAnswer:
            return None
        finally:
            del client.pending[question.key]

    def _open(
        self,
        client: SandboxEgress,
        bound: BoundPolicy,
        question: dns_answers.AllowedQuestion,
        resolved: dns_answers.Resolved,
    ) -> None:
        """Open the addresses of an answer to the sandbox; DnsRefusal where that is impossible."""
        plan = client.open(bound, question, resolved)
        if plan is None:
            return
        if not client.elements.allows(plan.cost()):
            raise dns_answers.DnsRefusal(dns.rcode.REFUSED, denials.ELEMENTS, question.name)
        try:
            self._router.change(client.pins.changes(plan))
        except NftFailed as error:
            log.error("the kernel cannot open an address for %s: %s", client.sandbox_id, error)
            kind, words = denials.FULL
            reason = kind, words.format(error.message)
            raise dns_answers.DnsRefusal(dns.rcode.SERVFAIL, reason, question.name) from None
        client.pins.keep(plan)


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._responder.on_datagram(data, addr)

    def error_received(self, exc: Exception) -> None:
        log.debug("dns: %s", exc)
