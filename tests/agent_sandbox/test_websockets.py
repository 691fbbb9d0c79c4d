"""WebSockets through the router, and the end of each."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from k8e import http_connections, websockets
from k8e.agent_sandbox import cluster_router
from k8e.bounded_sockets import Gone
from tests.agent_sandbox.serving import PATIENCE, Pod, Routed, head, pod, routed, sandbox, status

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]
UPGRADE = ("Connection: keep-alive, Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: a2V5")
SWITCHED = (
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Accept: b\r\nSet-Cookie: a=b\r\n\r\n"
)


def frame(opcode: int, payload: bytes, *, masked: bool = False) -> bytes:
    """A whole frame; a client's is masked (here with zeroes)."""
    bit = 0x80 if masked else 0
    size = len(payload)
    if size < 126:
        start = bytes((0x80 | opcode, bit | size))
    elif size < 65536:
        start = bytes((0x80 | opcode, bit | 126)) + struct.pack("!H", size)
    else:
        start = bytes((0x80 | opcode, bit | 127)) + struct.pack("!Q", size)
    return start + (b"\0\0\0\0" if masked else b"") + payload


class Conversation:
    """A WebSocket through the router, with the test at both ends."""

    def __init__(
        self, found: Pod, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pod, self.reader, self.writer = found, reader, writer

    @property
    def server(self) -> asyncio.StreamWriter:
        return self.pod.writers[0]

    async def heard(self, data: bytes) -> None:
        await self.pod.until(lambda: self.pod.heard[0].endswith(data))

    async def read(self, count: int) -> bytes:
        async with asyncio.timeout(PATIENCE):
            return await self.reader.readexactly(count)

    async def rest(self) -> bytes:
        async with asyncio.timeout(PATIENCE):
            return await self.reader.read()


@contextlib.asynccontextmanager
async def conversation(
    folder: Path, *, answer: bytes = SWITCHED, early: bytes = b""
) -> AsyncGenerator[tuple[Conversation, Routed]]:
    async with pod(answer) as found, routed(folder) as router:
        router.add(sandbox("box", found.address))
        reader, writer = await router.connect()
        writer.write(head("GET /ws?a=b HTTP/1.1", *UPGRADE) + early)
        async with asyncio.timeout(PATIENCE):
            said = await reader.readuntil(b"\r\n\r\n")
        assert status(said) == 101
        assert b"sec-websocket-accept: b" in said.lower()
        assert b"set-cookie" not in said.lower()
        try:
            yield Conversation(found, reader, writer), router
        finally:
            writer.transport.abort()


async def test_messages_pass_both_ways_as_they_are(tmp_path: Path) -> None:
    early = frame(2, b"early", masked=True)
    answer = SWITCHED + frame(1, b"welcome")
    async with conversation(tmp_path, answer=answer, early=early) as (one, _):
        assert await one.read(9) == frame(1, b"welcome")
        await one.heard(early)
        request = bytes(one.pod.heard[0])
        assert request.startswith(b"GET /ws?a=b HTTP/1.1\r\n")
        assert b"sec-websocket-key: a2V5" in request
        assert b"authorization" not in request.lower()
        assert request.lower().count(b"connection:") == 1
        for size in (0, 125, 126, 70_000, 300_000):
            said = frame(2, bytes(size), masked=True)
            one.writer.write(said)
            await one.heard(said)
            told = frame(2, b"\1" * size)
            one.server.write(told)
            assert await one.read(len(told)) == told


async def test_the_close_codes_of_both_sides_pass(tmp_path: Path) -> None:
    async with conversation(tmp_path) as (one, _):
        bye = frame(8, struct.pack("!H", 4001) + b"mine", masked=True)
        one.writer.write(bye)
        await one.heard(bye)
        answer = frame(8, struct.pack("!H", 4002) + b"yours")
        one.server.write(answer)
        one.server.close()
        assert await one.rest() == answer, "the server's own code, and none of the router's"
        await one.heard(b"<end>")


@pytest.mark.parametrize("orderly", [True, False])
async def test_a_server_that_is_lost_is_told_with_a_code(tmp_path: Path, orderly: bool) -> None:
    async with conversation(tmp_path) as (one, _):
        one.server.write(frame(1, b"a"))
        assert await one.read(3) == frame(1, b"a")
        if orderly:
            one.server.close()
        else:
            one.server.transport.abort()
        said = await one.rest()
        assert said[0] == 0x88
        assert said[2:4] == struct.pack("!H", websockets.BROKEN)


async def test_no_code_comes_in_the_middle_of_a_message(tmp_path: Path) -> None:
    async with conversation(tmp_path) as (one, _):
        part = frame(2, b"x" * 1000)[:500]
        one.server.write(part)
        assert await one.read(500) == part
        one.server.close()
        with contextlib.suppress(ConnectionResetError):
            assert await one.rest() == b""


async def test_a_client_that_leaves_ends_the_servers_connection(tmp_path: Path) -> None:
    async with conversation(tmp_path) as (one, _):
        one.writer.transport.abort()
        await one.heard(b"<end>")


async def test_a_router_that_stops_says_that_it_goes_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_router, "STOP_SECONDS", 0.1)
    async with pod(SWITCHED) as found:
        async with routed(tmp_path) as router:
            router.add(sandbox("box", found.address))
            reader, writer = await router.connect()
            writer.write(head("GET /ws HTTP/1.1", *UPGRADE))
            await reader.readuntil(b"\r\n\r\n")
        said = await reader.read()
        assert said[2:4] == struct.pack("!H", websockets.GOING_AWAY)
        writer.transport.abort()


