"""Connections of the guest to servers, here on this machine's own loopback."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from k8e.guest import link, ports, wire
from k8e.guest.loop import Loop
from k8e.guest.ports import Ports

PATIENCE = 60.0


class FakeChannel:
    """Keeps what would go to the host."""

    def __init__(self) -> None:
        self.handler: Any = None
        self.frames: list[tuple[int, bytes]] = []
        self.closed = False

    def send(self, kind: int, body: bytes = b"", *, soon: bool = False) -> None:
        assert not self.closed
        self.frames.append((kind, body))

    def fail(self, error: BaseException) -> None:
        self.send(wire.ERROR, wire.pack(link.explain(error)))

    def close(self) -> None:
        self.closed = True
        self.handler = None

    def heard(self) -> bytes:
        return b"".join(body for kind, body in self.frames if kind == wire.DATA)

    def kinds(self) -> list[int]:
        return [kind for kind, _ in self.frames if kind != wire.CREDIT]

    def error(self) -> dict[str, Any]:
        kind, body = self.frames[-1]
        assert kind == wire.ERROR
        return wire.unpack_dict(body)


class Bench:
    """A loop that turns only while a test waits."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.ports = Ports(self.loop)

    def connect(self, port: int, **spec: Any) -> FakeChannel:
        channel = FakeChannel()
        self.ports.connect(channel, {"port": port, **spec})
        return channel

    def until(self, check: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not check():
            assert time.monotonic() < deadline
            self.turn()

    def turn(self) -> None:
        self.loop.later(0.01, lambda: None)
        self.loop.turn()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def listen(family: int = socket.AF_INET) -> tuple[socket.socket, int]:
    server = socket.create_server(
        ("::1" if family == socket.AF_INET6 else "127.0.0.1", 0), family=family
    )
    server.settimeout(PATIENCE)
    return server, server.getsockname()[1]


def test_a_name_for_both_families_finds_a_server_on_either(bench: Bench) -> None:
    for family in (socket.AF_INET, socket.AF_INET6):
        server, port = listen(family)
        with server:
            channel = bench.connect(port, host="localhost")
            bench.until(lambda channel=channel: channel.frames)
            assert channel.kinds() == [wire.RESULT]
            channel.handler.on_frame(wire.CANCEL, b"")
            assert channel.closed


def test_a_server_that_takes_nobody_in_is_given_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "CONNECT_SECONDS", 0.05)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = server.getsockname()
        waiting = [socket.socket() for _ in range(8)]
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(address)
        channel = bench.connect(address[1])
        bench.until(lambda: channel.closed)
        assert channel.error()["code"] == "ETIMEDOUT"
        assert "did not answer" in channel.error()["message"]
        for client in waiting:
            client.close()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_server_that_comes_later_is_waited_for(bench: Bench, family: int) -> None:
    server, port = listen(family)
    server.close()
    channel = bench.connect(port, host="localhost", wait=PATIENCE)
    tries: list[float] = []
    bench.loop.later(0.1, lambda: tries.append(0))
    bench.until(lambda: tries)
    assert channel.frames == []
    with socket.create_server(server_address(family, port), family=family):
        bench.until(lambda: channel.frames)
        assert channel.kinds() == [wire.RESULT]
        channel.handler.on_frame(wire.CANCEL, b"")


def server_address(family: int, port: int) -> tuple[str, int]:
    return ("::1" if family == socket.AF_INET6 else "127.0.0.1", port)


def test_a_server_that_never_comes_is_waited_for_no_longer_than_asked(bench: Bench) -> None:
    server, port = listen()
    server.close()
    channel = bench.connect(port, wait=0.05)
    bench.until(lambda: channel.closed)
    assert channel.error()["code"] == "ETIMEDOUT"
    assert f"listens on port {port} after 0.05 s" in channel.error()["message"]


def test_who_waits_for_a_server_can_leave(bench: Bench) -> None:
    server, port = listen()
    server.close()
    channel = bench.connect(port, wait=PATIENCE)
    bench.turn()
    channel.handler.on_frame(wire.CANCEL, b"")
    assert channel.closed
    with socket.create_server(("127.0.0.1", port)) as later:
        later.settimeout(0.2)
        for _ in range(5):
            bench.turn()
        with pytest.raises(TimeoutError):
            later.accept()


def test_reaching_oneself_is_reaching_nobody(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    class SamePort(socket.socket):
        """Gets the port that it connects to as its own, as the kernel chooses once in a while."""

        def connect_ex(self, address: Any, /) -> int:
            self.bind(address)
            return super().connect_ex(address)

    server, port = listen()
    server.close()
    monkeypatch.setattr(ports.socket, "socket", SamePort)
    channel = bench.connect(port)
    bench.until(lambda: channel.closed)
    assert channel.error()["code"] == "ECONNREFUSED"


def test_an_answer_is_heard_though_the_server_reads_no_more(bench: Bench) -> None:
    server, port = listen()
    with server:
        channel = bench.connect(port, window=1 << 20)
        bench.until(lambda: channel.frames)
        peer, _ = server.accept()
        peer.sendall(b"too large")
        peer.close()
        sent = 0
        while not {wire.END, wire.ERROR}.intersection(channel.kinds()):
            channel.handler.on_frame(wire.DATA, b"x" * 65536)
            sent += 65536
            bench.turn()
        assert channel.heard() == b"too large"
        granted = [body for kind, body in channel.frames if kind == wire.CREDIT]
        assert sum(wire.CREDIT_BODY.unpack(body)[0] for body in granted) == sent, "swallowed"
        if not channel.closed:
            channel.handler.on_lost()


def test_both_ends_and_only_both_end_a_connection(bench: Bench) -> None:
    server, port = listen()
    with server:
        channel = bench.connect(port)
        channel.handler.on_frame(wire.DATA, b"early")
        channel.handler.on_frame(wire.END, b"")
        channel.handler.on_frame(wire.DATA, b"after the end")
        bench.until(lambda: wire.RESULT in channel.kinds())
        with server.accept()[0] as peer:
            peer.settimeout(PATIENCE)
            assert peer.makefile("rb").read() == b"early"
            peer.sendall(b"late")
            bench.until(channel.heard)
            assert not channel.closed
        bench.until(lambda: channel.closed)
        assert channel.kinds() == [wire.RESULT, wire.DATA, wire.END, wire.RESULT]


def test_a_reset_is_an_error_and_no_end(bench: Bench) -> None:
    server, port = listen()
    with server:
        channel = bench.connect(port)
        bench.until(lambda: channel.frames)
        peer, _ = server.accept()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        peer.close()
        bench.until(lambda: channel.closed)
        assert channel.error()["code"] == "ECONNRESET"


def test_a_frame_that_does_not_belong_to_a_connection_is_a_breach(bench: Bench) -> None:
    server, port = listen()
    with server:
        channel = bench.connect(port)
        with pytest.raises(wire.WireError):
            channel.handler.on_frame(wire.STDIN, b"x")
        channel.handler.on_lost()
        assert channel.closed


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "127.0.0.1.", "::", 7, b"::1", "localhost\0", None, ""]
)
def test_only_loopback_is_loopback(host: Any) -> None:
    if host in (None, ""):
        assert ports.loopback_addresses(host) == [(socket.AF_INET, "127.0.0.1")]
        return
    with pytest.raises(OSError, match="loopback") as caught:
        ports.loopback_addresses(host)
    assert caught.value.errno == errno.EACCES
