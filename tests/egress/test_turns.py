"""What clients and servers of strict sandboxes say takes little time, however they say it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

import dns.message
import pytest

from k8e.egress import dns as egress_dns
from k8e.egress import proxy, sniff
from k8e.egress.dns import Upstream
from k8e.egress.proxy import Proxy
from tests.egress import diversion
from tests.egress.diversion import (
    BAD,
    CDN4,
    GOOD,
    SECONDS,
    Diversion,
    client_hello,
    get,
    receive_all,
    until,
)

pytestmark = [pytest.mark.skipif(diversion.not_root(), reason="network namespaces need root")]
stage = pytest.fixture(diversion.diversion)

CONNECTIONS = 24
QUICKLY = 0.002  # seconds of the CPU
WRONG = 100


def cpu_seconds(data: bytes) -> float:
    """What it takes to look at a beginning once, at best."""
    found: list[float] = []
    for _ in range(5):
        start = time.thread_time()
        sniff.peek(data, 80)
        found.append(time.thread_time() - start)
    return min(found)


@pytest.mark.parametrize("filling", [b"X: a\r\n" * 10_000, b"X: " + b"a" * 60_000])
def test_a_long_head_is_looked_at_quickly(filling: bytes) -> None:
    assert cpu_seconds(get(GOOD)[:-2] + filling) < QUICKLY
    assert cpu_seconds(get(GOOD)[:-2] + filling + b"\r\n\r\n") < QUICKLY


def test_records_without_content_are_not_waited_for() -> None:
    assert sniff.asks_again(b"\x16\x03\x03\0\0" * 10_000) is True, "what follows is checked"
    found = sniff.peek_again(b"\x17\x03\x03\0\0" * 10_000, 443)
    assert found is not None
    assert found.said.reason


async def test_a_message_in_ever_more_pieces_is_refused(
    stage: Diversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "MAX_LOOKED_AT", 1 << 18)

    def say() -> bytes:
        with stage.connect(CDN4, 80) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.sendall(get(GOOD)[:-2] + b"X: " + b"a" * 40_000)
            with contextlib.suppress(ConnectionError):
                for _ in range(2000):
                    client.sendall(b"a")
                    time.sleep(0.002)  # so that each is a piece of its own
            return receive_all(client)

    assert b"403" in await asyncio.to_thread(say)
    assert [said.reason for said in stage.denied if said] == [
        "its first message comes in too many small pieces"
    ]


async def test_a_server_that_says_nothing_in_many_records_is_cut_off(
    stage: Diversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "PEEK_SECONDS", 0.5)
    ended = threading.Event()

    def handle(accepted: socket.socket) -> None:
        accepted.recv(1 << 16)
        with contextlib.suppress(OSError):
            accepted.sendall(b"\x16\x03\x03\0\0")
            accepted.recv(1)
        ended.set()

    stage.serve(443, handle)
    with await asyncio.to_thread(stage.connect) as client:
        client.sendall(client_hello(GOOD))
        assert await asyncio.to_thread(ended.wait, SECONDS)


async def test_bodies_in_the_smallest_chunks_hold_up_nobody(stage: Diversion) -> None:
    stage.serve(80, _read_all)
    clients = [await asyncio.to_thread(stage.connect, CDN4, 80) for _ in range(CONNECTIONS)]
    stop = threading.Event()
    threads = [threading.Thread(target=_send_chunks, args=(end, stop)) for end in clients]
    try:
        for thread in threads:
            thread.start()
        await until(lambda: _connections(stage.proxy) == CONNECTIONS)
        turns = [await _turn() for _ in range(60)]
    finally:
        stop.set()
        for end in clients:
            diversion.reset(end)
        for thread in threads:
            await asyncio.to_thread(thread.join, SECONDS)
    # The median: this machine has other work too.
    assert sorted(turns)[len(turns) // 2] < 0.02


def _connections(of: Proxy) -> int:
    return of.connections(diversion.CLIENT4)


async def _turn() -> float:
    """How long the loop takes for one turn of all that it has to do."""
    start = time.perf_counter()
    await asyncio.sleep(0)
    return time.perf_counter() - start


def _read_all(accepted: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while accepted.recv(1 << 16):
            pass


def _send_chunks(end: socket.socket, stop: threading.Event) -> None:
    chunks = b"1\r\nx\r\n" * 10_000
    with contextlib.suppress(OSError):
        end.sendall(get(GOOD, "Transfer-Encoding: chunked"))
        while not stop.is_set():
            end.sendall(chunks)


async def test_of_what_follows_a_refused_request_little_is_taken(stage: Diversion) -> None:
    def say() -> None:
        with stage.connect(CDN4, 80) as client:
            client.sendall(get(BAD))
            for _ in range(64):
                client.sendall(bytes(1 << 20))

    with pytest.raises(ConnectionError):
        await asyncio.to_thread(say)


async def test_a_flood_of_wrong_answers_of_a_resolver_leaves_everybody_else_their_turn() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    query = dns.message.make_query("a.test", "A")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as resolver:
        resolver.bind(("127.0.0.1", 0))
        resolver.settimeout(SECONDS)
        answering = threading.Thread(target=_answer_wrongly, args=(resolver, query))
        answering.start()
        counting = asyncio.create_task(count())
        upstream = Upstream(*resolver.getsockname())
        reply = await egress_dns.ask_upstream(query, [upstream], _late_socket)
        counting.cancel()
        answering.join(SECONDS)
    assert reply.id == query.id
    assert turns >= WRONG // 2


def _answer_wrongly(resolver: socket.socket, query: dns.message.Message) -> None:
    _, client = resolver.recvfrom(4096)
    wrong = dns.message.make_response(query)
    wrong.id ^= 1
    for _ in range(WRONG):
        resolver.sendto(wrong.to_wire(), client)
    resolver.sendto(dns.message.make_response(query).to_wire(), client)


class _Late(socket.socket):
    """A socket that is read when all that is sent to it has come."""

    def recv(self, size: int, flags: int = 0) -> bytes:
        if not self.waited:
            self.waited = True
            time.sleep(0.3)
        return super().recv(size, flags)

    waited = False


def _late_socket(family: int, kind: int) -> socket.socket:
    return _Late(family, kind)
