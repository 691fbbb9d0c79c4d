"""Calls that share one connection to the local gateway: each has its own fate."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import k8e
from k8e import AsyncSandboxClient, errors
from k8e.client import trunk
from k8e.guest import wire
from tests.places import NewPlace, Place

pytestmark = pytest.mark.anyio

PATIENCE = 60.0


class Peer:
    """A gateway's end of one connection, which says whatever a test wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self._splitter = wire.Splitter(wire.MAX_REQUEST)
        self._frames: list[tuple[int, int, bytes]] = []

    async def receive(self) -> tuple[int, int, bytes]:
        async with asyncio.timeout(PATIENCE):
            while not self._frames:
                data = await self._reader.read(1 << 16)
                if not data:
                    raise ConnectionResetError
                self._frames += self._splitter.feed(data)
        return self._frames.pop(0)

    async def calls(self, count: int) -> dict[str, int]:
        """The next calls: what each one asks for, and its channel."""
        found: dict[str, int] = {}
        for _ in range(count):
            kind, channel, body = await self.receive()
            assert kind == wire.CALL
            found[str(wire.unpack_dict(body)["session_id"])] = channel
        return found

    def answer(self, channel: int, **told: Any) -> None:
        self.send(wire.RESULT, channel, wire.pack({"session": session(**told)}))

    def send(self, kind: int, channel: int, body: bytes) -> None:
        self.writer.write(wire.frame(kind, channel, body))


def session(**told: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "tenant_id": "t",
        "runtime": "gvisor",
        "phase": "active",
        "created_at": 0.0,
    }
    fields |= {"expires_at": 0.0, "idle_timeout": 0.0, "labels": {}, "env_keys": [], "limits": {}}
    return {**fields, **told}


async def answer_all(peer: Peer, asked: list[str] | None = None) -> None:
    """Be a gateway that knows every session that it is asked for."""
    with contextlib.suppress(ConnectionResetError):
        while True:
            for name, channel in (await peer.calls(1)).items():
                peer.answer(channel, session_id=name)
                if asked is not None:
                    asked.append(name)


class Scene:
    """A client, and a gateway whose connections are treated as the next of ``manners`` says."""

    def __init__(self, path: Path, *manners: Callable[[Peer], Awaitable[None]]) -> None:
        self.path = path
        self.client = AsyncSandboxClient(f"unix:{path}")
        self.connections = 0
        self._manners = manners

    async def welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        manner = self._manners[min(self.connections, len(self._manners) - 1)]
        self.connections += 1
        try:
            await manner(Peer(reader, writer))
        finally:
            writer.close()

    def get(self, name: str) -> asyncio.Task[k8e.SessionInfo]:
        return asyncio.create_task(self.client.get_session(name))


@contextlib.asynccontextmanager
async def scene(path: Path, *manners: Callable[[Peer], Awaitable[None]]) -> AsyncGenerator[Scene]:
    made = Scene(path, *manners)
    server = await asyncio.start_unix_server(made.welcome, path)
    try:
        async with made.client, asyncio.timeout(2 * PATIENCE):
            yield made
    finally:
        server.close()


async def results(tasks: list[asyncio.Task[k8e.SessionInfo]]) -> list[str]:
    """Of each task the session that it was given, or the error."""
    told = await asyncio.gather(*tasks, return_exceptions=True)
    return [one.session_id if isinstance(one, k8e.SessionInfo) else repr(one) for one in told]


async def test_calls_at_once_share_one_connection(tmp_path: Path) -> None:
    async with scene(tmp_path / "s", answer_all) as here:
        names = [f"s{number}" for number in range(100)]
        assert await results([here.get(name) for name in names]) == names
        assert await results([here.get(name) for name in names]) == names
        assert here.connections == 1


async def test_more_calls_than_a_connection_takes_get_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trunk, "MAX_LANES", 4)
    async with scene(tmp_path / "s", answer_all) as here:
        names = [f"s{number}" for number in range(10)]
        assert await results([here.get(name) for name in names]) == names
        assert here.connections == 3


async def test_a_cancelled_call_takes_no_other_with_it(tmp_path: Path) -> None:
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    channels: dict[str, int] = {}

    async def wait_for_cancel(peer: Peer) -> None:
        channels.update(await peer.calls(3))
        tasks[1].cancel()
        kind, channel, _ = await peer.receive()
        assert kind == wire.CANCEL
        ended.set_result(channel)
        for name in ("a", "c"):
            peer.answer(channels[name], session_id=name)
        await answer_all(peer)

    async with scene(tmp_path / "s", wait_for_cancel) as here:
        tasks = [here.get(name) for name in "abc"]
        first, second, third = await results(tasks)
        assert (first, third) == ("a", "c")
        assert "CancelledError" in second
        assert ended.result() == channels["b"]
        assert await results([here.get("d")]) == ["d"]


