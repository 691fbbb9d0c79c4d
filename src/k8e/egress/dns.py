"""The sandboxes' DNS responder: answers allowed names only, and opens what it answers.

It listens in the router's namespace and asks in the world's. An address can be reached before its
answer is on the way, and only by the sandbox that asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Coroutine
from typing import Any, TypeVar

import dns.rcode

from k8e import metrics
from k8e.egress import answers, asking, denials, rules
from k8e.egress.asking import MakeSocket, Upstream
from k8e.egress.budget import Share
from k8e.egress.cache import Answer
from k8e.egress.clients import Client
from k8e.egress.nftables import NftFailed
from k8e.egress.router import DNS_ADDRESS, Router
from k8e.egress.rules import Bound

log = logging.getLogger(__name__)
T = TypeVar("T")

TCP_SECONDS = 10.0
_TOO_MANY = answers.Refused(dns.rcode.REFUSED)
MAX_AT_ONCE = 64  # questions and connections of one sandbox that may wait for an answer
LEAST_AT_ONCE = 4  # that a sandbox may always have
MAX_TOGETHER = 1024  # of all sandboxes; each has a descriptor of the gateway's


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
            transport.sendto(answers.refuse(None, data, _TOO_MANY), source)
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

    def _begin(self, client: Client) -> bool:
        """Whether a sandbox may have one more question or connection that waits."""
        if not self._share.allows(client.asking):
            return False
        client.asking += 1
        self._share.take()
        return True

    def _end(self, client: Client) -> None:
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
        self, client: Client, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(TCP_SECONDS):
                while True:
                    size = int.from_bytes(await reader.readexactly(2), "big")
                    if size > answers.MAX_QUESTION or not client.rate.allows():
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
            question = answers.judge(message, bound.policy)
            resolved = await self._resolve(client, question)
            self._open(client, bound, question, resolved)
            metrics.count_query("answered")
            return answers.respond(message, question, resolved)
        except answers.Refused as refused:
            if refused.reason[0]:
                client.deny(refused.reason, name=refused.name, protocol="dns")
            metrics.count_query("failed" if refused.reason is denials.UPSTREAM else "refused")
            return answers.refuse(message, data, refused)

    async def _resolve(self, client: Client, question: answers.Question) -> answers.Resolved:
        answer, seconds = await self._find(client, question)
        if answer.rcode != dns.rcode.NOERROR:
            raise answers.Refused(answer.rcode)
        resolved = answers.reduce(question, answer, seconds)
        if resolved.hidden:
            kind, words = denials.PRIVATE_NAME
            hidden = ", ".join(map(str, resolved.hidden))
            client.deny((kind, words.format(hidden)), name=question.name, protocol="dns")
        return resolved

    async def _find(self, client: Client, question: answers.Question) -> tuple[Answer, int]:
        """What the world says, or said lately; and for how many seconds that holds."""
        kept = client.cache.get(question.key)
        if kept is not None:
            return kept
        asking_now = client.pending.get(question.key)
        if asking_now is None:
            base = question.base
            if base and not client.budget.allows(question.name, base):
                # An old answer says nothing to anybody else.
                kept = client.cache.get(question.key, stale=True)
                if kept is not None:
                    return kept
                raise answers.Refused(dns.rcode.NXDOMAIN, denials.BUDGET, question.name)
            asking_now = client.pending[question.key] = self._spawn(self._ask(client, question))
        answer = await asyncio.shield(asking_now)
        if answer is None:
            raise answers.Refused(dns.rcode.SERVFAIL, denials.UPSTREAM, question.name)
        return answer, answer.seconds

    async def _ask(self, client: Client, question: answers.Question) -> Answer | None:
        """Ask the world, once for all who wait for it; None if it does not answer."""
        try:
            query = answers.ask(question)
            # Those of the host may change with the network that it is in.
            upstreams = self._upstreams or asking.host_resolvers()
            reply = await asking.ask(query, upstreams, self._make_socket)
            answer = answers.read(question, reply)
            if answer.seconds:
                client.cache.put(question.key, answer)
            return answer
        except asking.NoAnswer:
            return None
        finally:
            del client.pending[question.key]

    def _open(
        self,
        client: Client,
        bound: Bound,
        question: answers.Question,
        resolved: answers.Resolved,
    ) -> None:
        """Let the sandbox reach what it is about to be told; Refused where that cannot be."""
        plan = client.open(bound, question, resolved)
        if plan is None:
            return
        if not client.elements.allows(plan.cost()):
            raise answers.Refused(dns.rcode.REFUSED, denials.ELEMENTS, question.name)
        try:
            self._router.change(client.pins.changes(plan))
        except NftFailed as error:
            log.error("the kernel cannot open an address for %s: %s", client.sandbox_id, error)
            kind, words = denials.FULL
            reason = kind, words.format(error.message)
            raise answers.Refused(dns.rcode.SERVFAIL, reason, question.name) from None
        client.pins.keep(plan)


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._responder.on_datagram(data, addr)

    def error_received(self, exc: Exception) -> None:
        log.debug("dns: %s", exc)
