"""The transparent proxy of strict sandboxes, and its sockets in the router's namespace.

A diverted connection arrives with the address that the client wanted as its own. The proxy reads
what the client says first, asks whether that name may be reached at that address, dials the address
and relays. Nothing is decrypted. Of plain HTTP, one request per connection gets through, since the
next could name another host.

Sockets of the router's namespace have to be made by another thread, so some are made ahead.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from k8e.egress import rules, sniff
from k8e.egress.dns_answers import Share
from k8e.egress.policy import Address, Network
from k8e.egress.relay import Relay, Relays, Until
from k8e.egress.sniff import HTTP, PEEK_LIMIT, TLS, Chunked, Peeked, Said, UnreadableRequest

log = logging.getLogger(__name__)

SPARE_SOCKETS = 8
CLIENT_BUFFER = 128 * 1024  # its other end is on this machine: more would only cost memory
KEEPALIVE_SECONDS = 120
BACKLOG = 1024
_IPV6_TRANSPARENT = 75  # <linux/in6.h>; Python has no name for it
_RESET = struct.pack("ii", 1, 0)

MakeSocket = Callable[[int, int], socket.socket]


def close_socket(end: socket.socket, *, orderly: bool) -> None:
    """Close a socket; a connection that does not end in an orderly way is reset."""
    if not orderly:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    end.close()


class _NoFamily(OSError):
    """This kernel does not know a family of addresses."""


def tune(end: socket.socket) -> None:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)


class Sockets:
    """The proxy's sockets; ``make_socket`` makes one in the router's namespace, and blocks."""

    def __init__(self, make_socket: MakeSocket) -> None:
        self._make_socket = make_socket
        self._spare: dict[int, list[socket.socket]] = {}
        self._task: asyncio.Task[None] | None = None
        self._making: set[asyncio.Future[list[socket.socket]]] = set()
        self._closed = False

    def listen(self) -> list[socket.socket]:
        """Blocking: open listeners for diverted connections."""
        made: list[socket.socket] = []
        try:
            made.append(self._listen(socket.AF_INET, socket.IPPROTO_IP, socket.IP_TRANSPARENT))
            self._spare[socket.AF_INET] = []
            with contextlib.suppress(_NoFamily):
                level = socket.IPPROTO_IPV6
                made.append(self._listen(socket.AF_INET6, level, _IPV6_TRANSPARENT))
                self._spare[socket.AF_INET6] = []
        except BaseException:
            for listener in made:
                listener.close()
            raise
        return made

    def _listen(self, family: int, level: int, transparent: int) -> socket.socket:
        try:
            listener = self._make_socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise _NoFamily(*error.args) from error
        try:
            if family == socket.AF_INET6:
                listener.setsockopt(level, socket.IPV6_V6ONLY, 1)
            listener.setsockopt(level, transparent, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CLIENT_BUFFER)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CLIENT_BUFFER)
            tune(listener)  # what it accepts inherits this
            listener.setblocking(False)
            listener.bind(("", rules.PROXY_PORT))
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener

    async def take(self, family: int) -> socket.socket:
        """A socket for dialling."""
        spare = self._spare.get(family, [])
        self.refill()
        return spare.pop() if spare else (await self._in_thread(family, 1))[0]

    async def _in_thread(self, family: int, count: int) -> list[socket.socket]:
        making = asyncio.get_running_loop().run_in_executor(None, self._make, family, count)
        self._making.add(making)
        making.add_done_callback(self._making.discard)
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            # The thread goes on, or was done just now; its sockets are not needed.
            if making.done():
                _drop(making)
            else:
                making.add_done_callback(_drop)
            raise

    def _make(self, family: int, count: int) -> list[socket.socket]:
        made: list[socket.socket] = []
        try:
            for _ in range(count):
                made.append(self._make_socket(family, socket.SOCK_STREAM))
                made[-1].setsockopt(socket.SOL_SOCKET, socket.SO_MARK, rules.UPSTREAM_MARK)
                made[-1].setblocking(False)
                tune(made[-1])
        except BaseException:
            for item in made:
                item.close()
            raise
        return made

    def refill(self) -> None:
        """Make sockets ahead if few are left; returns at once."""
        low = any(len(spare) <= SPARE_SOCKETS // 2 for spare in self._spare.values())
        if low and not self._closed and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._refill())

    async def _refill(self) -> None:
        for family, spare in self._spare.items():
            try:
                spare += await self._in_thread(family, max(SPARE_SOCKETS - len(spare), 0))
            except Exception:
                if not self._closed:
                    log.exception("the egress proxy cannot make sockets")
                return

    def close(self) -> None:
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        for spare in self._spare.values():
            while spare:
                spare.pop().close()

    async def wait_closed(self) -> None:
        """Wait until the sockets under way are made, and closed."""
        refilling = () if self._task is None else (self._task,)
        await asyncio.gather(*refilling, *self._making, return_exceptions=True)


def _drop(making: asyncio.Future[list[socket.socket]]) -> None:
    if not making.cancelled() and making.exception() is None:
        for item in making.result():
            item.close()


MAX_PER_SOURCE = 256  # connections of one address; two of them are guaranteed to each sandbox
LEAST_PER_SOURCE = 8  # that it may always have
MAX_CONNECTIONS = 4096  # of all; a sandbox with many leaves as many to others
NEAR_PER_SOURCE, LEAST_NEAR = 64, 4  # to neighbours of the host, of which all have few together
PEEK_SECONDS = 10.0
DIAL_SECONDS = 10.0
ANSWER_SECONDS = 60.0  # until a server answers a TLS hello
LINGER_SECONDS = 1.0
LINGER_BYTES = 1 << 20  # that are read of a client that was refused
PAUSE_SECONDS = 0.2
READ_SIZE = 16 * 1024
# Bytes that are examined until a client has named its host. Each piece is examined with all that
# came before it, so many small ones would keep the gateway busy.
MAX_LOOKED_AT = 1 << 21
FIRST_CHUNKS = 1024  # bytes of a body in chunks that are read with the request
_ACCEPT_AT_ONCE = 16


@dataclass(frozen=True)
class ProxyDecision:
    """Whether a connection may be made: ``allowed``, ``refused``, or ``peek`` first."""

    verdict: str
    reason: str = ""


ALLOWED, PEEK = ProxyDecision("allowed"), ProxyDecision("peek")


def refused(reason: str) -> ProxyDecision:
    return ProxyDecision("refused", reason)


# Called with the client's address, the destination, and the name that the client gave: None before
# it gave one. The callee must make sure that the address belongs to the name, and logs denials. The
# last argument says whether the connection exists, and is only judged again.
Decide = Callable[[str, Address, int, Said | None, bool], ProxyDecision]
_Look = Callable[[bytes, int], Peeked | None]
TellTooMany = Callable[[str, Address, int], None]


class _Connection:
    """A client's connection, and ours to its server."""

    def __init__(self, client: socket.socket, source: str) -> None:
        self.client = client
        self.source = source
        host, self.port = client.getsockname()[:2]
        self.destination = ipaddress.ip_address(host.partition("%")[0])
        self.said: Said | None = None
        self.judged = False
        """Whether it was allowed for good, as far as the policy of that time goes."""
        self.near = False
        """Whether it leads to a neighbour of the host."""
        self.server: socket.socket | None = None
        self.relay: Relay | None = None
        self.task: asyncio.Task[bool] | None = None

    def close(self, *, orderly: bool) -> None:
        if self.relay is not None:
            self.relay.stop()
        for end in (self.client, self.server):
            if end is not None:
                close_socket(end, orderly=orderly)


