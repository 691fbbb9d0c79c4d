"""HTTP between clients and servers in sandboxes, where both may be hostile or slow."""

from __future__ import annotations

import asyncio
import errno
import time

import pytest

from k8e import errors
from k8e.gateway.ports import proxy
from k8e.gateway.ports.tunnel import BrokenTunnel
from tests.gateway.scripted import DOOR, GET, HEAD, LAST, PATIENCE, Script, answer_to, visiting

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"
POST = b"POST /p HTTP/1.1\r\n" + HEAD


def body_of(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


async def test_a_request_and_its_answer_pass_as_they_are() -> None:
    said = (
        b"HTTP/1.1 404 Not Here\r\nX-Mixed-Case: a  b\r\nSet-Cookie: a=1\r\n"
        b"Set-Cookie: b=2\r\nContent-Length: 2\r\n\r\nhi"
    )
    script = Script(said)
    found = await answer_to(b"GET /a%20b?x=1 HTTP/1.1\r\n" + HEAD + b"X-Some: y\r\n" + LAST, script)
    assert found == (
        b"HTTP/1.1 404 Not Here\r\nX-Mixed-Case: a  b\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\n"
        b"Content-Length: 2\r\nReferrer-Policy: same-origin\r\nConnection: close\r\n\r\nhi"
    )
    assert bytes(script.heard) == (
        b"GET /a%20b?x=1 HTTP/1.1\r\nHost: 127.7.8.9:700\r\nX-Some: y\r\nConnection: close\r\n\r\n"
    )


async def test_requests_follow_each_other_on_one_connection_and_each_is_judged() -> None:
    scripts = [Script(OK, ends=False) for _ in range(2)]
    async with visiting(*scripts) as client:
        for script in scripts:
            client.say(GET + b"\r\n")
            await client.until(b"hi")
            await asyncio.wait_for(script.closed.wait(), PATIENCE)
        client.say(b"GET / HTTP/1.1\r\nHost: 127.7.8.9:700\r\n\r\n")
        assert status_of(await client.rest()) == 403


async def test_requests_that_were_sent_ahead_wait_for_their_turn() -> None:
    scripts = [Script(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d" % i) for i in range(3)]
    async with visiting(*scripts) as client:
        client.say((GET + b"\r\n") * 2 + GET + LAST)
        found = await client.rest()
    assert [part[:1] for part in found.split(b"\r\n\r\n")[1:]] == [b"0", b"1", b"2"]


async def test_a_chunked_request_reaches_the_server_while_it_is_sent() -> None:
    script = Script(ends=False)
    async with visiting(script) as client:
        client.say(POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        await script.until(b"5\r\nfirst\r\n")
        client.say(b"3;ext=1\r\nend\r\n0\r\nTrailer: x\r\n\r\n")
        await script.until(b"3\r\nend\r\n0\r\n\r\n")
        script.say(OK)
        assert status_of(await client.until(b"hi")) == 200
    assert b"content-length" not in script.heard.lower()


async def test_an_answer_reaches_the_client_while_it_is_made() -> None:
    script = Script(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", ends=False)
    async with visiting(script) as client:
        client.say(GET + b"\r\n")
        await client.until(b"\r\n\r\n")
        for number in range(3):
            script.say(b"7\r\ndata: %d\r\n" % number)
            assert (await client.until(b"data: %d\r\n" % number)).endswith(b"data: %d\r\n" % number)
        script.say(b"0\r\n\r\n")
        assert await client.until(b"0\r\n\r\n")


async def test_an_answer_of_thousands_of_fields_is_no_answer() -> None:
    """To read and judge them all would hold everybody else up."""
    for status in (b"103 Early", b"200 OK"):
        said = b"HTTP/1.1 " + status + b"\r\n" + b"a:\r\n" * 10_000 + b"\r\n"
        assert status_of(await answer_to(GET + LAST, Script(said))) == 502
    assert status_of(await answer_to(GET + b"a:\r\n" * 10_000 + LAST, Script())) == 431


async def test_a_request_in_single_bytes_holds_nobody_up() -> None:
    script, ticks = Script(ends=False), 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    async with visiting(script) as client:
        ticking = asyncio.create_task(tick())
        client.say(POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 4000)
        client.say(b"0\r\n\r\n")
        await script.until(b"\r\n0\r\n\r\n")
        ticking.cancel()
        script.say(OK)
        assert status_of(await client.until(b"hi")) == 200
    assert ticks > 50, "others had their turns"


async def test_a_head_has_the_length_and_not_the_body() -> None:
    script = Script(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", ends=False)
    found = await answer_to(b"HEAD / HTTP/1.1\r\n" + HEAD + LAST, script)
    assert b"Content-Length: 1000" in found
    assert body_of(found) == b""


async def test_a_client_that_asks_before_sending_is_told_by_the_server() -> None:
    script = Script(ends=False)
    async with visiting(script) as client:
        client.say(POST + b"Content-Length: 4\r\nExpect: 100-continue\r\n\r\n")
        await script.until(b"Expect: 100-continue")
        script.say(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.say(b"body")
        await script.until(b"\r\n\r\nbody")
        script.say(OK)
        await client.until(b"hi")
    script = Script(b"HTTP/1.1 413 No\r\nContent-Length: 0\r\n\r\n")
    request = POST + b"Content-Length: 99\r\nExpect: 100-continue\r\n\r\n"
    assert status_of(await answer_to(request, script)) == 413


async def test_an_old_client_gets_an_answer_that_it_understands() -> None:
    hints = b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n"
    script = Script(
        hints + b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"
    )
    found = await answer_to(b"GET / HTTP/1.0\r\n" + HEAD + b"\r\n", script)
    assert found.startswith(b"HTTP/1.1 200")
    assert b"chunked" not in found.lower()
    assert body_of(found) == b"hi"


async def test_an_old_servers_answer_ends_with_its_connection() -> None:
    script = Script(b"HTTP/1.0 200 OK\r\n\r\nso", b"me text")
    found = await answer_to(GET + LAST, script)
    assert b"transfer-encoding: chunked" in found.lower()
    assert found.endswith(b"\r\n\r\n2\r\nso\r\n7\r\nme text\r\n0\r\n\r\n")


# Hostile servers.


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX Bad: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\0b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: unfinished",
        b"HTTP/1.1 99 No\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nraw",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 100,
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 20),
        b"HTTP/1.1 200 OK\r\n" + b"X: 1\r\n" * 100_000,
        b"\r\n" * 100_000,
    ],
)
async def test_a_server_that_does_not_keep_to_http_costs_nothing_but_its_own_request(
    said: bytes,
) -> None:
    found = await answer_to(GET + LAST, Script(said))
    assert b"HTTP/1.1 502 Bad Gateway\r\n" in found  # answers before the answer may have passed
    assert b"gave no proper answer" in found


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nshort\r\nZZ\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nshort\r\n" + b"1" * 100_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nshort\r\n1;" + b"x" * 100_000,
    ],
)
async def test_an_answer_that_breaks_off_does_not_look_whole(said: bytes) -> None:
    async with visiting(Script(said)) as client:
        client.say(GET + b"\r\n")
        with pytest.raises(ConnectionResetError):
            await client.rest()


async def test_a_connection_that_breaks_is_no_end_of_an_old_servers_answer() -> None:
    broken = OSError(errno.ECONNRESET, "reset")
    async with visiting(Script(b"HTTP/1.0 200 OK\r\n\r\nhalf", broken, ends=False)) as client:
        client.say(GET + b"\r\n")
        with pytest.raises(ConnectionResetError):
            await client.rest()


async def test_what_follows_an_answer_is_part_of_no_other_one() -> None:
    evil = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
    async with visiting(Script(OK + evil, ends=False), Script(OK)) as client:
        client.say(GET + b"\r\n")
        await client.until(b"hi")
        client.say(GET + LAST)
        assert b"evil" not in await client.rest()


async def test_a_length_beside_chunks_does_not_pass() -> None:
    said = CHUNKED.replace(b"OK\r\n", b"OK\r\nContent-Length: 1\r\n")
    found = await answer_to(GET + LAST, Script(said))
    assert b"content-length" not in found.lower()
    assert body_of(found) == b"2\r\nhi\r\n0\r\n\r\n"


@pytest.mark.parametrize("whose", ["server", "client"])
async def test_a_flood_of_tiny_chunks_leaves_everybody_else_their_turn(whose: str) -> None:
    chunks = b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n"
    said, asked = b"HTTP/1.1 200 OK\r\n" + chunks, GET + LAST
    if whose == "client":
        said, asked = OK, POST + b"Connection: close\r\n" + chunks
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            before = time.monotonic()
            await asyncio.sleep(0)
            longest = max(longest, time.monotonic() - before)

    watching = asyncio.create_task(watch())
    began = time.monotonic()
    if whose == "server":
        found = await answer_to(asked, Script(said))
    else:
        script = Script(ends=False)
        async with visiting(script) as client:
            client.say(asked)
            await script.until(b"0\r\n\r\n")
            script.say(said)
            await client.rest()
        found = bytes(script.heard)
    took = time.monotonic() - began
    watching.cancel()
    assert found.count(b"x") >= 20_000
    assert longest < took / 4


# Why there is no answer.


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (OSError(errno.ECONNREFUSED, "?"), 502, b"Nothing listens on this port"),
        (OSError(errno.ETIMEDOUT, "?"), 504, b"did not answer: Connection timed out"),
        (OSError(errno.ECONNRESET, "<b>"), 502, b"did not answer: Connection reset by peer"),
        (OSError(errno.EAGAIN, "?"), 503, b"too many connections"),
        (errors.SandboxDied("it is gone", hint="make another"), 503, b"it is gone. make another"),
        (errors.K8eError("paused", hint="k8e sandbox resume"), 503, b"paused. k8e sandbox resume"),
        (BrokenTunnel("it ended"), 502, b"it ended"),
    ],
)
async def test_no_answer_is_explained(error: Exception, status: int, words: bytes) -> None:
    found = await answer_to(GET + b"\r\n", Script(error))
    assert status_of(found) == status
    assert words in found
    assert b"text/plain" in found