async def test_a_refused_call_takes_no_other_with_it(tmp_path: Path) -> None:
    async def refuse_one(peer: Peer) -> None:
        channels = await peer.calls(2)
        error = errors.SessionNotFound("session a: not found")
        peer.send(wire.ERROR, channels["a"], wire.pack(error.to_wire()))
        peer.answer(channels["b"], session_id="b")
        await answer_all(peer)

    async with scene(tmp_path / "s", refuse_one) as here:
        refused, given = await results([here.get(name) for name in "ab"])
        assert "SessionNotFound" in refused
        assert given == "b"
        assert await results([here.get("c")]) == ["c"]


async def leave(peer: Peer) -> None:
    """Read everything, and leave without a word."""
    await peer.calls(3)


async def test_no_call_that_may_have_been_read_is_sent_again(tmp_path: Path) -> None:
    async with scene(tmp_path / "s", leave, answer_all) as here:
        told = await results([here.get(name) for name in "abc"])
        assert all("closed the connection" in one for one in told)
        assert here.connections == 1
        assert await results([here.get("d")]) == ["d"]


async def test_calls_that_a_leaving_gateway_did_not_read_are_sent_to_the_next(
    tmp_path: Path,
) -> None:
    async def say_goodbye(peer: Peer) -> None:
        channels = await peer.calls(3)
        peer.send(wire.GOODBYE, 0, wire.CREDIT_BODY.pack(channels["b"]))
        peer.answer(channels["a"], session_id="a")

    async with scene(tmp_path / "s", say_goodbye, answer_all) as here:
        first, second, third = await results([here.get(name) for name in "abc"])
        assert first == "a"
        assert "closed the connection" in second
        assert third == "c"


async def test_calls_after_a_goodbye_go_to_the_next_gateway_at_once(tmp_path: Path) -> None:
    async def say_goodbye_and_stay(peer: Peer) -> None:
        channels = await peer.calls(1)
        peer.send(wire.GOODBYE, 0, wire.CREDIT_BODY.pack(channels["a"]))
        peer.answer(channels["a"], session_id="a")
        with contextlib.suppress(ConnectionResetError):
            await peer.receive()

    async with scene(tmp_path / "s", say_goodbye_and_stay, answer_all) as here:
        assert await results([here.get("a")]) == ["a"]
        assert await results([here.get("b")]) == ["b"]


@contextlib.asynccontextmanager
async def listening(path: Path) -> AsyncGenerator[tuple[socket.socket, AsyncSandboxClient]]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)
        async with asyncio.timeout(PATIENCE), AsyncSandboxClient(f"unix:{path}") as client:
            yield listener, client


@contextlib.asynccontextmanager
async def answering(listener: socket.socket) -> AsyncGenerator[list[str]]:
    """Be the next gateway; what it was asked for."""
    asked: list[str] = []

    async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answer_all(Peer(reader, writer), asked)
        writer.close()

    server = await asyncio.start_unix_server(welcome, sock=listener)
    try:
        yield asked
    finally:
        server.close()


def wait_for_calls(peer: socket.socket, count: int) -> None:
    """Wait until so many calls have come, and read none of them."""
    peer.settimeout(PATIENCE)
    while True:
        data = peer.recv(1 << 16, socket.MSG_PEEK)
        if len(wire.Splitter(wire.MAX_REQUEST).feed(data)) == count:
            return


async def test_of_many_calls_that_were_left_unread_only_the_last_is_sure_to_be(
    tmp_path: Path,
) -> None:
    """A socket that is closed with something unread says that, and not how much it was."""
    async with listening(tmp_path / "s") as (listener, client):
        tasks = [asyncio.create_task(client.get_session(name)) for name in "abc"]
        peer, _ = await asyncio.get_running_loop().sock_accept(listener)
        await asyncio.to_thread(wait_for_calls, peer, 3)
        peer.close()
        async with answering(listener) as asked:
            first, second, third = await results(tasks)
        assert "closed the connection" in first
        assert "closed the connection" in second
        assert (third, asked) == ("c", ["c"])


async def test_calls_to_a_gateway_that_is_gone_are_all_sent_to_the_next(tmp_path: Path) -> None:
    async with listening(tmp_path / "s") as (listener, client):
        first = asyncio.create_task(client.get_session("a"))
        peer, _ = await asyncio.get_running_loop().sock_accept(listener)
        await asyncio.to_thread(wait_for_calls, peer, 1)
        told = wire.pack({"session": session(session_id="a")})
        peer.recv(1 << 16)
        peer.sendall(wire.frame(wire.RESULT, 1, told))
        assert await results([first]) == ["a"]
        peer.close()  # and before the client can know that:
        tasks = [asyncio.create_task(client.get_session(name)) for name in "bcd"]
        async with answering(listener) as asked:
            assert await results(tasks) == ["b", "c", "d"]
        assert sorted(asked) == ["b", "c", "d"]


async def test_what_is_not_of_the_protocol_fails_every_call(tmp_path: Path) -> None:
    async def talk_nonsense(peer: Peer) -> None:
        await peer.calls(2)
        peer.writer.write(b"\xff" * 64)
        with contextlib.suppress(ConnectionResetError):
            await peer.receive()

    async with scene(tmp_path / "s", talk_nonsense, answer_all) as here:
        told = await results([here.get(name) for name in "ab"])
        assert all("not k8e's" in one for one in told)
        assert await results([here.get("c")]) == ["c"]


