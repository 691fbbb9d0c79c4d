"""A small internet out of network namespaces: web servers, a resolver, and nothing real."""

from __future__ import annotations

import ipaddress
import socket
import socketserver
import threading
from pathlib import Path

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

from k8e.egress import namespaces
from k8e.egress.dns import Upstream
from k8e.egress.netlink import Netlink

PORTS = (80, 443, 8080)


class _Greeter(socketserver.BaseRequestHandler):
    """Says where it was reached, then echoes one message."""

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


class Internet:
    """Hosts with addresses, and the names by which a resolver knows them."""

    def __init__(self, folder: Path) -> None:
        self.world = folder / "world"
        self.names: dict[str, list[str]] = {}
        """Names to addresses; an entry that starts with ``=`` is an alias."""
        self.ttl = 60
        self.asked: list[str] = []
        self._servers: list[_Server] = []
        namespaces.make(self.world)
        self._resolver = _Resolver(self)
        self._resolver.start()

    @property
    def upstream(self) -> Upstream:
        return Upstream("127.0.0.1", self._resolver.port)

    def host(self, *addresses: str) -> None:
        """Put web servers behind these addresses, on a few ports."""

        def inside() -> list[_Server]:
            with open(self.world, "rb") as file:
                namespaces.enter(file.fileno())
            netlink = Netlink()
            try:
                # ip_interface of a bare address has the full prefix length.
                items = [ipaddress.ip_interface(text) for text in addresses]
                netlink.configure(socket.if_nametoindex("lo"), items)
            finally:
                netlink.close()
            if self._servers:
                return []
            return [_Server(("::", port), _Greeter) for port in PORTS]

        made = namespaces.run_apart(inside)
        for server in made:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        self._servers += made

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self._resolver.stop()
        namespaces.unmount(self.world)


class _Resolver(threading.Thread):
    """The world's resolver, on a loopback port of the host."""

    def __init__(self, internet: Internet) -> None:
        super().__init__(daemon=True)
        self._internet = internet
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]

    def stop(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as waker:
            waker.sendto(b"", ("127.0.0.1", self.port))
        self.join(5)
        self._socket.close()

    def run(self) -> None:
        while True:
            data, source = self._socket.recvfrom(4096)
            if not data:
                return
            self._socket.sendto(self._answer(data), source)

    def _answer(self, data: bytes) -> bytes:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True)
        self._internet.asked.append(name)
        answer = dns.message.make_response(query)
        if name not in self._internet.names:
            answer.set_rcode(dns.rcode.NXDOMAIN)
            return answer.to_wire()
        owner = question.name
        entries = self._internet.names[name]
        while entries and entries[0].startswith("="):
            alias = entries[0][1:]
            text = alias + "."
            answer.answer.append(dns.rrset.from_text(owner, self._internet.ttl, "IN", "CNAME", text))
            owner = answer.answer[-1][0].target
            entries = self._internet.names.get(alias, [])
        version = 4 if question.rdtype == dns.rdatatype.A else 6
        fitting = [e for e in entries if ipaddress.ip_address(e).version == version]
        if fitting:
            kind = dns.rdatatype.to_text(question.rdtype)
            answer.answer.append(
                dns.rrset.from_text_list(owner, self._internet.ttl, "IN", kind, fitting)
            )
        return answer.to_wire()