# Hostile and slow clients.


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET /" + b"x" * 100_000, 431),
        (GET + b"X: " + b"x" * 100_000, 431),
        (POST + b"Content-Length: x\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (b"GET / HTTP/2.0\r\n" + HEAD + b"\r\n", 505),
    ],
)
async def test_a_malformed_request_is_refused_before_the_sandbox_hears_of_it(
    request_: bytes, status: int
) -> None:
    async with visiting() as client:
        client.say(request_)
        assert status_of(await client.rest()) == status


async def test_two_lengths_are_no_request_within_a_request() -> None:
    inner = b"GET /inner HTTP/1.1\r\n" + HEAD + b"\r\n"
    both = POST + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n" % len(inner)
    script, other = Script(OK, ends=False), Script(OK, ends=False)
    async with visiting(script, other) as client:
        client.say(both + b"\r\n0\r\n\r\n" + inner)
        await client.until(b"hi")
        await client.until(b"hi")  # the second is a request of its own, judged as such
    assert b"/inner" not in script.heard
    assert b"Content-Length" not in script.heard


async def test_a_body_that_breaks_the_rules_ends_the_request() -> None:
    script = Script(ends=False)
    async with visiting(script) as client:
        client.say(POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\nZZZ\r\n")
        with pytest.raises(ConnectionResetError):
            await client.rest()
        await asyncio.wait_for(script.closed.wait(), PATIENCE)


async def test_a_client_that_leaves_ends_its_request_at_once() -> None:
    for request in (GET + b"\r\n", POST + b"Content-Length: 100\r\n\r\nsome"):
        script = Script(ends=False)
        async with visiting(script) as client:
            client.say(request)
            await script.until(b"\r\n\r\n")
            client.writer.close()
            await asyncio.wait_for(script.closed.wait(), PATIENCE)


async def test_a_client_that_takes_its_time_for_a_head_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxy, "HEAD_SECONDS", 0.05)
    for said in (b"", b"GET / HTTP/1.1\r\nHost: "):
        async with visiting() as client:
            client.say(said)
            with pytest.raises(ConnectionResetError):
                await client.rest()


