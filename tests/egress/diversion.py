"""A client, a router with a proxy, and a world with servers, out of network namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import ipaddress
import os
import shutil
import socket
import ssl
import struct
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from k8e.egress import namespaces, rules
from k8e.egress.netlink import EVERYWHERE, Netlink, Route
from k8e.egress.nftables import Nftables
from k8e.egress.policy import Address
from k8e.egress.proxy import ALLOWED, PEEK, Proxy, ProxyDecision, refused
from k8e.egress.sniff import Said

T = TypeVar("T")
Handler = Callable[[socket.socket], object]

CDN4, CDN6 = "93.184.216.34", "2606:4700::5"
ELSEWHERE = "93.184.216.35"  # an address that no name led to
CLIENT4, CLIENT6 = "198.18.0.2", "fd6b:3865:0:1::2"
DNS = "198.19.255.1"
GOOD, BAD = "good.example.org", "evil.example.org"
SECONDS = 30.0

TABLE = f"""
table inet k8e {{
    set members4 {{ type ifname . ipv4_addr; elements = {{ "sb0" . {CLIENT4} }} }}
    set members6 {{ type ifname . ipv6_addr; elements = {{ "sb0" . {CLIENT6} }} }}
    set near4 {{ type ipv4_addr; flags interval; }}
    set near6 {{ type ipv6_addr; flags interval; }}
    set own4 {{ type ipv4_addr; elements = {{ 198.19.255.253 }} }}
    set own6 {{ type ipv6_addr; }}
    {rules.TPROXY_SETS}
    chain refuse {{
        meta l4proto tcp reject with tcp reset
        reject with icmpx admin-prohibited
    }}
    {rules.tproxy_chain(DNS)}
    chain forward {{
        type filter hook forward priority filter; policy drop;
        ct state established accept
        iifname "sb0" oifname "up" iifname != @strict accept
        iifname "sb0" goto refuse
    }}
    chain input {{
        type filter hook input priority filter; policy drop;
        iifname lo accept
        iifname "up" ct state established accept
        {rules.TPROXY_INPUT}
        icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept
        iifname "sb0" goto refuse
    }}
    chain output {{
        type filter hook output priority filter; policy drop;
        oifname lo accept
        ct state established,related accept
        {rules.TPROXY_OUTPUT}
        icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept
        meta l4proto {{ icmp, ipv6-icmp }} accept
        meta l4proto tcp tcp flags rst accept
    }}
    chain nat {{
        type nat hook postrouting priority srcnat;
        oifname "up" masquerade
    }}
}}
"""


def _interfaces(*texts: str) -> list[ipaddress.IPv4Interface | ipaddress.IPv6Interface]:
    return [ipaddress.ip_interface(text) for text in texts]


def _configure(link: str, *addresses: str, gateways: tuple[str, ...] = ()) -> None:
    netlink = Netlink()
    try:
        netlink.configure(socket.if_nametoindex("lo"), [])
        routes: list[Route] = []
        for text in gateways:
            gateway = ipaddress.ip_address(text)
            routes.append(Route(EVERYWHERE[gateway.version == 6], gateway))
        netlink.configure(socket.if_nametoindex(link), _interfaces(*addresses), routes)
    finally:
        netlink.close()


class Diversion:
    """The stage of a test; what its policy says can be changed at any time."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="k8e-strict-"))
        self.client, self.router, self.world = (
            self.folder / name for name in ("client", "router", "world")
        )
        self.names = {GOOD}
        self.networks: set[tuple[str, int]] = set()
        self.asked: list[tuple[str, str, int, Said | None]] = []
        self.denied: list[Said | None] = []
        self.told: list[tuple[str, str, int]] = []
        for path in (self.client, self.router, self.world):
            namespaces.make(path)
        self._listeners: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._wire()
        self._resident = namespaces.Resident(self.router)
        self._nft = self._resident.run(Nftables)
        self.nft(TABLE)
        self.proxy = self.make_proxy()

    def _wire(self) -> None:
        with self.client.open("rb") as client, self.world.open("rb") as world:

            def in_router() -> None:
                netlink = Netlink()
                netlink.add_veth("sb0", "eth0", client.fileno())
                netlink.add_veth("up", "down", world.fileno())
                netlink.close()
                _configure("sb0", "198.18.0.1/30", "fd6b:3865:0:1::1/126")
                _configure(
                    "up",
                    "198.19.255.254/30",
                    "fd6b:3865:0:2::2/126",
                    gateways=("198.19.255.253", "fd6b:3865:0:2::1"),
                )
                for file in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
                    Path("/proc/sys/net", file).write_text("1", "ascii")
                netlink = Netlink()
                for _ in range(2):  # a gateway that starts again does it again
                    rules.set_up_routing(netlink)
                netlink.close()

            namespaces.run_in(self.router, in_router)
        gateways = ("198.18.0.1", "fd6b:3865:0:1::1")
        self.in_client(
            lambda: _configure("eth0", f"{CLIENT4}/30", f"{CLIENT6}/126", gateways=gateways)
        )
        self.in_world(lambda: _configure("down", "198.19.255.253/30", "fd6b:3865:0:2::1/126"))
        self.in_world(lambda: _configure("lo", CDN4, CDN6, ELSEWHERE))

    def nft(self, text: str) -> str:
        return self._resident.run(self._nft.run, text)

    def strict(self, *, on: bool = True) -> None:
        self.nft(f'{"add" if on else "delete"} element inet k8e strict {{ "sb0" }}')

    def make_proxy(self) -> Proxy:
        def make_socket(family: int, kind: int) -> socket.socket:
            return self._resident.run(socket.socket, family, kind)

        return Proxy(make_socket, self.decide, self.tell)

    def tell(self, source: str, address: Address, port: int) -> None:
        self.told.append((source, str(address), port))

    def decide(
        self, source: str, address: Address, port: int, said: Said | None, again: bool = False
    ) -> ProxyDecision:
        self.asked.append((source, str(address), port, said))
        if (str(address), port) in self.networks:
            return ALLOWED
        if source in (CLIENT4, CLIENT6) and str(address) in (CDN4, CDN6):
            if said is None:
                return PEEK
            if said.name in self.names:
                return ALLOWED
        self.denied.append(said)
        return refused((said and said.reason) or "not in the allow-list")

    def add_client_address(self, text: str) -> None:
        self.in_client(lambda: _configure("eth0", text))

    # Inside.

    def in_client(self, function: Callable[[], T]) -> T:
        return namespaces.run_in(self.client, function)

    def in_world(self, function: Callable[[], T]) -> T:
        return namespaces.run_in(self.world, function)

    def connect(self, host: str = CDN4, port: int = 443, *, mark: int = 0) -> socket.socket:
        """A connection of the client's; blocking."""

        def inside() -> socket.socket:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            made = socket.socket(family, socket.SOCK_STREAM)
            made.settimeout(SECONDS)
            try:
                if mark:
                    made.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
                made.connect((host, port))
            except BaseException:
                made.close()
                raise
            return made

        return self.in_client(inside)

    def serve(self, port: int, handler: Handler) -> None:
        """Have connections to all addresses of the world handled, each in a thread."""
        listener = self.in_world(
            lambda: socket.create_server(
                ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128
            )
        )
        self._listeners.append(listener)
        thread = threading.Thread(target=self._accept, args=(listener, handler), daemon=True)
        thread.start()
        self._threads.append(thread)

    def _accept(self, listener: socket.socket, handler: Handler) -> None:
        def handle(accepted: socket.socket) -> None:
            with accepted, contextlib.suppress(OSError):
                accepted.settimeout(SECONDS * 2)
                handler(accepted)

        with contextlib.suppress(OSError):
            while True:
                accepted, _ = listener.accept()
                thread = threading.Thread(target=handle, args=(accepted,), daemon=True)
                thread.start()
                self._threads.append(thread)

    async def close(self) -> None:
        self.proxy.close()
        await self.proxy.wait_closed()
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for thread in self._threads:
            await asyncio.to_thread(thread.join, SECONDS * 3)
            assert not thread.is_alive()
        self._resident.run(self._nft.close)
        self._resident.close()
        for path in (self.client, self.router, self.world):
            namespaces.unmount(path)
        shutil.rmtree(self.folder)


