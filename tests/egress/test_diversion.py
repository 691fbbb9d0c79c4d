"""How diverted connections are relayed, and that nobody gets past the proxy."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import queue
import socket
import threading
import time
from typing import Any

import pytest

from k8e.egress import rules
from k8e.egress.dns_answers import Share
from tests.egress import diversion
from tests.egress.diversion import (
    BAD,
    CDN4,
    CDN6,
    CLIENT4,
    DNS,
    GOOD,
    SECONDS,
    Diversion,
    Tls,
    client_hello,
    get,
    is_refused,
    is_reset,
    receive_all,
    reset,
    say_tls,
    until,
)

pytestmark = [pytest.mark.skipif(diversion.not_root(), reason="network namespaces need root")]
stage = pytest.fixture(diversion.diversion)

BOTH = pytest.mark.parametrize("address", [CDN4, CDN6])
RAW = 9000
BIG = 50 << 20


# Relaying.


@BOTH
async def test_large_streams_pass_in_both_directions_and_end_one_by_one(
    stage: Diversion, address: str
) -> None:
    stage.networks.add((address, RAW))
    block = hashlib.sha256(b"k8e").digest() * 2048
    count = BIG // len(block)

    def handle(accepted: socket.socket) -> None:
        digest = hashlib.sha256()
        reader = threading.Thread(target=_consume, args=(accepted, digest))
        reader.start()
        for _ in range(count):
            accepted.sendall(block)
        reader.join(SECONDS * 4)
        accepted.sendall(digest.digest())  # the client's direction has ended, this one has not

    stage.serve(RAW, handle)

    def exchange() -> tuple[int, bytes]:
        with stage.connect(address, RAW) as client:
            client.settimeout(SECONDS * 4)
            writer = threading.Thread(target=_produce, args=(client, block, count))
            writer.start()
            got = receive_all(client)
            writer.join(SECONDS)
            return len(got), got[-32:]

    expected = hashlib.sha256(block * count).digest()
    assert await asyncio.to_thread(exchange) == (BIG + 32, expected)


def _consume(end: socket.socket, digest: Any) -> None:
    while data := end.recv(1 << 20):
        digest.update(data)


def _produce(end: socket.socket, block: bytes, count: int) -> None:
    for _ in range(count):
        end.sendall(block)
    end.shutdown(socket.SHUT_WR)


async def test_a_server_may_end_first(stage: Diversion) -> None:
    stage.networks.add((CDN4, RAW))
    got: queue.Queue[bytes] = queue.Queue()

    def handle(accepted: socket.socket) -> None:
        accepted.sendall(b"bye")
        accepted.shutdown(socket.SHUT_WR)
        got.put(receive_all(accepted))

    stage.serve(RAW, handle)
    with await asyncio.to_thread(stage.connect, CDN4, RAW) as client:
        assert await asyncio.to_thread(receive_all, client) == b"bye"
        client.sendall(b"last words")
        client.shutdown(socket.SHUT_WR)
        assert await asyncio.to_thread(got.get, timeout=SECONDS) == b"last words"


@pytest.mark.parametrize("half_closed", [False, True])
async def test_a_reset_is_passed_on(stage: Diversion, half_closed: bool) -> None:
    stage.networks.add((CDN4, RAW))
    accepted: queue.Queue[socket.socket] = queue.Queue()
    over = threading.Event()

    def handle(end: socket.socket) -> None:
        accepted.put(end)
        over.wait(SECONDS * 2)

    stage.serve(RAW, handle)
    for near_resets in (True, False):
        near = await asyncio.to_thread(stage.connect, CDN4, RAW)
        near.sendall(b"hello")
        far = await asyncio.to_thread(accepted.get, timeout=SECONDS)
        assert await asyncio.to_thread(far.recv, 100) == b"hello"
        ending, other = (near, far) if near_resets else (far, near)
        if half_closed:
            ending.shutdown(socket.SHUT_WR)
            assert await asyncio.to_thread(other.recv, 100) == b""
        reset(ending)
        if half_closed:
            # The end of the stream was read; only the next word tells.
            assert await asyncio.to_thread(_breaks, other)
        else:
            assert await asyncio.to_thread(is_reset, other)
        other.close()
    over.set()


def _breaks(end: socket.socket) -> bool:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            end.sendall(b"x")
        except OSError:
            return True
    return False


async def test_a_reset_in_the_middle_is_not_taken_for_an_end(stage: Diversion) -> None:
    stage.networks.add((CDN4, RAW))

    def handle(accepted: socket.socket) -> None:
        accepted.recv(1 << 16)
        reset(accepted)

    stage.serve(RAW, handle)

    def upload() -> None:
        with stage.connect(CDN4, RAW) as client:
            while True:  # after an end, the reset would be a broken pipe
                client.sendall(bytes(1 << 16))

    for _ in range(20):  # either direction may find out first
        with pytest.raises(ConnectionResetError):
            await asyncio.to_thread(upload)


async def test_a_client_that_does_not_read_stops_the_server(stage: Diversion) -> None:
    stage.networks.add((CDN4, RAW))
    sent: queue.Queue[int] = queue.Queue()

    def handle(accepted: socket.socket) -> None:
        accepted.settimeout(0.5)
        total = 0
        with contextlib.suppress(TimeoutError):
            while total < BIG:
                total += accepted.send(bytes(1 << 20))
        sent.put(total)

    stage.serve(RAW, handle)
    with await asyncio.to_thread(stage.connect, CDN4, RAW):
        assert await asyncio.to_thread(sent.get, timeout=SECONDS * 2) < BIG


# Policies that change.


async def test_a_changed_policy_cuts_what_it_forbids_and_keeps_the_rest(stage: Diversion) -> None:
    stage.networks.add((CDN4, RAW))
    stage.names.add(BAD)
    for port in (80, RAW):
        stage.serve(
            port, lambda accepted: accepted.sendall(accepted.recv(100) + receive_all(accepted))
        )
    by_name = [await asyncio.to_thread(stage.connect, CDN4, 80) for _ in range(2)]
    by_network = await asyncio.to_thread(stage.connect, CDN4, RAW)
    waiting = await asyncio.to_thread(stage.connect, CDN4, 80)
    with by_name[0], by_name[1], by_network, waiting:
        for client, name in zip(by_name, (GOOD, BAD), strict=True):
            client.sendall(get(name, "Content-Length: 3"))
        await until(lambda: len([item for item in stage.asked if item[3]]) == 2)
        by_network.sendall(b"x")
        stage.proxy.rejudge("198.18.0.6")
        stage.names.remove(BAD)
        stage.networks.clear()
        stage.proxy.rejudge(CLIENT4)
        assert await asyncio.to_thread(is_reset, by_name[1])
        assert await asyncio.to_thread(is_reset, by_network)
        for client, rest in ((by_name[0], b"abc"), (waiting, get(GOOD))):
            client.sendall(rest)
            client.shutdown(socket.SHUT_WR)
            assert b"Connection: close" in await asyncio.to_thread(receive_all, client)


async def test_a_connection_stays_with_the_proxy_when_its_sandbox_ceases_to_be_strict(
    stage: Diversion,
) -> None:
    stage.networks.add((CDN4, RAW))
    stage.serve(RAW, lambda accepted: accepted.sendall(receive_all(accepted)))
    with await asyncio.to_thread(stage.connect, CDN4, RAW) as client:
        client.sendall(b"before ")
        stage.strict(on=False)
        client.sendall(b"after")
        client.shutdown(socket.SHUT_WR)
        assert await asyncio.to_thread(receive_all, client) == b"before after"


async def test_a_connection_of_before_is_cut_when_its_sandbox_becomes_strict(
    stage: Diversion,
) -> None:
    over = threading.Event()
    stage.serve(RAW, lambda _: over.wait(SECONDS))
    stage.strict(on=False)
    with await asyncio.to_thread(stage.connect, CDN4, RAW) as client:
        stage.strict()
        client.sendall(b"hello")
        assert await asyncio.to_thread(is_reset, client)
    over.set()  # the server is not told
    assert stage.asked == []


# Nobody gets past.


@BOTH
async def test_without_a_proxy_everything_is_refused_and_a_new_one_takes_over(
    stage: Diversion, address: str
) -> None:
    front = Tls(stage)
    stage.networks.add((address, RAW))
    stage.serve(RAW, lambda accepted: accepted.sendall(receive_all(accepted)))
    with await asyncio.to_thread(stage.connect, address, RAW) as client:
        client.sendall(b"hello")
        stage.proxy.close()
        assert await asyncio.to_thread(is_reset, client)
    began = time.monotonic()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.to_thread(stage.connect, address)
    assert time.monotonic() - began < 1
    assert front.names == []
    await stage.proxy.wait_closed()
    stage.proxy = stage.make_proxy()
    await stage.proxy.start()
    assert await asyncio.to_thread(say_tls, stage, GOOD, address) == b"hello you"


@pytest.mark.parametrize("mark", [rules.PROXY_MARK, rules.UPSTREAM_MARK])
async def test_marks_of_a_sandbox_mean_nothing(stage: Diversion, mark: int) -> None:
    front = Tls(stage)
    stage.serve(RAW, lambda accepted: accepted.sendall(b"reached"))
    with await asyncio.to_thread(lambda: stage.connect(mark=mark)) as client:
        client.sendall(client_hello(BAD))
        assert await asyncio.to_thread(is_reset, client)
    assert front.names == []
    stage.strict(on=False)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.to_thread(lambda: stage.connect("198.18.0.1", rules.PROXY_PORT, mark=mark))
    asked = len(stage.asked)
    with await asyncio.to_thread(lambda: stage.connect(CDN4, RAW, mark=mark)) as client:
        assert await asyncio.to_thread(receive_all, client) == b"reached"
    assert len(stage.asked) == asked


async def test_a_foreign_source_address_is_refused(stage: Diversion) -> None:
    Tls(stage)
    stage.add_client_address("198.18.0.6/32")

    def connect() -> None:
        with socket.socket() as client:
            client.settimeout(0.5)  # the refusal goes to where the address belongs
            client.bind(("198.18.0.6", 0))
            client.connect((CDN4, 443))

    with pytest.raises(OSError, match=r"refused|timed out"):
        await asyncio.to_thread(stage.in_client, connect)
    assert stage.asked == []


@pytest.mark.parametrize("target", [("198.19.255.253", RAW), ("198.18.0.1", rules.PROXY_PORT)])
async def test_the_host_and_what_is_behind_the_router_are_never_dialled(
    stage: Diversion, target: tuple[str, int]
) -> None:
    stage.networks.add(target)
    reached = threading.Event()
    stage.serve(RAW, lambda _: reached.set())
    assert await asyncio.to_thread(is_refused, stage, b"", *target)
    assert not reached.is_set()
    assert len(stage.asked) == 1


async def test_questions_to_the_resolver_are_not_diverted(stage: Diversion) -> None:
    with pytest.raises(ConnectionRefusedError):
        await asyncio.to_thread(stage.connect, DNS, 53)
    assert stage.asked == []
    assert await asyncio.to_thread(is_refused, stage, b"", DNS, 80)
    assert len(stage.asked) == 1


@pytest.mark.parametrize("share", [Share(100, 2), Share(4, 100)], ids=["each", "half of all"])
async def test_a_sandbox_has_only_so_many_connections_and_is_told_of_more(
    stage: Diversion, share: Share
) -> None:
    stage.proxy.share = share
    first, second = [await asyncio.to_thread(stage.connect) for _ in range(2)]
    with first, second:
        assert await asyncio.to_thread(is_refused, stage, b"")
        assert stage.told == [(CLIENT4, CDN4, 443)]
        first.close()
        await until(lambda: stage.proxy.connections(CLIENT4) == 1)
        with await asyncio.to_thread(stage.connect) as fourth:
            await until(lambda: stage.proxy.connections(CLIENT4) == 2)
            assert fourth.fileno() > 0


async def test_closing_ends_connections_in_every_state(stage: Diversion) -> None:
    stage.networks |= {(CDN4, RAW), (CDN4, 9001)}
    stage.serve(RAW, lambda accepted: accepted.sendall(receive_all(accepted)))
    stage.nft("insert rule inet k8e nat oifname up tcp dport 9001 drop")
    ports = (80, RAW, 9001)
    clients = [await asyncio.to_thread(stage.connect, CDN4, port) for port in ports]
    await until(lambda: stage.proxy.connections(CLIENT4) == len(ports))
    stage.proxy.close()
    for client in clients:
        assert await asyncio.to_thread(is_reset, client)
        client.close()
    await stage.proxy.wait_closed()
    assert stage.proxy.connections(CLIENT4) == 0


def test_the_uplink_has_one_name() -> None:
    assert f'oifname != "{rules.UPLINK}"' in rules.tproxy_chain(DNS)
