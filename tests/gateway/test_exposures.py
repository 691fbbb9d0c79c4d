"""Exposed ports without sandboxes: whose they are, where they listen, what keeps a session busy."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from k8e import errors
from k8e.gateway.ports import exposures as ports_exposures
from k8e.gateway.ports import tunnel as ports_tunnel
from k8e.gateway.ports.exposures import ExposureCalls, Exposures
from k8e.gateway.ports.tunnel import BrokenTunnel, Tunnel
from k8e.guest import wire
from k8e.model import SessionSpec
from k8e.sessions import live, operations
from k8e.sessions.exposures import ExposureStore, new_token
from k8e.sessions.operations import Operation
from k8e.sessions.service import Sessions
from tests.sessions.fakes import ME, OTHER, PATIENCE, World

PORT = 8000


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
async def sessions(world: World) -> AsyncGenerator[Sessions]:
    async with world.running() as sessions:
        yield sessions


@pytest.fixture
def store(tmp_path: Path) -> ExposureStore:
    return ExposureStore(tmp_path / "exposures.db")


@pytest.fixture
async def exposures(sessions: Sessions, store: ExposureStore) -> AsyncGenerator[Exposures]:
    exposures = Exposures(store, sessions)
    async with exposures.running():
        yield exposures
    store.close()


@pytest.fixture
async def session_id(sessions: Sessions) -> str:
    return (await sessions.create(ME, SessionSpec())).session_id


# Whose they are.


async def test_somebody_elses_session_is_not_found(exposures: Exposures, session_id: str) -> None:
    exposed = await exposures.expose(ME, session_id, PORT)
    assert exposures.listing(ME) == [exposed]
    assert exposures.listing(OTHER) == []
    with pytest.raises(errors.SessionNotFound):
        await exposures.expose(OTHER, session_id, PORT)
    with pytest.raises(errors.SessionNotFound):
        exposures.unexpose(OTHER, session_id, PORT)
    with pytest.raises(errors.SessionNotFound):
        exposures.listing(OTHER, session_id)
    assert exposures.listing(ME, session_id) == [exposed]


async def test_many_who_expose_one_port_at_once_get_one_url(
    exposures: Exposures, session_id: str, store: ExposureStore
) -> None:
    found = await asyncio.gather(*(exposures.expose(ME, session_id, PORT) for _ in range(20)))
    assert len({item.url for item in found}) == 1
    assert len(store.all()) == 1


async def test_what_a_session_exposed_is_gone_with_it_and_not_its_successors(
    exposures: Exposures, sessions: Sessions, store: ExposureStore
) -> None:
    spec = SessionSpec(session_id="again")
    await sessions.create(ME, spec)
    exposed = await exposures.expose(ME, "again", PORT)
    await sessions.destroy(ME, "again")
    assert store.all() == []
    assert exposures.listing(ME) == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((exposed.exposure.address, exposed.exposure.listen_port), 5)
    with pytest.raises(errors.SessionNotFound):
        await exposures.expose(ME, "again", PORT)
    await sessions.create(ME, spec)
    assert exposures.listing(ME, "again") == []


async def test_a_session_that_ends_while_a_port_is_exposed_leaves_nothing(
    exposures: Exposures,
    sessions: Sessions,
    session_id: str,
    store: ExposureStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from k8e.gateway.ports.listener import PortListener

    opened = PortListener.open

    async def slowly(door: PortListener, found: socket.socket) -> None:
        await opened(door, found)
        await sessions.destroy(ME, session_id)

    monkeypatch.setattr(PortListener, "open", slowly)
    with pytest.raises(errors.SessionNotFound):
        await exposures.expose(ME, session_id, PORT)
    assert store.all() == []
    assert exposures.listing(ME) == []


async def test_a_door_that_cannot_be_opened_is_none(
    exposures: Exposures, session_id: str, store: ExposureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from k8e.gateway.ports.listener import PortListener

    async def fail(door: PortListener, found: socket.socket) -> None:
        found.close()
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(PortListener, "open", fail)
        with pytest.raises(OSError, match="too many open files"):
            await exposures.expose(ME, session_id, PORT)
    assert exposures.listing(ME) == []
    assert store.all() == []
    assert (await exposures.expose(ME, session_id, PORT)).exposure.port == PORT


async def test_rows_of_sessions_that_ended_meanwhile_are_removed_at_the_start(
    sessions: Sessions, store: ExposureStore, session_id: str
) -> None:
    first = Exposures(store, sessions)
    async with first.running():
        await first.expose(ME, session_id, PORT)
    assert len(store.all()) == 1, "a gateway that stops leaves its URLs to the next one"
    sessions.on_end.clear()
    await sessions.destroy(ME, session_id)
    assert len(store.all()) == 1
    async with Exposures(store, sessions).running():
        assert store.all() == []
    store.close()


async def test_a_tenant_without_a_name_means_the_default_one(
    exposures: Exposures, sessions: Sessions
) -> None:
    calls = ExposureCalls(exposures, sessions)
    with pytest.raises(errors.SessionNotFound, match="no standing session"):
        await calls.unexpose(ME, {"port": PORT})
    told = await calls.expose(ME, {"port": PORT})
    assert sessions.get(ME, told["session_id"]).auto
    assert await calls.expose(ME, {"port": PORT, "tenant": "default"}) == told
    assert (await calls.list_exposed(ME, {}))["services"] == [told]
    await calls.unexpose(ME, {"port": PORT})
    for port in (None, 0, "80", 80.0, True):
        with pytest.raises(errors.InvalidRequest, match="1 to 65535"):
            await calls.expose(ME, {"port": port})


# Where they listen.


def test_every_place_is_an_address_of_its_own() -> None:
    places = [ports_exposures.find_place() for _ in range(20)]
    for place in places:
        parts = [int(part) for part in place.address.split(".")]
        assert parts[0] == 127
        assert parts[1] > 0
        assert 0 < parts[3] < 255
        assert place.warning == ""
        assert place.socket.proto == socket.IPPROTO_TCP, "else asyncio would not spare it Nagle"
        place.socket.close()
    assert len({place.address for place in places}) == 20


def test_root_listens_where_no_other_user_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    seen: list[int] = []

    def listen(address: str, port: int) -> socket.socket:
        seen.append(port)
        return listening_socket("127.0.0.1", 0)

    listening_socket = ports_exposures.listen
    monkeypatch.setattr(ports_exposures, "listen", listen)
    ports_exposures.find_place().socket.close()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    ports_exposures.find_place().socket.close()
    assert seen[0] < 1024
    assert seen[1] == 0


def test_root_without_the_right_to_such_ports_gets_another_and_still_its_own_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = ports_exposures.listen

    def listen(address: str, port: int) -> socket.socket:
        if port:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(address, port)

    monkeypatch.setattr(ports_exposures, "listen", listen)
    place = ports_exposures.find_place()
    place.socket.close()
    assert place.port >= 1024
    assert not place.address.startswith("127.0.")
    assert place.warning == ""


async def test_where_there_is_only_one_address_that_is_told(
    exposures: Exposures, session_id: str, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ports_exposures.listen

    def listen(address: str, port: int) -> socket.socket:
        if address != "127.0.0.1":
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return real(address, port)

    monkeypatch.setattr(ports_exposures, "listen", listen)
    calls = ExposureCalls(exposures, sessions)
    told = await calls.expose(ME, {"session_id": session_id, "port": PORT})
    assert told["url"].startswith("http://127.0.0.1:")
    assert "Cannot assign requested address" in told["warning"]
    assert "cookies" in told["warning"]


def test_tokens_are_long_random_and_need_no_quoting() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(token) == 40 and token.isalnum() and token.islower() for token in tokens)


# Connections into the sandbox.


async def test_an_open_connection_keeps_its_session_from_being_idle(
    sessions: Sessions, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = sessions._live[session_id]  # pyright: ignore[reportPrivateUsage]
    real = live.boot_time
    async with Tunnel(sessions, ME, session_id, {"port": PORT}):
        monkeypatch.setattr(live, "boot_time", lambda: real() + 7200)
        assert held.why_over() == ""
        monkeypatch.undo()
    assert held.why_over() == ""
    monkeypatch.setattr(live, "boot_time", lambda: real() + 7200)
    assert held.why_over() == live.IDLE


async def test_a_tunnel_carries_bytes_grants_credit_and_waits_for_it(
    world: World, sessions: Sessions, session_id: str
) -> None:
    talk = world.runtime.launched[0].talk
    async with (
        asyncio.timeout(PATIENCE),
        Tunnel(sessions, ME, session_id, {"port": PORT}) as tunnel,
    ):
        assert talk.calls[-1] == {
            "op": "connect",
            "port": PORT,
            "window": ports_tunnel.TUNNEL_WINDOW,
        }
        sending = asyncio.create_task(tunnel.send(b"x" * (wire.WINDOW + 5)))
        await asyncio.sleep(0)
        assert sum(len(body) for kind, body in talk.frames if kind == wire.DATA) == wire.WINDOW
        assert not sending.done()
        talk.answer(wire.RESULT, wire.pack({}))
        talk.answer(wire.CREDIT, wire.CREDIT_BODY.pack(100))
        await sending
        assert talk.frames[-1] == (wire.DATA, b"x" * 5)
        talk.answer(wire.DATA, b"one")
        talk.answer(wire.DATA, b"two")
        assert await tunnel.receive() == b"onetwo"
        assert talk.frames[-1] == (wire.CREDIT, wire.CREDIT_BODY.pack(6))
        await tunnel.end()
        talk.answer(wire.END)
        assert await tunnel.receive() == b""
        assert await tunnel.receive() == b""
        talk.answer(wire.RESULT, wire.pack({}))
    assert talk.frames[-1][0] == wire.END, "what has ended is not cancelled"


@pytest.mark.parametrize(
    ("kind", "body", "error"),
    [
        (wire.ERROR, wire.pack({"code": "ECONNREFUSED", "message": "x"}), ConnectionRefusedError),
        (wire.ERROR, wire.pack({"code": "sandbox_died", "message": "x"}), errors.SandboxDied),
        (wire.ERROR, b"nonsense", errors.GuestFailed),
        (wire.RESULT, wire.pack({}), BrokenTunnel),
    ],
)
async def test_a_tunnel_that_fails_says_how(
    world: World,
    sessions: Sessions,
    session_id: str,
    kind: int,
    body: bytes,
    error: type[Exception],
) -> None:
    talk = world.runtime.launched[0].talk
    async with (
        asyncio.timeout(PATIENCE),
        Tunnel(sessions, ME, session_id, {"port": PORT}) as tunnel,
    ):
        talk.answer(wire.RESULT, wire.pack({}))
        talk.answer(wire.DATA, b"before")
        talk.answer(kind, body)
        assert await tunnel.receive() == b"before"
        with pytest.raises(error):
            await tunnel.receive()


async def test_a_tunnel_on_which_nothing_moves_is_given_up(
    sessions: Sessions, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports_tunnel, "IDLE_SECONDS", 0.02)
    async with (
        asyncio.timeout(PATIENCE),
        Tunnel(sessions, ME, session_id, {"port": PORT}) as tunnel,
    ):
        with pytest.raises(BrokenTunnel, match="nothing happened"):
            await tunnel.receive()


async def test_a_guest_that_never_says_whether_a_server_came_is_given_up(
    world: World, sessions: Sessions, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "WAIT_GRACE", 0.01)
    told: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()

    def on_frame(kind: int, body: bytes) -> None:
        told.put_nowait((kind, body))

    call = {"op": "connect", "port": PORT, "wait": 0.01}
    operation = await sessions.open(ME, session_id, call, on_frame)
    kind, body = await asyncio.wait_for(told.get(), PATIENCE)
    assert (kind, wire.unpack_dict(body)["code"]) == (wire.ERROR, "timed_out")
    assert operation.done
    assert world.runtime.launched[0].talk.frames[-1][0] == wire.CANCEL


async def test_a_server_that_came_may_be_silent_for_longer_than_it_was_waited_for(
    world: World, sessions: Sessions, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "WAIT_GRACE", 0.01)
    call = {"op": "connect", "port": PORT, "wait": 0.01}
    operation = await sessions.open(ME, session_id, call, lambda kind, body: None)
    world.runtime.launched[0].talk.answer(wire.RESULT, wire.pack({"port": PORT}))
    due: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.1, due.set_result, None)  # after its deadline
    await due
    assert not operation.done
    operation.cancel()


@pytest.mark.parametrize("wait", [-1, 3601, float("nan"), "1", [1]])
def test_the_gateway_bounds_how_long_a_server_is_waited_for(wait: object) -> None:
    with pytest.raises(errors.InvalidRequest, match="wait must be 0 to 3600 seconds"):
        operations.check({"op": "connect", "port": 80, "wait": wait})


@pytest.mark.parametrize("late", [wire.DATA, wire.END])
def test_a_guest_that_goes_on_after_the_end_breaks_the_protocol(late: int) -> None:
    operation = Operation("connect", lambda kind, body: None)
    operation.receive(wire.RESULT, wire.pack({}))
    operation.receive(wire.DATA, b"x")
    operation.receive(wire.END, b"")
    with pytest.raises(wire.WireError, match="after the end"):
        operation.receive(late, b"x")
    assert not operation.done
    operation.receive(wire.RESULT, wire.pack({}))
    assert operation.done


@pytest.mark.parametrize("host", ["10.0.0.1", "example.org", "::", 5, b"127.0.0.1", ["127.0.0.1"]])
def test_the_gateway_itself_refuses_to_connect_elsewhere(
    host: object,
) -> None:
    from k8e.sessions import operations

    with pytest.raises(errors.InvalidRequest, match="loopback"):
        operations.check({"op": "connect", "host": host, "port": 80})
    assert operations.check({"op": "connect", "host": "::1", "port": 80})
