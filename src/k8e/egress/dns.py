"""The sandboxes' DNS responder: answers allowed names only, and opens what it answers.

It listens in the router's namespace and asks in the world's. An address can be reached before its
answer is on the way, and only by the sandbox that asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

import dns.rcode

from k8e import metrics
from k8e.egress import answers, asking, denials, rules
from k8e.egress.asking import MakeSocket, Upstream
from k8e.egress.clients import Client
from k8e.egress.router import DNS_ADDRESS, Router

log = logging.getLogger(__name__)

TCP_SECONDS = 10.0
_TOO_MANY = answers.Refused(dns.rcode.REFUSED)
MAX_AT_ONCE = 64  # questions of one sandbox that may be on their way to the world


class Responder:
    """Serves all sandboxes of a router."""

    def __init__(
        self,
        router: Router,
        clients: dict[str, Client],
        upstreams: list[Upstream],
        make_socket: MakeSocket,
    ) -> None:
        """``clients`` are known by their addresses; nftables lets nobody use another's.

        ``upstreams`` are the resolvers to ask; none means the host's.
        """
        self._router = router
        self._clients = clients
        self._upstreams = upstreams
        self._make_socket = make_socket
        self._transport: asyncio.DatagramTransport | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

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
        if client.asking >= MAX_AT_ONCE or not client.rate.allows():
            client.deny(denials.RATE, protocol="dns")
            transport.sendto(answers.refuse(None, data, _TOO_MANY), source)
            return
        client.asking += 1

        async def reply() -> None:
            try:
                answer = await self._answer(client, data)
            finally:
                client.asking -= 1
            transport.sendto(answer, source)

        task = asyncio.create_task(reply())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _on_stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = self._clients.get(writer.get_extra_info("peername")[0])
        if client is not None and client.asking < MAX_AT_ONCE:
            client.asking += 1
            try:
                await self._serve(client, reader, writer)
            finally:
                client.asking -= 1
        writer.close()

    async def _serve(
        self, client: Client, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(TCP_SECONDS):
                while True:
                    size = int.from_bytes(await reader.readexactly(2), "big")
                    if not client.rate.allows():
                        client.deny(denials.RATE, protocol="dns")
                        return
                    answer = await self._answer(client, await reader.readexactly(size))
                    writer.write(len(answer).to_bytes(2, "big") + answer)
                    await writer.drain()

    async def _answer(self, client: Client, data: bytes) -> bytes:
        """The answer to a question, whatever it is."""
        message = None
        bound = client.bound  # by which all of this is judged, even if it changes meanwhile
        try:
            message = answers.parse(data)
            question = answers.judge(message, bound.policy, client.budget)
            resolved = await self._resolve(client, question)
            pins = client.open(bound, question, resolved)
            if pins:
                self._router.pin(pins)
            metrics.count_query("answered")
            return answers.respond(message, question, resolved)
        except answers.Refused as refused:
            if refused.reason[0]:
                client.deny(refused.reason, name=refused.name, protocol="dns")
            metrics.count_query("failed" if refused.reason is denials.UPSTREAM else "refused")
            return answers.refuse(message, data, refused)

    async def _resolve(self, client: Client, question: answers.Question) -> answers.Resolved:
        try:
            query = answers.ask(question)
            # Those of the host may change with the network that it is in.
            upstreams = self._upstreams or asking.host_resolvers()
            reply = await asking.ask(query, upstreams, self._make_socket)
        except asking.NoAnswer:
            raise answers.Refused(dns.rcode.SERVFAIL, denials.UPSTREAM, question.name) from None
        if reply.rcode() != dns.rcode.NOERROR:
            raise answers.Refused(reply.rcode())
        resolved = answers.reduce(question, reply)
        if resolved.hidden:
            kind, words = denials.PRIVATE_NAME
            hidden = ", ".join(map(str, resolved.hidden))
            client.deny((kind, words.format(hidden)), name=question.name, protocol="dns")
        return resolved


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._responder.on_datagram(data, addr)

    def error_received(self, exc: Exception) -> None:
        log.debug("dns: %s", exc)
