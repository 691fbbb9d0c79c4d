"""The host's end of the link against guests that are honest, slow, broken and hostile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import pytest

from k8e import errors, link
from k8e.guest import wire
from k8e.sessions.operations import Operation

PATIENCE = 60.0


class FakeGuest:
    """A guest's end of the protocol that says whatever a test wants."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._splitter = wire.Splitter(wire.MAX_REQUEST)
        self._frames: list[tuple[int, int, bytes]] = []

    async def dial(self) -> None:
        path = str(self._folder / "sock")
        self._reader, self._writer = await asyncio.open_unix_connection(path)

    async def greet(self, key: bytes | None = None) -> None:
        """The handshake, with a key of one's own if need be."""
        key = (self._folder / "key").read_bytes() if key is None else key
        self.send(wire.HELLO, 0, b"n" * link.NONCE_SIZE)
        kind, _, body = await self.receive()
        assert kind == wire.WELCOME
        assert body[16:] == wire.proof((self._folder / "key").read_bytes(), b"n" * 16, b"host")
        self.send(wire.PROOF, 0, wire.proof(key, body[:16], b"guest"))

    def send(self, kind: int, channel: int, body: bytes = b"") -> None:
        self.send_raw(wire.frame(kind, channel, body))

    def send_raw(self, data: bytes) -> None:
        self._writer.write(data)

    async def receive(self) -> tuple[int, int, bytes]:
        async with asyncio.timeout(PATIENCE):
            while not self._frames:
                data = await self._reader.read(1 << 16)
                if not data:
                    raise ConnectionResetError
                self._frames += self._splitter.feed(data)
        return self._frames.pop(0)

    async def call(self) -> tuple[int, dict[str, Any]]:
        """The next CALL: its channel and what it asks."""
        kind, channel, body = await self.receive()
        assert kind == wire.CALL
        return channel, wire.unpack_dict(body)

    async def was_cut_off(self) -> bool:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            async with asyncio.timeout(PATIENCE):
                while await self._reader.read(1 << 16):
                    pass
        return True

    def hang_up(self) -> None:
        self._writer.close()


class Call:
    """The host's side of one operation."""

    def __init__(self, link: link.Link, op: str = "exec", **call: Any) -> None:
        self.frames: list[tuple[int, bytes]] = []
        self.lost = asyncio.Event()
        self.operation = Operation(op, self._on_frame)
        self._changed = asyncio.Event()
        channel = link.open({"op": op, **call}, self.operation.receive, self.lost.set)
        self.operation.attach(channel)

    def _on_frame(self, kind: int, body: bytes) -> None:
        self.frames.append((kind, body))
        self._changed.set()

    async def until(self, count: int) -> list[tuple[int, bytes]]:
        async with asyncio.timeout(PATIENCE):
            while len(self.frames) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.frames


@pytest.fixture
async def listener(tmp_path: Path) -> AsyncGenerator[link.Listener]:
    folder = tmp_path / "link"
    link.Listener.prepare(folder, owner=os.geteuid())
    listener = link.Listener(folder)
    await listener.listen()
    yield listener
    listener.close(errors.SandboxDied("the test is over"))


@pytest.fixture
async def guest(listener: link.Listener, tmp_path: Path) -> AsyncGenerator[FakeGuest]:
    guest = FakeGuest(tmp_path / "link")
    await guest.dial()
    yield guest
    guest.hang_up()


async def test_key_and_socket_are_closed_to_all_but_their_owner(
    listener: link.Listener, tmp_path: Path
) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "link").iterdir()}
    assert modes == {"key": 0o400, "sock": 0o600}


async def test_an_honest_guest_becomes_the_link(listener: link.Listener, guest: FakeGuest) -> None:
    assert listener.link is None
    await guest.greet()
    assert await listener.ready(PATIENCE) is listener.link


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([wire.frame(wire.RESULT, 0, b"")], id="no handshake"),
        pytest.param([wire.frame(wire.HELLO, 0, b"short")], id="short nonce"),
        pytest.param([wire.frame(wire.PROOF, 0, b"p" * 32)], id="proof before hello"),
        pytest.param([wire.frame(wire.HELLO, 0, b"n" * 16)] * 2, id="hello twice"),
        pytest.param([wire.HEADER.pack(1 << 30, wire.HELLO, 0)], id="oversized frame"),
        pytest.param([b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 40], id="another protocol"),
        pytest.param([b"\xff" * 4096], id="garbage"),
    ],
)
async def test_who_does_not_speak_the_handshake_is_cut_off(
    listener: link.Listener, guest: FakeGuest, frames: list[bytes]
) -> None:
    for frame in frames:
        guest.send_raw(frame)
    assert await guest.was_cut_off()
    assert listener.link is None


