"""The TLS end of the gRPC endpoint: it may ask clients for a certificate, which gRPC cannot.

Python's gRPC server either demands a certificate of every client or asks no client for one. K8E's
clients use one port for both: for logging in without a certificate, and for everything else with
one. So this module speaks TLS, and passes the bytes on to gRPC on a unix socket that only it uses.

The name of our end of such a connection is what gRPC calls its peer; it is random, and taken for as
long as the connection lives. By it a call finds the connection that it came on, and so the address
and the certificate of its client. A connection that has no such name is not one of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple, cast

from k8e import access
from k8e.admission import Admission, UnknownConnection
from k8e.gateway import identity, tls

_DIALLED = "k8e_dialled"
"""An attribute of a connection's TLS object: the name of the server that the client asked for."""


class PeerCertificate(NamedTuple):
    """A client's certificate; TLS has checked that it is current and that our CA signed it."""

    name: str
    serial: str


class TlsPeer(NamedTuple):
    """The far end of a connection."""

    client: identity.TcpEnd
    server: identity.TcpEnd
    """Where the client dialled us."""
    certificate: PeerCertificate | None
    by_our_name: bool = True
    """False if the client dialled a name that is not in our certificate, wherever it led it here:
    the mark of a web page whose name was pointed at this machine."""


def tls_peer(transport: asyncio.Transport, is_ours: Callable[[str], bool]) -> TlsPeer | None:
    """Both ends of a connection, and the certificate that the client sent, if it did."""
    client, server = (transport.get_extra_info(what) for what in ("peername", "sockname"))
    if not client or not server:
        return None
    certificate: dict[str, Any] = transport.get_extra_info("peercert") or {}
    shown = None
    if certificate:
        fields = [pair for part in certificate.get("subject", ()) for pair in part]
        names = [str(value) for field, value in fields if field == "commonName"]
        serial = str(certificate.get("serialNumber", ""))
        shown = PeerCertificate(names[0] if len(names) == 1 else "", serial)
    dialled: str = getattr(transport.get_extra_info("ssl_object"), _DIALLED, "")
    ends = identity.endpoint(*client[:2]), identity.endpoint(*server[:2])
    return TlsPeer(*ends, shown, is_ours(dialled))


def _note_name(secured: Any, name: str | None, _: ssl.SSLContext) -> None:
    setattr(secured, _DIALLED, name or "")