async def test_a_call_larger_than_the_socket_takes_at_once_arrives_whole(tmp_path: Path) -> None:
    names = [letter * (4 << 20) for letter in "ab"]
    async with scene(tmp_path / "s", answer_all) as here:
        tasks = [here.get(name) for name in [*names, "c"]]
        assert await results(tasks) == [*names, "c"]


async def test_a_client_that_is_closed_lets_its_calls_end(tmp_path: Path) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()
    gone = asyncio.Event()

    async def answer_late(peer: Peer) -> None:
        channels = await peer.calls(1)
        asked.set()
        await go_on.wait()
        peer.answer(channels["a"], session_id="a")
        with contextlib.suppress(ConnectionResetError):
            await peer.receive()
        gone.set()

    async with scene(tmp_path / "s", answer_late) as here:
        task = here.get("a")
        await asked.wait()
        await here.client.close()
        go_on.set()
        assert await results([task]) == ["a"]
        await gone.wait()  # and then the connection was closed


def test_each_event_loop_has_a_connection_of_its_own(tmp_path: Path) -> None:
    made: list[Scene] = []

    async def once() -> list[str]:
        server = await asyncio.start_unix_server(made[0].welcome, made[0].path)
        try:
            async with asyncio.timeout(PATIENCE):
                return await results([made[0].get("a"), made[0].get("b")])
        finally:
            server.close()
            made[0].path.unlink(missing_ok=True)

    made.append(Scene(tmp_path / "s", answer_all))
    assert asyncio.run(once()) == ["a", "b"]
    assert asyncio.run(once()) == ["a", "b"]
    assert made[0].connections == 2
    asyncio.run(made[0].client.close())


# With sandboxes.


@pytest.fixture
async def aclient(place: Place) -> AsyncIterator[AsyncSandboxClient]:
    async with AsyncSandboxClient(f"unix:{place.socket}") as client:
        yield client


async def test_a_stream_that_nobody_reads_holds_no_call_up(
    aclient: AsyncSandboxClient, session_id: str
) -> None:
    async with (
        asyncio.timeout(60),
        contextlib.aclosing(aclient.exec_events(session_id, "yes")) as stuck,
    ):
        await anext(stuck)
        told = await asyncio.gather(
            *(aclient.exec(session_id, f"head -c 300000 /dev/zero; echo {n}") for n in range(8))
        )
        assert [one.stdout[-2:] for one in told] == [f"{n}\n" for n in range(8)]
        await anext(stuck)


CLIENT = """
import asyncio, sys
from k8e import AsyncSandboxClient

async def main():
    client = AsyncSandboxClient(sys.argv[1])
    await asyncio.gather(*(
        client.exec(sys.argv[2], ["sleep", "600"], 0, exec_id=name, kill_on_disconnect=kill == "k")
        for kill, name in (word.split(":") for word in sys.argv[3:])
    ))

asyncio.run(main())
"""


async def test_a_client_that_dies_takes_along_what_it_asked_to_be_killed(
    aclient: AsyncSandboxClient, place: Place, session_id: str
) -> None:
    stamp = time.time_ns()
    killed, kept = [f"k{n}-{stamp}" for n in range(4)], f"kept-{stamp}"
    words = [*(f"k:{name}" for name in killed), f"n:{kept}"]
    arguments = ["-c", CLIENT, f"unix:{place.socket}", session_id, *words]
    path = os.pathsep.join(sys.path)
    client = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, env={**os.environ, "PYTHONPATH": path}
    )
    try:
        await until(aclient, session_id, dict.fromkeys([*killed, kept], "running"))
    finally:
        client.kill()
        await client.wait()
    await until(aclient, session_id, {**dict.fromkeys(killed, "killed"), kept: "running"})
    await aclient.kill(session_id, kept)


async def until(client: AsyncSandboxClient, session_id: str, wanted: dict[str, str]) -> None:
    """Wait until commands have a status; the guest reports that to nobody who does not ask."""
    async with asyncio.timeout(60):
        while True:
            told = {item.exec_id: item.status for item in await client.execs(session_id)}
            if wanted.items() <= told.items():
                return
            await asyncio.sleep(0.02)


async def test_a_gateway_that_is_stopped_says_which_calls_it_has_read(new_place: NewPlace) -> None:
    place = new_place()
    await asyncio.to_thread(place.json, "sandbox", "sessions")
    peer = Peer(*await asyncio.open_unix_connection(place.socket))
    heard: list[tuple[int, int, bytes]] = []
    try:
        for channel, op in ((1, "status"), (2, "stop")):
            peer.send(wire.CALL, channel, wire.pack({"op": op}))
        with contextlib.suppress(ConnectionResetError):
            while True:
                heard.append(await peer.receive())
    finally:
        peer.writer.close()
    assert [(kind, channel) for kind, channel, _ in heard[:2]] == [
        (wire.RESULT, 1),
        (wire.RESULT, 2),
    ]
    assert heard[2:] == [(wire.GOODBYE, 0, wire.CREDIT_BODY.pack(2))]