async def test_a_guest_with_the_wrong_key_is_cut_off(
    listener: link.Listener, guest: FakeGuest
) -> None:
    await guest.greet(key=b"x" * 32)
    assert await guest.was_cut_off()
    assert listener.link is None


async def test_our_own_proof_reflected_does_not_pass(
    listener: link.Listener, guest: FakeGuest, tmp_path: Path
) -> None:
    """A second connection as an oracle: the host's proofs are of another role than a guest's."""
    oracle = FakeGuest(tmp_path / "link")
    await oracle.dial()
    guest.send(wire.HELLO, 0, b"n" * 16)
    _, _, welcome = await guest.receive()
    oracle.send(wire.HELLO, 0, welcome[:16])
    _, _, proved = await oracle.receive()
    guest.send(wire.PROOF, 0, proved[16:])
    assert await guest.was_cut_off()
    assert listener.link is None
    oracle.hang_up()


async def test_a_guest_that_says_nothing_is_cut_off_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "HANDSHAKE_SECONDS", 0.05)
    folder = tmp_path / "link"
    link.Listener.prepare(folder, owner=os.geteuid())
    listener = link.Listener(folder)
    await listener.listen()
    guest = FakeGuest(folder)
    await guest.dial()
    assert await guest.was_cut_off()
    guest.hang_up()
    listener.close(errors.SandboxDied("over"))


async def test_a_request_gets_its_answer_and_an_error_its_class(
    listener: link.Listener, guest: FakeGuest
) -> None:
    await guest.greet()
    ready = await listener.ready(PATIENCE)
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(link.request(ready, {"op": "stat", "path": "x"}))
        channel, call = await guest.call()
        assert call == {"op": "stat", "path": "x"}
        guest.send(wire.RESULT, channel, wire.pack({"size": 5}))
        assert await asking == {"size": 5}
    for code, kind in (("ENOENT", FileNotFoundError), ("ESRCH", errors.ExecNotFound)):
        failing = asyncio.ensure_future(link.request(ready, {"op": "stat"}))
        channel, _ = await guest.call()
        guest.send(wire.ERROR, channel, wire.pack({"code": code, "message": "no"}))
        with pytest.raises(kind):
            await failing


@pytest.mark.parametrize("body", [b"", b"nonsense", b"\xff" * 100, wire.pack([1])])
async def test_an_answer_that_is_nonsense_is_the_guests_failure(
    listener: link.Listener, guest: FakeGuest, body: bytes
) -> None:
    await guest.greet()
    asking = asyncio.ensure_future(link.request(await listener.ready(PATIENCE), {"op": "ping"}))
    channel, _ = await guest.call()
    guest.send(wire.RESULT, channel, body)
    with pytest.raises(errors.GuestFailed, match="nonsense"):
        await asking


async def test_an_answer_that_does_not_come_is_the_guests_failure(
    listener: link.Listener, guest: FakeGuest
) -> None:
    await guest.greet()
    ready = await listener.ready(PATIENCE)
    with pytest.raises(errors.GuestFailed, match="in time"):
        await link.request(ready, {"op": "ping"}, seconds=0.02)


@pytest.mark.parametrize(
    "breach",
    [
        pytest.param((wire.OUT, bytes(8 + 5000)), id="more than its credit"),
        pytest.param((wire.OUT, b"short"), id="output without a number"),
        pytest.param((wire.ERR, bytes(8)), id="empty output"),
        pytest.param((wire.DATA, b""), id="empty data"),
        pytest.param((wire.CREDIT, b"x"), id="malformed credit"),
        pytest.param((wire.CREDIT, wire.CREDIT_BODY.pack(0)), id="credit of nothing"),
        pytest.param((wire.CREDIT, wire.CREDIT_BODY.pack(1)), id="credit for nothing"),
        pytest.param((wire.CALL, b""), id="a call of its own"),
        pytest.param((wire.STDIN, b"x"), id="what only clients send"),
        pytest.param((250, b"x"), id="a frame of no kind"),
        pytest.param((wire.RESULT, b""), id="a second answer"),
    ],
)
async def test_the_first_breach_ends_the_link_and_everybody_hears_of_it(
    listener: link.Listener, guest: FakeGuest, breach: tuple[int, bytes]
) -> None:
    await guest.greet()
    ready = await listener.ready(PATIENCE)
    victim, bystander = Call(ready, window=4096), Call(ready)
    channel, _ = await guest.call()
    guest.send(wire.RESULT, channel, wire.pack({"id": "x"}))
    guest.send(breach[0], channel, breach[1])
    assert await guest.was_cut_off()
    async with asyncio.timeout(PATIENCE):
        await victim.lost.wait()
        await bystander.lost.wait()
    assert listener.link is None