def tls_context(folder: Path) -> ssl.SSLContext:
    """TLS with our certificate, for clients with a certificate of our CA or with none."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.load_cert_chain(folder / tls.CERT, folder / tls.KEY)
    made.load_verify_locations(folder / tls.CA_CERT)
    made.verify_mode = ssl.CERT_OPTIONAL
    made.set_alpn_protocols(["h2"])
    made.sni_callback = _note_name
    # Resumed sessions would carry a certificate from one connection to another, unchecked.
    made.options |= ssl.OP_NO_TICKET
    made.num_tickets = 0
    return made


log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0
STRANGER_SECONDS = 30.0
"""How long a connection may stay open on which no known caller makes a call."""
MAX_CONNECTIONS = 8192
MAX_OF_ADDRESS = 1024  # connections, so that one address cannot take them all …
MAX_OF_PRINCIPAL = 1024  # … nor one caller that has many addresses
MAX_STRANGERS = 512  # connections without a call of a known caller …
MAX_STRANGERS_OF_ADDRESS = 128  # … and of one address
BUFFER = 256 << 10  # bytes on their way, in each direction, before who sends them has to wait
_PEER_PREFIX = "unix-abstract:"
_NAME_PREFIX = "k8e-rpc-"


class TlsFront:
    """Listens with TLS, and knows the peer behind each connection."""

    def __init__(self, inner: Path, certificates: tls.Certificates) -> None:
        self._inner = inner
        self._certificates = certificates
        self._shown: tls.Identity | None = None
        self._context: ssl.SSLContext | None = None
        self._callers: dict[str, TlsPeer] = {}
        self._relays: dict[str, _Relay] = {}
        self._server: asyncio.Server | None = None
        self._handshakes: set[asyncio.Task[None]] = set()
        self._connections: Counter[str] = Counter()
        self._known: dict[str, dict[_Relay, None]] = {}  # by principal, oldest first
        self.admission = Admission(MAX_STRANGERS, MAX_STRANGERS_OF_ADDRESS)

    async def listen(self, endpoint: identity.TcpEnd) -> identity.TcpEnd:
        """Serve ``endpoint``; return the address, with the port if the kernel chose it."""
        host = str(endpoint.address)
        sock = socket.create_server(
            (host, endpoint.port),
            family=socket.AF_INET6 if endpoint.address.version == 6 else socket.AF_INET,
            backlog=512,
            dualstack_ipv6=host == "::",
        )
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Outer(self), sock=sock)
        return identity.TcpEnd(endpoint.address, self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Take no new connections; those that are open end with gRPC's own."""
        if self._server is not None:
            self._server.close()
        for task in list(self._handshakes):
            task.cancel()

    def caller(self, peer: str) -> TlsPeer | None:
        """The client behind gRPC's name of a peer."""
        return self._callers.get(peer.removeprefix(_PEER_PREFIX))

    @contextlib.contextmanager
    def recognised(self, peer: str, principal: str) -> Generator[None]:
        """Note that a known caller makes a call on a connection, which may therefore stay open."""
        relay = self._relays.get(peer.removeprefix(_PEER_PREFIX))
        if relay is None:
            yield
            return
        relay.recognise(principal)
        try:
            yield
        finally:
            relay.calls -= 1

    def doubt(self, peer: str) -> None:
        """Close a connection soon, unless a known caller makes a call on it."""
        if (relay := self._relays.get(peer.removeprefix(_PEER_PREFIX))) is not None:
            relay.doubt()

    def doubt_all(self, principal: str) -> None:
        """Close all connections soon of a caller whose key has ended."""
        for relay in self._relays.values():
            if relay.principal == principal:
                relay.doubt()

    @property
    def context(self) -> ssl.SSLContext:
        """The context for the next connection: a renewed certificate is used from then on."""
        if self._context is None or self._shown is not self._certificates.identity:
            self._shown = self._certificates.identity
            self._context = tls_context(self._certificates.folder)
        return self._context

    def enter(
        self, plain: asyncio.Transport, expel: Callable[[], object]
    ) -> UnknownConnection | None:
        """Count a new connection; None if there are too many already."""
        address, port = (plain.get_extra_info("peername") or ("", 0))[:2]
        if (
            self._connections[address] >= MAX_OF_ADDRESS
            or self._connections.total() >= MAX_CONNECTIONS
        ):
            return None
        group = ""
        if access.is_local_address(address):  # its users have all of 127.0.0.0/8 to choose from
            here = identity.endpoint(*plain.get_extra_info("sockname")[:2])
            group = f"uid {identity.owner(identity.endpoint(address, port), here)}"
        self._connections[address] += 1
        return self.admission.enter(address, expel, group=group)

    def begin(self, handshake: asyncio.Task[None]) -> None:
        """Keep a reference to a handshake until it is done."""
        self._handshakes.add(handshake)
        handshake.add_done_callback(self._handshaken)

    def _handshaken(self, task: asyncio.Task[None]) -> None:
        self._handshakes.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("a connection failed: %s", error)

    def connections(self, address: str) -> int:
        """The number of connections of an address."""
        return self._connections[address]

    def leave(self, address: str) -> None:
        """The end of a connection that was counted."""
        self._connections[address] -= 1
        if self._connections[address] <= 0:
            del self._connections[address]

    def claim(self, relay: _Relay, principal: str) -> None:
        """Assign a connection to ``principal``; of too many, the idle one that is oldest ends."""
        self.disclaim(relay)
        relay.principal = principal
        known = self._known.setdefault(principal, {})
        known[relay] = None
        if len(known) > MAX_OF_PRINCIPAL:
            next((item for item in known if not item.calls), relay).abort()

    def disclaim(self, relay: _Relay) -> None:
        """Forget a connection that has ended."""
        known = self._known.get(relay.principal, {})
        known.pop(relay, None)
        if not known:
            self._known.pop(relay.principal, None)

    def is_ours(self, name: str) -> bool:
        """Whether a client that asks for a server of this name can mean us."""
        return not name or self._certificates.is_for(name)

    def connect(self, caller: TlsPeer, relay: _Relay) -> tuple[str, socket.socket]:
        """A connection to gRPC by which ``caller`` can be found."""
        name = _NAME_PREFIX + secrets.token_hex(16)
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            inner.setblocking(False)
            inner.bind("\0" + name)
            # At once, or not at all: gRPC's backlog is long, and it takes from it in a thread.
            inner.connect(str(self._inner))
        except OSError:
            inner.close()
            raise
        self._callers[name] = caller
        self._relays[name] = relay
        return name, inner

    def forget(self, name: str) -> None:
        self._callers.pop(name, None)
        self._relays.pop(name, None)