@dataclass(frozen=True)
class _Opening:
    """The bytes for the server, the bytes held back, and the end of the client's request."""

    sent: bytes
    kept: bytes = b""
    until: Until = None
    extra: int = 0
    """Bytes behind the request, which are discarded."""


class Proxy:
    """Serves the diverted connections of all sandboxes of a router.

    ``make_socket`` makes a socket of the router's namespace; ``decide`` is the policy.
    """

    def __init__(
        self, make_socket: MakeSocket, decide: Decide, tell: TellTooMany | None = None
    ) -> None:
        """``tell`` is called for connections that exceed a limit."""
        self._decide = decide
        self._tell = tell
        self.share = Share(MAX_CONNECTIONS, MAX_PER_SOURCE, LEAST_PER_SOURCE)
        """How many connections all have together, and each."""
        self.near: Sequence[Network] = ()
        """The networks in which the host has neighbours."""
        self.near_share = Share(rules.MAX_NEAR, NEAR_PER_SOURCE, LEAST_NEAR)
        self._sockets = Sockets(make_socket)
        self._listeners: list[socket.socket] = []
        self._by_source: dict[str, set[_Connection]] = {}
        self._tasks: set[asyncio.Task[bool]] = set()

    # Starting and ending.

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._relays = Relays()
        try:
            self._listeners = await asyncio.to_thread(self._sockets.listen)
        except BaseException:
            self._relays.close()
            raise
        for listener in self._listeners:
            self._loop.add_reader(listener.fileno(), self._accept, listener)
        self._sockets.refill()

    def close(self) -> None:
        """Stop listening and cut all connections; their sockets close with the loop's next turn."""
        if not self._listeners:
            return
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())
            listener.close()
        self._listeners = []
        for task in self._tasks:
            task.cancel()
        self._relays.close()
        self._sockets.close()

    async def wait_closed(self) -> None:
        """Wait until everything that :meth:`close` ended is gone."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._sockets.wait_closed()

    def connections(self, source: str) -> int:
        """The number of open connections of a client."""
        return len(self._by_source.get(source, ()))

    def rejudge(self, source: str) -> None:
        """Cut the connections of a client that the present policy does not allow."""
        for connection in list(self._by_source.get(source, ())):
            if connection.judged and not self._still_allowed(connection) and connection.task:
                connection.task.cancel()

    def _still_allowed(self, connection: _Connection) -> bool:
        decision = self._ask(connection, None, again=True)
        if decision.verdict == PEEK.verdict and connection.said is not None:
            decision = self._ask(connection, connection.said, again=True)
        return decision.verdict == ALLOWED.verdict

    # New connections.

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                client, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # out of descriptors or memory: the rest waits in the kernel
                log.warning("the egress proxy cannot accept: %s", error)
                self._loop.remove_reader(listener.fileno())
                self._loop.call_later(PAUSE_SECONDS, self._resume, listener)
                return
            client.setblocking(False)
            self._admit(client, str(ipaddress.ip_address(address[0].partition("%")[0])))

    def _resume(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _admit(self, client: socket.socket, source: str) -> None:
        connection = _Connection(client, source)
        if not self.share.allows(self.connections(source)):
            log.debug("%s has too many connections at once", source)
            if self._tell is not None:
                self._tell(source, connection.destination, connection.port)
            close_socket(client, orderly=False)
            return
        decision = self._ask(connection, None)
        if decision.verdict == "refused":
            close_socket(client, orderly=False)
            return
        self._by_source.setdefault(source, set()).add(connection)
        self.share.take()
        connection.judged = decision.verdict == ALLOWED.verdict
        connection.task = task = self._loop.create_task(self._serve(connection))
        self._tasks.add(task)
        # Not in the task's own `finally`, which one that is cancelled early never enters.
        task.add_done_callback(lambda task: self._finish(connection, task))

    def _finish(self, connection: _Connection, task: asyncio.Task[bool]) -> None:
        self._tasks.discard(task)
        self.share.give_back()
        if connection.near:
            self.near_share.give_back()
        connection.close(orderly=not task.cancelled() and task.result())
        others = self._by_source[connection.source]
        others.discard(connection)
        if not others:
            del self._by_source[connection.source]

    def _ask(
        self, connection: _Connection, said: Said | None, *, again: bool = False
    ) -> ProxyDecision:
        here, there, port = connection.source, connection.destination, connection.port
        try:
            return self._decide(here, there, port, said, again)
        except Exception:
            log.exception("a connection of %s could not be judged", connection.source)
            return refused("k8e failed to judge it")

    async def _serve(self, connection: _Connection) -> bool:
        try:
            return await self._converse(connection)
        except (OSError, TimeoutError) as error:
            log.debug("%s to %s: %s", connection.source, connection.destination, error)
        except Exception:
            log.exception("a connection of %s failed", connection.source)
        return False

    async def _converse(self, connection: _Connection) -> bool:
        """Serve one connection; return whether it ended in an orderly way."""
        opening = _Opening(b"")
        if not connection.judged:
            peeked, data = await self._peek(connection)
            connection.said, opening = _open(peeked, data)
            decision = self._ask(connection, connection.said)
            if decision.verdict != ALLOWED.verdict or not connection.said.name:
                return await self._refuse(connection, decision.reason or connection.said.reason)
            connection.judged = True
        protocol = connection.said.protocol if connection.said is not None else ""
        try:
            return await self._connect(connection, opening, greeting=protocol == TLS)
        except (OSError, TimeoutError) as error:
            if protocol != HTTP:
                raise
            text = f"{connection.destination} cannot be reached: {error or 'timed out'}"
            return await self._respond(connection, "502 Bad Gateway", text)

    async def _connect(self, connection: _Connection, opening: _Opening, *, greeting: bool) -> bool:
        self._count_near(connection)
        server = connection.server = await self._dial(connection)
        got = b""
        if greeting:
            opening, got = await self._greet(connection, server, opening)
        ends = connection.client, server
        unread = b"" if opening.until is None else opening.kept
        sent = opening.sent
        relay = connection.relay = Relay(self._relays, ends, sent, got, opening.until, unread)
        relay.start(DIAL_SECONDS, opening.extra)
        orderly = await relay.done
        if isinstance(relay.error, UnreadableRequest):
            self._ask(connection, Said(HTTP, reason=str(relay.error)))
        elif relay.error is not None and not relay.dialled:
            raise relay.error
        return orderly

    async def _peek(self, connection: _Connection) -> tuple[Peeked, bytes]:
        data = bytearray()
        try:
            async with asyncio.timeout(PEEK_SECONDS):
                found = await self._look(connection, data, sniff.peek)
        except TimeoutError:
            found = Peeked(sniff.timed_out(bytes(data)))
        return found, bytes(data)

    async def _look(self, connection: _Connection, data: bytearray, look: _Look) -> Peeked:
        """Add the client's bytes to ``data`` until they can be judged."""
        looked_at = 0
        while (found := look(bytes(data), connection.port)) is None:
            data += await self._receive(connection.client)
            looked_at += len(data)
            if looked_at > MAX_LOOKED_AT:
                return Peeked(sniff.in_pieces(bytes(data)))
        return found

    async def _receive(self, end: socket.socket) -> bytes:
        data = await self._loop.sock_recv(end, READ_SIZE)
        if not data:
            raise ConnectionResetError("closed before it was judged")
        return data

    def _count_near(self, connection: _Connection) -> None:
        """Count a connection to a neighbour of the host; OSError if there are too many."""
        if not any(connection.destination in network for network in self.near):
            return
        others = self._by_source[connection.source]
        if not self.near_share.allows(sum(other.near for other in others)):
            if self._tell is not None:
                self._tell(connection.source, connection.destination, connection.port)
            raise ConnectionRefusedError("too many connections at once to neighbours of the host")
        connection.near = True
        self.near_share.take()

    async def _dial(self, connection: _Connection) -> socket.socket:
        """Begin to dial: the first write to the socket shows whether the server was reached."""
        version = connection.destination.version
        server = await self._sockets.take(socket.AF_INET if version == 4 else socket.AF_INET6)
        try:
            server.connect((str(connection.destination), connection.port))
        except BlockingIOError:
            pass
        except BaseException:
            server.close()
            raise
        return server

    async def _greet(
        self, connection: _Connection, server: socket.socket, opening: _Opening
    ) -> tuple[_Opening, bytes]:
        """Wait for the answer to the hello before anything else goes to the server.

        It may ask for a second hello, which must not name another host. What is still to be sent
        to the server, and to the client.
        """
        kept, answer = bytearray(opening.kept), b""
        async with asyncio.timeout(DIAL_SECONDS):
            await self._loop.sock_sendall(server, opening.sent)
        async with asyncio.timeout(ANSWER_SECONDS):
            while (again := sniff.asks_again(answer)) is None and len(answer) < PEEK_LIMIT:
                answer += await self._receive(server)
        if again is False:
            return _Opening(bytes(kept)), answer
        async with asyncio.timeout(PEEK_SECONDS):
            await self._loop.sock_sendall(connection.client, answer)
            second = await self._look(connection, kept, sniff.peek_again)
        if second.said != connection.said:
            said = Said(TLS, reason=second.said.reason or "its second TLS hello names another host")
            raise ConnectionAbortedError(self._ask(connection, said).reason)
        return _Opening(bytes(kept)), b""

    # Refusing.

    async def _refuse(self, connection: _Connection, reason: str) -> bool:
        said = connection.said
        if said is None or said.protocol != HTTP:
            return False
        text = f"k8e's egress policy refused this request to {said.name or 'an unknown host'}"
        return await self._respond(connection, "403 Forbidden", f"{text}: {reason}")

    async def _respond(self, connection: _Connection, status: str, text: str) -> bool:
        body = f"{text}\n".encode()
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        client = connection.client
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            async with asyncio.timeout(LINGER_SECONDS):
                await self._loop.sock_sendall(client, head.encode() + body)
                client.shutdown(socket.SHUT_WR)
                left = LINGER_BYTES  # a close with unread bytes would take the answer back
                while left > 0:
                    left -= len(await self._receive(client))
                    # While there is something to read, reading alone would starve the loop.
                    await asyncio.sleep(0)
        return True


def _open(peeked: Peeked, data: bytes) -> tuple[Said, _Opening]:
    """The bytes for the server, if the client's request is allowed."""
    said, rest = peeked.said, data[peeked.length :]
    if peeked.request is None:
        return said, _Opening(data[: peeked.length], rest)
    head, length = sniff.rewrite(peeked.request), peeked.request.body
    if length is not None:
        used = min(length, len(rest))
        return said, _Opening(head + rest[:used], b"", length - used, len(rest) - used)
    chunks = Chunked()
    first = rest[:FIRST_CHUNKS]
    try:
        used = chunks.feed(first)
    except UnreadableRequest as error:
        return replace(said, name="", reason=str(error)), _Opening(b"")
    if chunks.done:
        return said, _Opening(head + rest[:used], b"", chunks, len(rest) - used)
    return said, _Opening(head + first, rest[len(first) :], chunks)