async def test_a_client_that_sends_nothing_of_its_body_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxy, "SLOW_SECONDS", 0.05)
    script = Script(ends=False)
    async with visiting(script) as client:
        client.say(POST + b"Content-Length: 100\r\n\r\nsome")
        await asyncio.wait_for(script.closed.wait(), PATIENCE)


async def test_an_answer_before_the_end_of_the_request_arrives_whole() -> None:
    said = b"HTTP/1.1 413 Too Large\r\nContent-Length: 300000\r\n\r\n" + b"n" * 300_000
    script = Script(said, ends=False)
    async with visiting(script) as client:
        client.say(POST + b"Content-Length: 100000000\r\n\r\n" + b"x" * 200_000)
        found = await client.rest()
    assert status_of(found) == 413
    assert body_of(found) == b"n" * 300_000


async def test_a_client_that_reads_nothing_holds_the_server_back() -> None:
    piece = b"x" * (256 << 10)
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (400 * len(piece))
    script = Script(head, *([piece] * 400), ends=False)
    async with visiting(script) as client:
        client.say(GET + b"\r\n")
        await client.until(b"\r\n\r\n")
        last = -1
        while script.taken != last:  # until nothing moves any more
            last = script.taken
            for _ in range(1000):
                await asyncio.sleep(0)
        assert script.taken < 100
        async with asyncio.timeout(PATIENCE):
            await client.reader.readexactly(400 * len(piece))