def not_root() -> bool:
    return os.geteuid() != 0


def descriptors() -> set[str]:
    """The sockets and pipes of this process."""
    found: set[str] = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(path.readlink()))
    return {text for text in found if text.startswith(("socket:", "pipe:"))}


async def diversion() -> AsyncGenerator[Diversion]:
    """What the fixture of a test yields; it checks that nothing is left."""
    await asyncio.to_thread(int)  # the pool's threads are not the test's
    before = descriptors()
    made = Diversion()
    made.strict()
    await made.proxy.start()
    yield made
    await made.close()
    left = descriptors() - before
    assert not left, left
    assert str(made.folder) not in Path("/proc/self/mountinfo").read_text("utf-8")  # noqa: ASYNC240 - no disk


@functools.cache
def _certificate() -> tuple[str, str]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "cdn")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return made.public_bytes(serialization.Encoding.PEM).decode(), private.decode()


def server_context(folder: Path, on_name: Callable[[str], None]) -> ssl.SSLContext:
    """TLS for every name; ``on_name`` hears which one was asked for."""
    certificate, key = _certificate()
    path = folder / "cdn.pem"
    path.write_text(certificate + key, "ascii")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)

    def callback(_: ssl.SSLObject, name: str | None, __: ssl.SSLContext) -> None:
        on_name(name or "")

    context.sni_callback = callback
    return context


