"""What strict mode lets through and what not, by what clients say to servers of the world."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import queue
import socket
import ssl

import pytest

from k8e.egress import proxy, relay
from k8e.egress.dns_answers import Share
from tests.egress import diversion
from tests.egress.diversion import (
    BAD,
    CDN4,
    CDN6,
    ELSEWHERE,
    GOOD,
    SECONDS,
    Diversion,
    Tls,
    client_hello,
    get,
    is_refused,
    is_reset,
    receive_all,
    say_tls,
    until,
)

pytestmark = [pytest.mark.skipif(diversion.not_root(), reason="network namespaces need root")]
stage = pytest.fixture(diversion.diversion)

BOTH = pytest.mark.parametrize("address", [CDN4, CDN6])


class Web:
    """A CDN's plain HTTP front; it keeps connections and remembers all that came on them."""

    def __init__(self, stage: Diversion, *, obeys: bool = True) -> None:
        self.seen: queue.Queue[bytes] = queue.Queue()
        """What came on a connection, told when it ended."""
        self._obeys = obeys
        stage.serve(80, self._handle)

    def _handle(self, accepted: socket.socket) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            data += accepted.recv(1 << 16)
        if b"100-continue" in data:
            accepted.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        while b"Content-Length: 3" in data and not data.endswith(b"abc"):
            data += accepted.recv(1 << 16)
        while b"chunked" in data and not data.endswith(b"0\r\n\r\n"):
            data += accepted.recv(1 << 16)
        accepted.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        if self._obeys:
            accepted.shutdown(socket.SHUT_WR)
        try:
            data += receive_all(accepted)
        finally:
            self.seen.put(data)


def say_http(stage: Diversion, data: bytes, address: str = CDN4) -> bytes:
    with stage.connect(address, 80) as client:
        client.sendall(data)
        return receive_all(client)


# TLS.


@BOTH
async def test_a_tenant_of_a_shared_address_is_reached_by_its_name_and_no_other_is(
    stage: Diversion, address: str
) -> None:
    front = Tls(stage)
    assert await asyncio.to_thread(say_tls, stage, GOOD, address) == b"hello you"
    assert await asyncio.to_thread(is_refused, stage, client_hello(BAD), address)
    assert front.names == [GOOD]
    assert [said and said.name for said in stage.denied] == [BAD]


async def test_a_hello_without_a_name_or_with_a_hidden_one_is_reset(stage: Diversion) -> None:
    front = Tls(stage)
    assert await asyncio.to_thread(is_refused, stage, client_hello(None))
    hello = bytearray(client_hello(GOOD))
    at = hello.index(b"\x00\x2b")  # the extension that lists versions, which is always there
    hello[at : at + 2] = b"\xfe\x0d"
    assert await asyncio.to_thread(is_refused, stage, bytes(hello))
    reasons = [said.reason for said in stage.denied if said]
    assert "no server name" in reasons[0]
    assert "ECH" in reasons[1]
    assert front.names == []


async def test_a_hello_in_many_segments_is_waited_for(stage: Diversion) -> None:
    got: queue.Queue[bytes] = queue.Queue()
    hello = client_hello(GOOD)
    stage.serve(443, lambda accepted: got.put(accepted.recv(len(hello), socket.MSG_WAITALL)))

    def say() -> bytes:
        with stage.connect() as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for at in range(len(hello)):
                client.sendall(hello[at : at + 1])
            return got.get(timeout=SECONDS)

    assert await asyncio.to_thread(say) == hello


async def test_a_server_may_ask_for_a_second_hello(stage: Diversion) -> None:
    front = Tls(stage)
    front.context.set_ecdh_curve("secp384r1")  # which clients know but do not guess
    front.context.minimum_version = ssl.TLSVersion.TLSv1_3
    assert await asyncio.to_thread(say_tls, stage, GOOD) == b"hello you"


@pytest.mark.parametrize("early", [False, True], ids=["asked", "at-once"])
async def test_a_second_hello_cannot_name_another_host(stage: Diversion, early: bool) -> None:
    retry = "cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c"
    answer = bytes.fromhex(f"160303002c020000280303{retry}00130100000000")
    got: queue.Queue[bytes] = queue.Queue()
    first, second = client_hello(GOOD), client_hello(BAD)

    def handle(accepted: socket.socket) -> None:
        data = accepted.recv(len(first), socket.MSG_WAITALL)
        accepted.sendall(answer)
        with contextlib.suppress(ConnectionResetError):
            data += receive_all(accepted)
        got.put(data)

    stage.serve(443, handle)
    with await asyncio.to_thread(stage.connect) as client:
        client.sendall(first + (second if early else b""))
        if not early:
            assert await asyncio.to_thread(client.recv, 100) == answer
            client.sendall(b"\x14\x03\x03\x00\x01\x01" + second)
        assert await asyncio.to_thread(is_reset, client)
    assert await asyncio.to_thread(got.get, timeout=SECONDS) == first
    assert "second TLS hello" in next(said.reason for said in stage.denied if said)


