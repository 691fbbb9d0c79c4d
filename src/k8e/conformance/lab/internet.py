"""A small internet of network namespaces: a host, far hosts, a resolver; nothing real."""

from __future__ import annotations

import ipaddress
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset

from k8e.egress import namespaces
from k8e.egress.dns import Upstream
from k8e.egress.netlink import EVERYWHERE, Netlink, Route

PORTS = (80, 443, 8080)
RESOLVER = "93.184.216.53"
HOST, FAR = "192.0.2.2/30", "192.0.2.1/30"
HOST6, FAR6 = "2001:db8:ffff::2/126", "2001:db8:ffff::1/126"
T = TypeVar("T")


class Greeter(socketserver.BaseRequestHandler):
    """Answers with the address at which it was reached, then echoes one message."""

    def handle(self) -> None:
        here: str = self.request.getsockname()[0].removeprefix("::ffff:")
        self.request.sendall(f"{here}\n".encode())
        data = self.request.recv(100)
        if data:
            self.request.sendall(data)


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    address_family = socket.AF_INET6
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64


class Internet:
    """``world`` stands for k8e's host; everything else is far away, one wire from it."""

    def __init__(self, folder: Path) -> None:
        self.world, self.far = folder / "world", folder / "far"
        self.names: dict[str, list[str]] = {}
        """Names to addresses; an entry that starts with ``=`` is an alias."""
        self.ttl = 60
        self.asked: list[str] = []
        self.craft: Callable[[dns.message.Message], list[bytes] | None] | None = None
        """What the resolver sends instead, as an attacker's would; None for its usual answer."""
        self._servers: list[_Server] = []
        namespaces.make(self.far)
        far = self.far.open("rb")
        with far:
            namespaces.make(self.world, lambda: self._wire(far.fileno()))
        self.inside(lambda: _configure("wan", [FAR, FAR6]))
        self.inside(lambda: _configure("lo", [RESOLVER]))
        self._resolver = _Resolver(self, self.inside(self._resolver_socket))
        self._resolver.start()

    @staticmethod
    def _wire(far: int) -> None:
        netlink = Netlink()
        try:
            netlink.add_veth("wan", "wan", far)
        finally:
            netlink.close()
        _configure("lo", [])
        gateways = [ipaddress.ip_interface(text).ip for text in (FAR, FAR6)]
        _configure("wan", [HOST, HOST6], map(Route, EVERYWHERE, gateways))

    @staticmethod
    def _resolver_socket() -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.bind((RESOLVER, 53))
        return made

    @property
    def upstream(self) -> Upstream:
        return Upstream(RESOLVER)

    def inside(self, function: Callable[[], T]) -> T:
        """Run a function in the far namespace."""
        return namespaces.run_in(self.far, function)

    def own(self, *addresses: str) -> None:
        """Add far addresses, without servers behind them."""
        self.inside(lambda: _configure("lo", addresses))

    def host(self, *addresses: str) -> None:
        """Put web servers behind these addresses, on a few ports."""
        self.inside(lambda: _configure("lo", addresses))
        if not self._servers:
            for port in PORTS:
                self.serve(("::", port), Greeter)

    def serve(
        self, address: tuple[str, int], handler: type[socketserver.BaseRequestHandler]
    ) -> socketserver.TCPServer:
        """Serve in the far namespace, in a thread, until the end."""
        server = self.inside(lambda: _Server(address, handler))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self._servers.append(server)
        return server

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self._resolver.stop()
        namespaces.unmount(self.world)
        namespaces.unmount(self.far)


def _configure(name: str, addresses: Iterable[str], routes: Iterable[Route] = ()) -> None:
    netlink = Netlink()
    try:
        # ip_interface of a bare address has the full prefix length.
        items = [ipaddress.ip_interface(text) for text in addresses]
        netlink.configure(socket.if_nametoindex(name), items, routes)
    finally:
        netlink.close()


class _Resolver(threading.Thread):
    """The resolver that the host uses."""

    def __init__(self, internet: Internet, listening: socket.socket) -> None:
        super().__init__(daemon=True)
        self._internet = internet
        self._socket = listening

    def stop(self) -> None:
        def wake() -> None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as waker:
                waker.sendto(b"", (RESOLVER, 53))

        self._internet.inside(wake)
        self.join(5)
        self._socket.close()

    def run(self) -> None:
        while True:
            data, source = self._socket.recvfrom(4096)
            if not data:
                return
            query = dns.message.from_wire(data)
            self._internet.asked.append(query.question[0].name.to_text(omit_final_dot=True))
            crafted = self._internet.craft(query) if self._internet.craft is not None else None
            for answer in [self._answer(query)] if crafted is None else crafted:
                self._socket.sendto(answer, source)

    def _answer(self, query: dns.message.Message) -> bytes:
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True)
        answer = dns.message.make_response(query)
        if name not in self._internet.names:
            answer.set_rcode(dns.rcode.NXDOMAIN)
            return answer.to_wire()
        owner = question.name
        ttl = self._internet.ttl
        entries = self._internet.names[name]
        while entries and entries[0].startswith("="):
            alias = entries[0][1:]
            answer.answer.append(dns.rrset.from_text(owner, ttl, "IN", "CNAME", alias + "."))
            owner = dns.name.from_text(alias)
            entries = self._internet.names.get(alias, [])
        version = 4 if question.rdtype == dns.rdatatype.A else 6
        fitting = [e for e in entries if ipaddress.ip_address(e).version == version]
        if fitting:
            kind = dns.rdatatype.to_text(question.rdtype)
            answer.answer.append(dns.rrset.from_text_list(owner, ttl, "IN", kind, fitting))
        return answer.to_wire()