# WebSockets.

UPGRADE = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: a\r\n\r\n"
SWITCHED = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Accept: b\r\nSet-Cookie: " + DOOR.cookie + b"=x\r\n\r\n"
)


async def test_after_the_switch_bytes_pass_both_ways_as_they_are() -> None:
    script = Script(ends=False)
    async with visiting(script) as client:
        client.say(GET + UPGRADE + b"early")
        await script.until(b"Upgrade: websocket\r\n\r\n")
        script.say(SWITCHED + b"\0first")
        head = await client.until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 ")
        assert b"Sec-WebSocket-Accept: b" in head
        assert DOOR.cookie not in head
        await client.until(b"\0first")
        await script.until(b"early")
        client.say(b"\xff" * 100_000)
        await script.until(b"\xff" * 100_000)
        script.say(b"")
        assert await client.rest() == b""
    assert script.closed.is_set()


async def test_the_end_of_a_websockets_client_reaches_the_server_which_may_say_goodbye() -> None:
    script = Script(SWITCHED, ends=False)
    async with visiting(script) as client:
        client.say(GET + UPGRADE)
        await client.until(b"\r\n\r\n")
        client.writer.write_eof()
        await script.until(b"<end>")
        script.say(b"goodbye")
        script.say(b"")
        assert await client.rest() == b"goodbye"


async def test_a_server_that_does_not_want_a_websocket_says_so_and_the_connection_goes_on() -> None:
    refusal = b"HTTP/1.1 400 No\r\nContent-Length: 2\r\n\r\nno"
    async with visiting(Script(refusal, ends=False), Script(OK)) as client:
        client.say(GET + UPGRADE)
        assert status_of(await client.until(b"\r\n\r\nno")) == 400
        client.say(GET + LAST)
        assert body_of(await client.rest()) == b"hi"


async def test_another_protocol_than_a_websocket_is_not_switched_to() -> None:
    script = Script(SWITCHED.replace(b"Upgrade: websocket", b"Upgrade: h2c"))
    assert status_of(await answer_to(GET + UPGRADE, script)) == 502
    script = Script(SWITCHED)
    request = GET + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    assert status_of(await answer_to(request, script)) == 502
    assert b"h2c" not in script.heard