# HTTP.


@BOTH
async def test_host_is_compared_and_a_refusal_says_why(stage: Diversion, address: str) -> None:
    web = Web(stage)
    answer = await asyncio.to_thread(say_http, stage, get(GOOD), address)
    assert answer.endswith(b"\r\n\r\nok")
    sent = await asyncio.to_thread(web.seen.get, timeout=SECONDS)
    assert sent == get(GOOD, "Connection: close")
    answer = await asyncio.to_thread(say_http, stage, get(BAD), address)
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert answer.endswith(
        b"k8e's egress policy refused this request to evil.example.org: not in the allow-list\n"
    )
    assert web.seen.empty()


@pytest.mark.parametrize(
    "head",
    [
        get(GOOD, f"Host: {BAD}"),
        get(GOOD, "Upgrade: h2c", "Connection: Upgrade"),
        f"GET http://{BAD}/ HTTP/1.1\r\nHost: {GOOD}\r\n\r\n".encode(),
        f"CONNECT {BAD}:443 HTTP/1.1\r\nHost: {GOOD}\r\n\r\n".encode(),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        get(GOOD, "Content-Length: 3", "Transfer-Encoding: chunked"),
        get(GOOD, "Transfer-Encoding: chunked") + b"x\r\n",
    ],
)
async def test_an_ambiguous_request_reaches_nobody(stage: Diversion, head: bytes) -> None:
    web = Web(stage)
    answer = await asyncio.to_thread(say_http, stage, head)
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert web.seen.empty()


async def test_a_second_request_on_a_kept_connection_never_leaves(stage: Diversion) -> None:
    web = Web(stage)
    with await asyncio.to_thread(stage.connect, CDN4, 80) as client:
        client.sendall(get(GOOD, "Connection: keep-alive"))
        assert (await asyncio.to_thread(client.recv, 1000)).endswith(b"ok")
        with contextlib.suppress(OSError):
            client.sendall(get(BAD))
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.to_thread(receive_all, client) == b""
    assert BAD.encode() not in await asyncio.to_thread(web.seen.get, timeout=SECONDS)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"Content-Length: 3\r\n\r\nabc",
        b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    ],
    ids=["none", "length", "chunks"],
)
@pytest.mark.parametrize("obeys", [True, False])
async def test_a_pipelined_request_never_leaves(
    stage: Diversion, body: bytes, obeys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "GRACE_SECONDS", 0.2)
    web = Web(stage, obeys=obeys)
    first = get(GOOD).removesuffix(b"\r\n") + (body or b"\r\n")
    for pieces in ([first + get(BAD)], [first, get(BAD)], [first[:-1], first[-1:] + get(BAD)]):
        answer = await asyncio.to_thread(_say_in_pieces, stage, pieces)
        assert answer.endswith(b"ok")
        seen = await asyncio.to_thread(web.seen.get, timeout=SECONDS)
        assert BAD.encode() not in seen
        assert seen.endswith(b"\r\n\r\n" if not body else body[-5:])


def _say_in_pieces(stage: Diversion, pieces: list[bytes]) -> bytes:
    with stage.connect(CDN4, 80) as client:
        for piece in pieces:
            client.sendall(piece)
        return receive_all(client)


async def test_a_body_may_wait_for_the_server_to_ask_for_it(stage: Diversion) -> None:
    Web(stage)
    with await asyncio.to_thread(stage.connect, CDN4, 80) as client:
        client.sendall(get(GOOD, "Content-Length: 3", "Expect: 100-continue"))
        assert b" 100 " in await asyncio.to_thread(client.recv, 1000)
        client.sendall(b"abc")
        assert (await asyncio.to_thread(receive_all, client)).endswith(b"ok")


@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_a_large_body_arrives_whole(stage: Diversion, framing: str) -> None:
    payload = bytes(range(256)) * (1 << 15)
    got: queue.Queue[bytes] = queue.Queue()
    body, header = payload, f"Content-Length: {len(payload)}"
    if framing == "chunks":
        half = len(payload) // 2
        body = b"%x\r\n%s\r\n" % (half, payload[:half]) * 1 + b"3\r\nabc\r\n0\r\n\r\n"
        header = "Transfer-Encoding: chunked"

    def handle(accepted: socket.socket) -> None:
        data = bytearray()
        while b"\r\n\r\n" not in data or len(data.partition(b"\r\n\r\n")[2]) < len(body):
            data += accepted.recv(1 << 20)
        got.put(bytes(data.partition(b"\r\n\r\n")[2]))
        accepted.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

    stage.serve(80, handle)
    answer = await asyncio.to_thread(say_http, stage, get(GOOD, header) + body)
    assert b" 204 " in answer
    assert await asyncio.to_thread(got.get, timeout=SECONDS) == body


