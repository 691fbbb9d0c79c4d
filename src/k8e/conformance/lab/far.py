"""The far hosts: a CDN with two tenants, web servers, a metadata service, an attacker; and a tap.

All of them record their visitors. The tap sees every packet that leaves the router, whether or not
there is a receiver: so "nothing gets out" is checked to the packet.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import http.server
import ipaddress
import json
import queue
import select
import socket
import socketserver
import ssl
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from k8e.conformance.lab.internet import Internet
from k8e.egress import namespaces, nflog

WEB, WEB6, OTHER = "93.184.216.34", "2606:4700::34", "93.184.216.35"
CDN, CDN6 = "93.184.216.40", "2606:4700::40"
DOH = "93.184.216.99"  # a public resolver that is not ours
PUBLIC = (WEB, WEB6, OTHER, CDN, CDN6, DOH)
METADATA = ("169.254.169.254", "fd00:ec2::254", "100.100.100.200", "168.63.129.16")
PRIVATE = ("10.9.9.9", "172.16.9.9", "192.168.9.9", "100.64.9.9", "fd00::9", "fec0::9")
GREETING_PORTS = (22, 53, 853, 8080)
CALLING_PORT = 7000
ECHO_PORTS = (53, 123, 443, 853, 8080)
TENANTS = ("a.cdn.test", "b.cdn.test", "web.test", "other.test")
NAMES = {
    "web.test": [WEB, WEB6],
    "other.test": [OTHER],
    "a.cdn.test": [CDN, CDN6],
    "b.cdn.test": [CDN, CDN6],
}
PATIENCE = 20.0


class FarAuthority:
    """Certificates for the tenants, all by one authority."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._sign("far", self._key.public_key(), authority=True)
        self.certificate = self._certificate.public_bytes(serialization.Encoding.PEM).decode()
        """What clients trust, as PEM."""

    @functools.cache  # noqa: B019 - there is one of these, and it lives as long as its tests
    def identity(self, name: str) -> Path:
        """A file with the certificate and the key of a tenant."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(name, key.public_key())
        path = self._folder / f"{name}.pem"
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM) + private)
        return path

    def _sign(
        self, name: str, key: ec.EllipticCurvePublicKey, *, authority: bool = False
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        day = datetime.timedelta(days=1)
        common = x509.NameOID.COMMON_NAME
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(common, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(common, "far")]))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
            .add_extension(x509.BasicConstraints(authority, None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        )
        return builder.sign(self._key, hashes.SHA256())


# Servers.


class AddressServer(socketserver.BaseRequestHandler):
    """Answers with the address at which it was reached."""

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            self.request.sendall(self.request.getsockname()[0].removeprefix("::ffff:").encode())


class Web(http.server.BaseHTTPRequestHandler):
    """Answers with the request; ``?to=URL`` redirects, ``/call`` passes the connection on."""

    protocol_version = "HTTP/1.1"
    timeout = PATIENCE
    far: ClassVar[Far]
    server_name = ""

    def __init__(self, *arguments: Any) -> None:
        with contextlib.suppress(OSError):  # a client that was refused halfway
            super().__init__(*arguments)

    def do_GET(self) -> None:
        asked = {
            "address": self.connection.getsockname()[0].removeprefix("::ffff:"),
            "server_name": self.server_name,
            "host": self.headers.get("Host", ""),
            "path": self.path,
        }
        self.far.requests.append(asked)
        if self.path == "/call":
            self.send_response(200)
            self.end_headers()
            self.far.callers.put(self.connection)
            self.far.closing.wait(3 * PATIENCE)
            return
        to = parse_qs(urlsplit(self.path).query).get("to", [""])[0]
        body = json.dumps(asked).encode()
        self.send_response(302 if to else 200)
        if to:
            self.send_header("Location", to)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's word
        """Log nothing."""


class Tenants(Web):
    """The same behind TLS, for every tenant; a client that sends no name gets the first one."""

    def setup(self) -> None:
        context = self._context(TENANTS[0])
        context.sni_callback = self._choose
        self.request.settimeout(PATIENCE)
        self.request = context.wrap_socket(self.request, server_side=True)
        super().setup()

    def finish(self) -> None:
        super().finish()
        self.request.close()  # the server knows only what it wrapped

    def _context(self, name: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.far.authority.identity(name))
        return context

    def _choose(self, made: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        self.server_name = name or ""
        self.far.server_names.append(self.server_name)
        if name in TENANTS:
            made.context = self._context(name)


class CallBack(socketserver.BaseRequestHandler):
    """Hands the connection to the test, and keeps it open."""

    far: ClassVar[Far]

    def handle(self) -> None:
        self.request.settimeout(PATIENCE)
        self.far.callers.put(self.request)
        self.far.closing.wait(3 * PATIENCE)


class Echo(threading.Thread):
    """Sends datagrams back, from the addresses that they were sent to."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        super().__init__(daemon=True)
        self._sockets = sockets
        self._wake, self._woken = socket.socketpair()

    def run(self) -> None:
        while True:
            ready, _, _ = select.select([*self._sockets, self._woken], [], [])
            if self._woken in ready:
                return
            for item in ready:
                data, source = item.recvfrom(2000)
                item.sendto(data, source)

    def stop(self) -> None:
        self._wake.send(b"x")
        self.join(5)
        for item in (*self._sockets, self._wake, self._woken):
            item.close()


