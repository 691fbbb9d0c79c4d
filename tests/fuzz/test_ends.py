"""The two far ends: a guest whose gateway says anything, and HTTP of clients and of sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from k8e.guest import link, wire
from k8e.guest.loop import Loop
from tests.fuzz.running import fuzz
from tests.fuzz.values import damaged, frames
from tests.gateway.scripted import GET, HEAD, LAST, Script, visiting

KEY = b"k" * 32
HOST_KINDS = [
    wire.CALL,
    wire.STDIN,
    wire.STDIN_END,
    wire.CREDIT,
    wire.CANCEL,
    wire.DATA,
    wire.END,
    wire.WELCOME,
]
TURNS = 200


class Handler:
    """An operation that takes everything."""

    def __init__(self) -> None:
        self.lost = 0

    def on_frame(self, kind: int, body: bytes) -> None:
        if kind == wire.CREDIT:
            wire.CREDIT_BODY.unpack(body)  # fails as the real ones do

    def on_lost(self) -> None:
        self.lost += 1


class Host:
    """The gateway's end, in one thread with the guest."""

    def __init__(self, folder: Path) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(folder / "sock"))
        self._server.listen()
        self._server.settimeout(5)
        self.loop = Loop()

        def hold(channel: link.GuestChannel, spec: dict[str, Any]) -> None:
            channel.handler = Handler()

        def ping(channel: link.GuestChannel, spec: dict[str, Any]) -> None:
            channel.send(wire.RESULT, wire.pack({}))

        self.link = link.GuestLink(self.loop, {"hold": hold, "ping": ping})

    def turn(self) -> None:
        self.loop.later(0.001, lambda: None)
        self.loop.turn()

    def accept(self, key: bytes = KEY) -> socket.socket:
        """A connection of the guest that is greeted."""
        found, _ = self._server.accept()
        found.settimeout(5)
        hello = found.recv(1 << 10)
        answer = bytes(16) + wire.proof(key, hello[wire.HEADER_SIZE :], b"host")
        found.sendall(wire.frame(wire.WELCOME, 0, answer))
        return found

    def answers(self, connection: socket.socket) -> bool:
        """Whether the guest still does what it is asked on this connection."""
        try:
            connection.sendall(wire.frame(wire.CALL, 4_000_000, wire.pack({"op": "ping"})))
            connection.setblocking(False)
            heard = b""
            for _ in range(TURNS):
                self.turn()
                with contextlib.suppress(BlockingIOError):
                    data = connection.recv(1 << 16)
                    heard += data
                    if not data:
                        return False
                if wire.frame(wire.RESULT, 4_000_000, wire.pack({})) in heard:
                    return True
        except ConnectionError:
            return False
        return False

    def close(self) -> None:
        self._server.close()
        if self.link._socket is not None:  # pyright: ignore[reportPrivateUsage]
            self.link._socket.close()  # pyright: ignore[reportPrivateUsage]
        self.loop._epoll.close()  # pyright: ignore[reportPrivateUsage]


@contextlib.contextmanager
def guest() -> Generator[Host]:
    saved = link.SOCKET, link.KEY
    with tempfile.TemporaryDirectory() as folder:
        link.SOCKET, link.KEY = f"{folder}/sock", f"{folder}/key"
        Path(link.KEY).write_bytes(KEY)
        host = Host(Path(folder))
        try:
            host.link.dial()
            yield host
        finally:
            host.close()
            link.SOCKET, link.KEY = saved


OPENING = wire.frame(wire.CALL, 1, wire.pack({"op": "hold"}))


@fuzz(60)
@given(st.lists(frames(HOST_KINDS, 3), max_size=12), st.binary(max_size=12))
@example([(wire.CREDIT, 1, b"x")], b"")
@example([(wire.CALL, 1, b"")], b"")
@example([], wire.HEADER.pack(0xFFFFFFFF, wire.CALL, 2))
def test_a_guest_outlives_every_gateway(said: list[tuple[int, int, bytes]], last: bytes) -> None:
    """It answers on the old link, or on the next one."""
    with guest() as host, host.accept() as connection:
        host.turn()
        connection.sendall(OPENING + b"".join(wire.frame(*item) for item in said))
        with contextlib.suppress(ConnectionError):
            connection.sendall(last)
        for _ in range(3):
            host.turn()
        if last or not host.answers(connection):
            connection.close()
            for _ in range(TURNS):
                host.turn()
                if host.link._socket is not None and host.link._nonce:  # pyright: ignore[reportPrivateUsage]
                    break
            with host.accept() as again:
                host.turn()
                assert host.answers(again)


@fuzz(30)
@given(st.binary(max_size=100) | st.just(wire.frame(wire.WELCOME, 0, bytes(48))))
def test_a_guest_does_nothing_for_who_does_not_know_its_key(said: bytes) -> None:
    with guest() as host, host.accept(key=b"x" * 32) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(said)
        assert not host.answers(connection)


# HTTP.

REQUEST = (
    b"POST /p?k8e-token=x HTTP/1.1\r\n"
    + HEAD
    + b"Cookie: a=b; k8e-1=c\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n"
    + LAST
    + b"3\r\nabc\r\n0\r\n\r\n"
)
ANSWER = (
    b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n"
    b"Set-Cookie: k8e-1=x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
)


def visit(request: bytes, *pieces: bytes) -> bytes:
    """All that a client gets that sends this and then ends."""

    async def play() -> bytes:
        async with visiting(*(Script(*pieces) for _ in range(20))) as client:
            client.say(request)
            client.writer.write_eof()
            with contextlib.suppress(ConnectionError):
                return await client.rest()
            return b""

    return asyncio.run(play())


@fuzz(60)
@given(damaged(REQUEST) | damaged(GET + LAST) | st.binary(min_size=1, max_size=80))
@example(b"\0" * 70_000)
@example(GET + b"X: y\r\n" * 9000 + LAST)
@example(GET.replace(b"HTTP/1.1", b"HTTP/9.9") + LAST)
def test_a_request_is_answered_in_order_or_cut_off(request: bytes) -> None:
    answer = visit(request, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    assert not answer or answer.startswith(b"HTTP/1.1 ")


@fuzz(60)
@given(damaged(ANSWER), st.integers(1, 400))
@example(b"HTTP/1.1 100 Continue\r\n\r\n" * 200, 400)
@example(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 20_000, 400)
@example(b"HTTP/1.1 101 Up\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n", 400)
def test_a_server_in_a_sandbox_says_anything_and_its_client_gets_http(
    said: bytes, cut: int
) -> None:
    answer = visit(GET + LAST, said[:cut], said[cut:])
    assert not answer or answer.startswith(b"HTTP/1.1 ")
    for head in answer.split(b"\r\n\r\n"):
        assert not head.startswith(b"HTTP/") or b"set-cookie: k8e-1" not in head.lower()
