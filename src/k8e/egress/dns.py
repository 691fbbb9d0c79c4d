"""The sandboxes' DNS responder: answers allowed names only, and opens what it answers.

It listens in the router's namespace and asks from the gateway's own. An address can be reached
before its answer is on the way, and only by the sandbox that asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

import dns.asyncquery
import dns.exception
import dns.message
import dns.rcode

from k8e.egress import answers, rules
from k8e.egress.policy import Policy
from k8e.egress.router import DNS_ADDRESS, Router, Target

log = logging.getLogger(__name__)

UPSTREAM_SECONDS = 3.0
TCP_SECONDS = 5.0
MAX_AT_ONCE = 64  # questions of one sandbox that may be on their way to the world
UDP_SIZE = 1232
MAX_OPENED = 1024  # addresses of one sandbox that are remembered with their names


class Upstream(NamedTuple):
    """A resolver of the world's."""

    address: str
    port: int = rules.DNS_PORT


class Client:
    """One sandbox, as the responder knows it."""

    def __init__(
        self, generation: int, policy: Policy, on_denial: Callable[[str, str], None]
    ) -> None:
        self.generation = generation
        self.policy = policy
        self.on_denial = on_denial
        self.asking = 0
        self.opened: dict[Target, str] = {}
        """What was opened, and by which name, so that a new policy can keep what it allows too."""

    def still_allowed(self, policy: Policy) -> dict[Target, str]:
        """What was opened and would be under ``policy``."""
        kept: dict[Target, str] = {}
        for (address, port), name in self.opened.items():
            ports = {rule.port for rule in policy.rules_for(name)}
            if 0 in ports or port in ports:
                kept[address, port] = name
        return kept


class Responder:
    """Serves all sandboxes of a router."""

    def __init__(self, router: Router, upstreams: list[Upstream]) -> None:
        self.clients: dict[str, Client] = {}
        """By the sandbox's address; nftables lets nobody use another's."""
        self._router = router
        self._upstreams = upstreams
        self._transport: asyncio.DatagramTransport | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        datagrams = self._router.socket(socket.AF_INET, socket.SOCK_DGRAM)
        datagrams.bind((str(DNS_ADDRESS), rules.DNS_PORT))
        datagrams.setblocking(False)
        streams = self._router.socket(socket.AF_INET, socket.SOCK_STREAM)
        streams.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        streams.bind((str(DNS_ADDRESS), rules.DNS_PORT))
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
        client = self.clients.get(source[0])
        if client is None or client.asking >= MAX_AT_ONCE or self._transport is None:
            return
        transport = self._transport

        async def reply() -> None:
            answer = await self._answer(client, data)
            if len(answer) > UDP_SIZE:
                answer = answer[:2] + bytes([answer[2] | 0x02]) + answer[3:4] + data[4:6] + b"\0" * 6
            transport.sendto(answer, source)

        task = asyncio.create_task(reply())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _on_stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = self.clients.get(writer.get_extra_info("peername")[0])
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(TCP_SECONDS):
                while client is not None and client.asking < MAX_AT_ONCE:
                    size = int.from_bytes(await reader.readexactly(2), "big")
                    answer = await self._answer(client, await reader.readexactly(size))
                    writer.write(len(answer).to_bytes(2, "big") + answer)
                    await writer.drain()
        writer.close()

    async def _answer(self, client: Client, data: bytes) -> bytes:
        message = None
        client.asking += 1
        try:
            message = answers.parse(data)
            question = answers.judge(message, client.policy)
            resolved = await self._resolve(client, question)
            await self._open(client, question, resolved)
            return answers.respond(message, question, resolved)
        except answers.Refused as refused:
            if refused.reason:
                client.on_denial(refused.name, refused.reason)
            return answers.refuse(message, data, refused)
        finally:
            client.asking -= 1

    async def _resolve(self, client: Client, question: answers.Question) -> answers.Resolved:
        query = answers.ask(question)
        reply = None
        for upstream in self._upstreams:
            with contextlib.suppress(OSError, dns.exception.DNSException):
                reply, _ = await dns.asyncquery.udp_with_fallback(
                    query, upstream.address, port=upstream.port, timeout=UPSTREAM_SECONDS
                )
                break
        if reply is None:
            raise answers.Refused(dns.rcode.SERVFAIL, "the resolvers of the host do not answer", question.name)
        if reply.rcode() != dns.rcode.NOERROR:
            raise answers.Refused(cast("dns.rcode.Rcode", reply.rcode()))
        resolved = answers.reduce(question, reply)
        if resolved.hidden:
            hidden = ", ".join(map(str, resolved.hidden))
            client.on_denial(question.name, f"it resolves to a private address ({hidden})")
        return resolved

    async def _open(
        self, client: Client, question: answers.Question, resolved: answers.Resolved
    ) -> None:
        """Let the sandbox reach what it is about to be told."""
        ports = {rule.port for rule in question.rules}
        ports = {0} if 0 in ports else ports
        pins = [
            rules.Pin(client.generation, address, port, resolved.seconds)
            for address in resolved.addresses
            for port in ports
        ]
        if not pins:
            return
        for pin in pins:
            # Newest last, so that the oldest is forgotten.
            client.opened.pop((pin.address, pin.port), None)
            client.opened[pin.address, pin.port] = question.name
        while len(client.opened) > MAX_OPENED:
            del client.opened[next(iter(client.opened))]
        await asyncio.to_thread(self._router.pin, pins)


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._responder.on_datagram(data, addr)

    def error_received(self, exc: Exception) -> None:
        log.debug("dns: %s", exc)


def host_resolvers(path: Path = Path("/etc/resolv.conf")) -> list[Upstream]:
    """The resolvers that this host itself uses."""
    with contextlib.suppress(OSError):
        words = [line.split() for line in path.read_text("utf-8", "replace").splitlines()]
        return [Upstream(word[1]) for word in words if len(word) > 1 and word[0] == "nameserver"]
    return []