class _Outer(asyncio.Protocol):
    """A new TCP connection: nothing is known of its client before TLS."""

    def __init__(self, front: TlsFront) -> None:
        self._front = front

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        plain = cast("asyncio.Transport", transport)
        relay = _Relay(self._front, plain)
        if not relay.enter():
            plain.abort()
            return
        # asyncio does this only where a socket says by itself that it is TCP; ours do not.
        sock: socket.socket = plain.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.pause_reading()
        relay.handshake = asyncio.create_task(self._secure(plain, relay))
        self._front.begin(relay.handshake)

    async def _secure(self, plain: asyncio.Transport, relay: _Relay) -> None:
        loop = asyncio.get_running_loop()
        try:
            secured = await loop.start_tls(
                plain,
                relay,
                self._front.context,
                server_side=True,
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
                ssl_shutdown_timeout=1.0,
            )
        except BaseException as error:
            relay.leave()
            plain.abort()
            if not isinstance(error, OSError):
                raise
            return  # a port scan, a stranger's certificate, a lost client
        if secured is not None:
            await relay.begin(secured)


class _Relay(asyncio.Protocol):
    """The bytes of a client, and those for it. ``other`` is the same towards gRPC."""

    def __init__(self, front: TlsFront, plain: asyncio.Transport) -> None:
        self._front = front
        self._plain = plain
        self._stranger: UnknownConnection | None = None
        self.handshake: asyncio.Task[None] | None = None
        self._name = ""
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []
        self._lost = False
        self._left = False
        self._patience: asyncio.TimerHandle | None = None
        self.principal = ""
        """Who made the last call here, if we knew who that was."""
        self.calls = 0
        """Calls under way of those that we know."""
        self.other: _Inner | None = None

    def enter(self) -> bool:
        """Take one of the places for strangers; False if there is none."""
        self._stranger = self._front.enter(self._plain, self._expel)
        return self._stranger is not None

    def _expel(self) -> None:
        """Close the connection, because another client needs its place."""
        log.debug("closed a silent connection of %s", self._plain.get_extra_info("peername"))
        if self.handshake is not None:
            self.handshake.cancel()
        (self._transport or self._plain).abort()
        self.leave()

    async def begin(self, transport: asyncio.Transport) -> None:
        """Connect with gRPC, now that the handshake has identified the client."""
        self._transport = transport
        caller = tls_peer(transport, self._front.is_ours)
        if caller is None or self._lost:
            transport.abort()
            return
        if caller.certificate is not None and self._stranger is not None:
            self._front.admission.vouch(self._stranger)
        self.doubt()
        transport.set_write_buffer_limits(BUFFER)
        try:
            self._name, sock = self._front.connect(caller, self)
        except OSError as error:
            log.warning("a connection cannot be passed on to gRPC: %s", error)
            transport.abort()
            return
        inner = _Inner(self, transport)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: inner, sock=sock)
        except BaseException:
            self._front.forget(self._name)
            sock.close()
            transport.abort()
            raise
        self.other = inner
        for data in self._early:
            inner.write(data)
        self._early.clear()
        if self._lost:
            inner.close()

    def recognise(self, principal: str) -> None:
        self.calls += 1
        if principal != self.principal and not self._lost:
            self._front.claim(self, principal)
        if self._stranger is not None and self._stranger.pool is not None:
            self._front.admission.admit(self._stranger)
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def doubt(self) -> None:
        if self._patience is None and not self._lost:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(STRANGER_SECONDS, self._give_up)

    def _give_up(self) -> None:
        self._patience = None
        if self.calls:  # a proxy may carry strangers beside them; they end with their own calls
            self.doubt()
        else:
            where = self._plain.get_extra_info("peername")
            log.debug("closed a connection of %s: no known caller", where)
            self.abort()

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early.append(data)
        else:
            self.other.write(data)

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.hold()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if self._patience is not None:
            self._patience.cancel()
        self._front.disclaim(self)
        self.leave()
        if self.other is not None:
            self.other.close()
        elif self._name:
            self._front.forget(self._name)

    def leave(self) -> None:
        """Count the connection out, once: a failed handshake may be reported twice."""
        if self._stranger is not None and not self._left:
            self._left = True
            self._stranger.leave()
            self._front.leave(self._stranger.address)

    def inner_lost(self) -> None:
        """Close the connection, because gRPC has closed its end."""
        self._front.forget(self._name)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()


class _Inner(asyncio.Protocol):
    """Our end of the connection with gRPC."""

    def __init__(self, outer: _Relay, towards_client: asyncio.Transport) -> None:
        self._outer = outer
        self._client = towards_client
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(BUFFER)

    def data_received(self, data: bytes) -> None:
        if not self._client.is_closing():
            self._client.write(data)

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def hold(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def go_on(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self._client.pause_reading()

    def resume_writing(self) -> None:
        self._client.resume_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._outer.inner_lost()