async def test_an_oversized_frame_ends_the_link(listener: link.Listener, guest: FakeGuest) -> None:
    await guest.greet()
    call = Call(await listener.ready(PATIENCE))
    channel, _ = await guest.call()
    guest.send_raw(wire.HEADER.pack(wire.MAX_REPLY + 100, wire.OUT, channel))
    assert await guest.was_cut_off()
    assert call.lost.is_set()


async def test_frames_for_channels_that_nobody_opened_are_ignored(
    listener: link.Listener, guest: FakeGuest
) -> None:
    await guest.greet()
    call = Call(await listener.ready(PATIENCE), op="ping")
    channel, _ = await guest.call()
    for number in (0, channel + 1, 0xFFFFFFFF):
        guest.send(wire.OUT, number, bytes(100_000))
        guest.send(wire.EXIT, number, b"x")
    guest.send(wire.RESULT, channel, wire.pack({}))
    assert await call.until(1) == [(wire.RESULT, wire.pack({}))]


async def test_credit_lets_exactly_as_much_through(
    listener: link.Listener, guest: FakeGuest
) -> None:
    await guest.greet()
    call = Call(await listener.ready(PATIENCE), window=1000)
    channel, _ = await guest.call()
    guest.send(wire.OUT, channel, bytes(8 + 1000))
    await call.until(1)
    call.operation.send(wire.CREDIT, wire.CREDIT_BODY.pack(500))
    assert (await guest.receive())[0] == wire.CREDIT
    guest.send(wire.OUT, channel, bytes(8 + 500))
    await call.until(2)
    guest.send(wire.OUT, channel, bytes(8 + 1))
    assert await guest.was_cut_off()


async def test_a_new_link_replaces_the_old_one(
    listener: link.Listener, guest: FakeGuest, tmp_path: Path
) -> None:
    await guest.greet()
    first = await listener.ready(PATIENCE)
    again = FakeGuest(tmp_path / "link")
    await again.dial()
    await again.greet()
    assert await guest.was_cut_off()
    assert await listener.ready(PATIENCE) is not first
    again.hang_up()


async def test_waiting_for_a_guest_is_bounded_and_says_so(listener: link.Listener) -> None:
    with pytest.raises(errors.GuestFailed, match="did not connect"):
        await listener.ready(0.02)


async def test_waiting_for_a_guest_ends_with_the_reason_when_the_sandbox_dies(
    listener: link.Listener,
) -> None:
    waiting = asyncio.ensure_future(listener.ready(PATIENCE))
    await asyncio.sleep(0)
    listener.close(errors.SandboxDied("it ran out of memory"))
    with pytest.raises(errors.SandboxDied, match="memory"):
        await waiting


async def test_a_later_listener_takes_the_socket_over(
    listener: link.Listener, tmp_path: Path
) -> None:
    later = link.Listener(tmp_path / "link")
    (tmp_path / "link" / "sock.99999").touch()  # left by a gateway that was killed while starting
    await later.listen()
    guest = FakeGuest(tmp_path / "link")
    await guest.dial()
    await guest.greet()
    await later.ready(PATIENCE)
    assert listener.link is None
    assert sorted(path.name for path in (tmp_path / "link").iterdir()) == ["key", "sock"]
    guest.hang_up()
    later.close(errors.SandboxDied("over"))


class Sink:
    """A transport that keeps what is written, write by write."""

    def __init__(self) -> None:
        self.writes: list[int] = []

    def is_closing(self) -> bool:
        return False

    def writelines(self, parts: list[bytes]) -> None:
        self.writes.append(len(wire.Splitter(wire.MAX_REQUEST).feed(b"".join(parts))))


def test_what_is_sent_in_a_batch_goes_together_and_what_is_much_goes_before() -> None:
    sink, outgoing = Sink(), link.Outgoing()
    outgoing.transport = cast("asyncio.Transport", sink)
    outgoing.send(wire.RESULT, 1, b"x")
    assert sink.writes == [1]
    with link.batch:
        for _ in range(link.MAX_PUT_OFF + 2):
            outgoing.send(wire.RESULT, 1, b"x")
        assert sink.writes == [1, link.MAX_PUT_OFF]
    assert sink.writes == [1, link.MAX_PUT_OFF, 2]


def test_what_fails_at_the_end_of_a_batch_keeps_nothing_else_from_being_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[str] = []

    def fail() -> None:
        raise RuntimeError("unforeseen")

    with link.batch:
        link.batch.afterwards(fail)
        link.batch.afterwards(lambda: seen.append("done"))
        assert not seen
    assert seen == ["done"]
    assert "unforeseen" in caplog.text
    link.batch.afterwards(lambda: seen.append("at once"))
    assert seen == ["done", "at once"]