async def test_a_websocket_on_which_nothing_moves_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websockets, "IDLE_SECONDS", 0.3)
    async with conversation(tmp_path) as (one, _):
        said = await one.rest()
        assert said[2:4] == struct.pack("!H", websockets.GOING_AWAY)
        assert b"nothing happened" in said
        await one.heard(b"<end>")


async def test_a_side_that_reads_nothing_holds_only_its_own_direction_back(tmp_path: Path) -> None:
    async with conversation(tmp_path) as (one, _):
        piece = frame(2, bytes(1 << 20))
        sent = 0
        while True:
            one.server.write(piece)
            sent += 1
            try:
                async with asyncio.timeout(1):
                    await one.server.drain()
            except TimeoutError:
                break
        assert sent < 40, "megabytes that the router and the kernel hold"
        said = frame(2, b"still heard", masked=True)
        one.writer.write(said)
        await one.heard(said)
        assert await one.read(1 << 20)


@contextlib.asynccontextmanager
async def served(
    app: Callable[[Scope, Receive, Send], Awaitable[None]],
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server of an app."""
    server = http_connections.Server(app)
    listening = cluster_router.listen("127.0.0.1:0")
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        server.told.set()
        async with asyncio.timeout(PATIENCE):
            await serving


SWITCHING = [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]


async def test_a_client_that_took_nothing_before_holds_its_server_back() -> None:
    size = 32 << 20  # more than the kernel holds
    sent = asyncio.get_running_loop().create_future()

    async def app(scope: Scope, _receive: Receive, send: Send) -> None:
        if scope["path"] == "/large":
            length = (b"content-length", b"%d" % size)
            await send({"type": "http.response.start", "status": 200, "headers": [length]})
            await send({"type": "http.response.body", "body": bytes(size)})
            return
        client = scope["state"][http_connections.SWITCH](SWITCHING)
        sending = asyncio.create_task(client.send(b"hello"))
        done, _ = await asyncio.wait({sending}, timeout=0.3)
        sent.set_result(bool(done))
        await sending
        client.close()

    async with served(app) as (reader, writer):
        writer.write(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n" + head("GET /ws HTTP/1.1", *UPGRADE))
        async with asyncio.timeout(PATIENCE):
            assert not await sent, "bytes that nobody takes would fill the memory"
            said = b""
            while data := await reader.read(1 << 20):
                said = (said + data)[-100:]
            assert said.endswith(b"hello")


async def test_there_is_no_switch_for_a_client_that_has_left() -> None:
    told: asyncio.Future[type[BaseException] | None] = asyncio.get_running_loop().create_future()

    asked = asyncio.Event()

    async def app(scope: Scope, receive: Receive, _send: Send) -> None:
        asked.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        try:
            scope["state"][http_connections.SWITCH](SWITCHING)
        except Exception as error:
            told.set_result(type(error))
        else:
            told.set_result(None)

    async with served(app) as (_, writer):
        writer.write(head("GET /ws HTTP/1.1", *UPGRADE))
        async with asyncio.timeout(PATIENCE):
            await asked.wait()
            writer.transport.abort()
            assert await told is Gone


REFUSED = {
    "another answer": (b"HTTP/1.1 403 No\r\nContent-Length: 2\r\n\r\nno", 403),
    "another protocol": (SWITCHED.replace(b"Upgrade: websocket", b"Upgrade: h2c"), 502),
    "no protocol": (b"HTTP/1.1 101 Switching\r\n\r\n", 502),
}


@pytest.mark.parametrize("how", REFUSED)
async def test_a_server_that_does_not_switch_is_answered_for(tmp_path: Path, how: str) -> None:
    answer, wanted = REFUSED[how]
    async with pod(answer) as found, pod() as other, routed(tmp_path) as router:
        router.add(sandbox("box", found.address))
        router.add(sandbox("other", other.address))
        asked = head("GET /ws HTTP/1.1", *UPGRADE)
        said = await router.say(
            asked + head("GET / HTTP/1.1", "Connection: close", sandbox="other")
        )
        assert status(said) == wanted
        assert said.endswith(b"ok"), "the connection goes on, with HTTP"


@pytest.mark.parametrize(
    "fields", [UPGRADE[:1], UPGRADE[1:], ("Connection: Upgrade", "Upgrade: websocket, h2c")]
)
async def test_what_is_no_handshake_is_a_plain_request(
    tmp_path: Path, fields: tuple[str, ...]
) -> None:
    answer = b"HTTP/1.1 426 Upgrade\r\nContent-Length: 0\r\n\r\n"
    async with pod(answer) as found, routed(tmp_path) as router:
        router.add(sandbox("box", found.address))
        asked = head("GET /ws HTTP/1.1", *fields) + head("GET / HTTP/1.1", "Connection: close")
        assert status(await router.say(asked)) == 426
        assert b"upgrade" not in bytes(found.heard[0]).lower()


# Frames.


def test_the_end_of_each_frame_is_found_wherever_the_bytes_are_cut() -> None:
    sizes = (0, 1, 125, 126, 65_535, 65_536)
    whole = b"".join(frame(2, bytes(size), masked=size % 2 == 1) for size in sizes)
    ends = set[int]()
    at = 0
    for size in sizes:
        at += len(frame(2, bytes(size), masked=size % 2 == 1))
        ends.add(at)
    for step in (1, 7, 1000, len(whole)):
        frames = websockets.Frames()
        for start in range(0, len(whole), step):
            frames.feed(whole[start : start + step])
            assert frames.may_close == (min(start + step, len(whole)) in ends)


def test_frames_that_are_only_there_to_make_work_are_not_followed() -> None:
    frames = websockets.Frames()
    frames.feed(frame(2, b"") * 100_000)
    assert not frames.may_close
    assert not frames.closed


def test_after_a_close_frame_there_is_no_other() -> None:
    frames = websockets.Frames()
    frames.feed(frame(8, b""))
    assert frames.closed
    assert not frames.may_close