async def test_a_body_that_becomes_ambiguous_is_cut_off_there(stage: Diversion) -> None:
    web = Web(stage)
    with await asyncio.to_thread(stage.connect, CDN4, 80) as client:
        client.sendall(get(GOOD, "Transfer-Encoding: chunked") + b"3\r\nabc\r\n")
        await until(lambda: len(stage.asked) == 2)
        client.sendall(b"5;\nhello" + get(BAD))
        assert await asyncio.to_thread(is_reset, client)
    assert "chunked" in next(said.reason for said in stage.denied if said)
    with pytest.raises(queue.Empty):
        await asyncio.to_thread(web.seen.get, timeout=0.2)  # what it got is no whole request


async def test_a_server_that_is_down_is_told_from_a_refusal(stage: Diversion) -> None:
    answer = await asyncio.to_thread(say_http, stage, get(GOOD))
    assert answer.startswith(b"HTTP/1.1 502 ")
    assert b"refused" in answer
    assert await asyncio.to_thread(is_refused, stage, client_hello(GOOD))
    assert stage.denied == []


async def test_a_server_that_does_not_answer_is_given_up(
    stage: Diversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "DIAL_SECONDS", 0.3)
    stage.nft("insert rule inet k8e nat oifname up tcp dport { 80, 443 } drop")
    answer = await asyncio.to_thread(say_http, stage, get(GOOD))
    assert b"does not answer" in answer
    assert await asyncio.to_thread(is_refused, stage, client_hello(GOOD))


# Other protocols.


async def test_other_protocols_are_refused_at_once_and_silence_after_a_while(
    stage: Diversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.serve(22, lambda accepted: accepted.sendall(b"SSH-2.0-server\r\n"))
    assert await asyncio.to_thread(is_refused, stage, b"SSH-2.0-client\r\n", CDN4, 22)
    monkeypatch.setattr(proxy, "PEEK_SECONDS", 0.3)
    assert await asyncio.to_thread(is_refused, stage, b"", CDN4, 22)
    assert ["only TLS and HTTP" in said.reason for said in stage.denied if said] == [True, True]


@BOTH
async def test_an_allowed_network_is_not_peeked_at(stage: Diversion, address: str) -> None:
    stage.networks.add((address, 22))
    stage.serve(22, lambda accepted: accepted.sendall(b"SSH-2.0-server\r\n"))
    with await asyncio.to_thread(stage.connect, address, 22) as client:
        assert await asyncio.to_thread(receive_all, client) == b"SSH-2.0-server\r\n"
    assert [item[1:] for item in stage.asked] == [(address, 22, None)]


async def test_an_address_that_no_name_led_to_is_refused_before_a_byte_is_read(
    stage: Diversion,
) -> None:
    front = Tls(stage)
    assert await asyncio.to_thread(is_refused, stage, client_hello(GOOD), ELSEWHERE)
    assert [item[3] for item in stage.asked] == [None]
    assert front.names == []


async def test_connections_of_one_sandbox_to_neighbours_of_the_host_leave_others_theirs(
    stage: Diversion,
) -> None:
    stage.proxy.near = [ipaddress.ip_network(CDN4), ipaddress.ip_network(CDN6)]
    stage.proxy.near_share = Share(6, 6, 1)
    stage.networks |= {(CDN4, 22), (CDN6, 22)}
    stage.serve(22, lambda accepted: (accepted.sendall(b"hello"), receive_all(accepted)))

    def is_served(address: str) -> bool:
        with contextlib.suppress(ConnectionError):  # it may be reset before we know of it
            clients.append(stage.connect(address, 22))
            return clients[-1].recv(5) == b"hello"
        return False

    async def served(address: str) -> list[bool]:
        return [await asyncio.to_thread(is_served, address) for _ in range(4)]

    clients: list[socket.socket] = []
    try:
        assert sum(await served(CDN4)) == 3  # half of all, however many it tries
        assert stage.told == [(diversion.CLIENT4, CDN4, 22)]
        assert sum(await served(CDN6)) == 2  # another one, since it has another address
    finally:
        for client in clients:
            client.close()
    await until(lambda: stage.proxy.near_share.taken == 0)
