"""A world of network namespaces: a host's network, a web server far away, and a resolver."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import socketserver
import threading
from collections.abc import Generator, Iterable
from pathlib import Path

import dns.message
import dns.rdatatype
import dns.rrset

from k8e.egress import namespaces
from k8e.egress.netlink import Netlink, Route
from k8e.egress.policy import Network

NAME = "web.bench.test"
SERVER, RESOLVER = "93.184.216.34", "93.184.216.53"
HERE, THERE = "192.0.2.2/30", "192.0.2.1/30"
PIECE = bytes(1 << 20)
EVERYWHERE: Network = ipaddress.ip_network("0.0.0.0/0")


class _Web(socketserver.BaseRequestHandler):
    """Answers every request with as many bytes as its path says."""

    def handle(self) -> None:
        with self.request.makefile("rb") as reader:
            while line := reader.readline():
                while reader.readline().strip():
                    pass
                size = int(line.split()[1].strip(b"/"))
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode()
                if size < len(PIECE):
                    self.request.sendall(head + PIECE[:size])
                    continue
                self.request.sendall(head)
                for _ in range(size // len(PIECE)):
                    self.request.sendall(PIECE)


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves is no news."""


@contextlib.contextmanager
def made(folder: Path) -> Generator[Path]:
    """The path of the namespace that stands for the host's network, with everything behind it."""
    folder.mkdir()
    world, far = folder / "world", folder / "far"
    namespaces.make(far)
    try:
        with far.open("rb") as file:
            descriptor = file.fileno()
            namespaces.make(world, lambda: _wire(descriptor))
        try:
            namespaces.run_in(far, lambda: _configure("lo", [f"{SERVER}/32", f"{RESOLVER}/32"]))
            namespaces.run_in(far, lambda: _configure("wan", [THERE]))
            with _web(far), _resolver(far):
                yield world
        finally:
            namespaces.unmount(world)
    finally:
        namespaces.unmount(far)


def _wire(far: int) -> None:
    netlink = Netlink()
    try:
        netlink.add_veth("wan", "wan", far)
    finally:
        netlink.close()
    _configure("wan", [HERE], [Route(EVERYWHERE, ipaddress.ip_interface(THERE).ip)])


def _configure(name: str, addresses: Iterable[str], routes: Iterable[Route] = ()) -> None:
    netlink = Netlink()
    try:
        items = [ipaddress.ip_interface(text) for text in addresses]
        netlink.configure(socket.if_nametoindex(name), items, routes)
    finally:
        netlink.close()


@contextlib.contextmanager
def _web(far: Path) -> Generator[None]:
    server = namespaces.run_in(far, lambda: _Server((SERVER, 80), _Web))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def _resolver(far: Path) -> Generator[None]:
    listening = namespaces.socket_in(far, socket.AF_INET, socket.SOCK_DGRAM)
    listening.bind((RESOLVER, 53))
    listening.settimeout(0.5)
    done = threading.Event()

    def answer() -> None:
        while not done.is_set():
            with contextlib.suppress(TimeoutError):
                data, source = listening.recvfrom(4096)
                query = dns.message.from_wire(data)
                reply = dns.message.make_response(query)
                if query.question[0].rdtype == dns.rdatatype.A:
                    name = query.question[0].name
                    reply.answer.append(dns.rrset.from_text(name, 3600, "IN", "A", SERVER))
                listening.sendto(reply.to_wire(), source)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(5)
        listening.close()