class Far:
    """All hosts of the internet."""

    def __init__(self, internet: Internet, folder: Path) -> None:
        self.requests: list[dict[str, str]] = []
        self.server_names: list[str] = []
        self.callers: queue.Queue[socket.socket] = queue.Queue()
        self.closing = threading.Event()
        self.authority = FarAuthority(folder)
        for name in TENANTS:
            self.authority.identity(name)
        internet.own(*PUBLIC, *METADATA, *PRIVATE)
        internet.names.update(NAMES)
        for port in GREETING_PORTS:
            internet.serve(("::", port), AddressServer)
        Web.far = CallBack.far = self  # there is one internet at a time
        for port, handler in ((80, Web), (443, Tenants), (CALLING_PORT, CallBack)):
            internet.serve(("::", port), handler)
        self._echo = Echo(internet.inside(self._echoes))
        self._echo.start()

    @staticmethod
    def _echoes() -> list[socket.socket]:
        made: list[socket.socket] = []
        for address in (WEB, WEB6, OTHER, CDN, DOH, *METADATA, *PRIVATE):
            for port in ECHO_PORTS:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                made.append(socket.socket(family, socket.SOCK_DGRAM))
                made[-1].bind((address, port))
        return made

    def caller(self) -> socket.socket:
        """The next connection of a sandbox that calls."""
        return self.callers.get(timeout=PATIENCE)

    def close(self) -> None:
        self.closing.set()
        self._echo.stop()


# Recording packets.


class Tap:
    """Records every packet that arrives at a link; by default, those that leave the router."""

    def __init__(self, namespace: Path, link: str = "k8e-up") -> None:
        """``link`` is the prefix of the names of the links to watch."""
        self._link = link
        everything = socket.htons(0x0003)
        self._socket = namespaces.run_in(
            namespace, lambda: socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, everything)
        )
        self._socket.setblocking(False)

    def take(self) -> list[str]:
        """The packets since the last call, as protocol, address and port."""
        return [text for text in self._read() if text]

    def _read(self) -> Generator[str]:
        with contextlib.suppress(BlockingIOError):
            while True:
                data, source = self._socket.recvfrom(65535)
                link, direction = source[0], source[2]
                if link.startswith(self._link) and direction != socket.PACKET_OUTGOING:
                    yield _describe(data)

    def close(self) -> None:
        self._socket.close()


def _describe(data: bytes) -> str:
    packet = nflog.parse_packet(0, data)
    if packet is None:
        return f"something else: {data[:40].hex()}"
    # What every IPv6 stack says to its neighbours; the router itself, in this case.
    local = ipaddress.ip_address(packet.address)
    if packet.protocol in ("icmp", "0") and (local.is_multicast or local.is_link_local):
        return ""
    return f"{packet.protocol} {packet.address} {packet.port}"