def client_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def client_hello(name: str | None, context: ssl.SSLContext | None = None) -> bytes:
    """The real ClientHello of a real TLS library."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    made = (context or client_context()).wrap_bio(incoming, outgoing, server_hostname=name)
    with contextlib.suppress(ssl.SSLWantReadError):
        made.do_handshake()
    return outgoing.read()


def reset(end: socket.socket) -> None:
    """Close with a RST."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


def receive_all(end: socket.socket) -> bytes:
    """Everything until the other side ends."""
    parts: list[bytes] = []
    while data := end.recv(1 << 16):
        parts.append(data)
    return b"".join(parts)


def get(name: str, *headers: str) -> bytes:
    return "\r\n".join(["GET /page HTTP/1.1", f"Host: {name}", *headers, "", ""]).encode()


class Tls:
    """A CDN's TLS front: serves every tenant, and knows which one was asked for."""

    def __init__(self, stage: Diversion) -> None:
        self.names: list[str] = []
        self.context = server_context(stage.folder, self.names.append)
        stage.serve(443, self._handle)

    def _handle(self, accepted: socket.socket) -> None:
        with self.context.wrap_socket(accepted, server_side=True) as server:
            server.sendall(b"hello " + server.recv(100))


def say_tls(stage: Diversion, name: str | None, address: str = CDN4) -> bytes:
    with (
        stage.connect(address) as raw,
        client_context().wrap_socket(raw, server_hostname=name) as client,
    ):
        client.sendall(b"you")
        return receive_all(client)


def is_refused(stage: Diversion, data: bytes, address: str = CDN4, port: int = 443) -> bool:
    """Whether a connection that begins like this is reset, and soon."""
    began = time.monotonic()
    try:
        with stage.connect(address, port) as client:  # a quick reset may overtake this
            client.sendall(data)
            receive_all(client)
    except (ConnectionResetError, BrokenPipeError):
        return time.monotonic() - began < 2
    return False


def is_reset(client: socket.socket) -> bool:
    """Whether a connection ends with a reset, and soon."""
    began = time.monotonic()
    try:
        receive_all(client)
    except ConnectionResetError:
        return time.monotonic() - began < 1
    return False


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that the loop brings about."""
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0)
