"""The TLS end of the endpoint: floods, silence, nonsense, slow readers, names that are freed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import warnings
from collections.abc import Generator
from pathlib import Path

import grpc
import pytest

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from k8e.gateway import identity, tls
from k8e.gateway.rpc import front
from tests.gateway.fronts import Client, serving
from tests.gateway.serving import Running, failing
from tests.places import eventually

MIB = 1 << 20


def names() -> set[str]:
    """Our ends of the connections with gRPC, of all gateways of this machine."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {line.split()[-1] for line in lines if "@k8e-rpc-" in line}


def dial(running: Running) -> socket.socket:
    host, _, port = running.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


@contextlib.contextmanager
def secured(running: Running) -> Generator[ssl.SSLSocket]:
    context = ssl.create_default_context(cafile=str(running.ca))
    context.set_alpn_protocols(["h2"])
    with dial(running) as raw, context.wrap_socket(raw, server_hostname="localhost") as tls:
        yield tls


def works(running: Running) -> None:
    with running.channel() as channel:
        pb_grpc.SandboxServiceStub(channel).ListSessions(pb.ListSessionsRequest(), timeout=20)


def is_open(sock: socket.socket) -> bool:
    """Whether the other end has neither closed nor reset the connection."""
    sock.setblocking(False)
    try:
        return bool(sock.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_one_address_cannot_take_all_handshakes(running: Running) -> None:
    limit = front.MAX_STRANGERS_OF_ADDRESS
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(dial(running)) for _ in range(limit + 30)]
        eventually(lambda: sum(map(is_open, silent)) == limit)
        host, _, port = running.address.rpartition(":")
        # Another address of the same loopback; the endpoint takes it all the same.
        with socket.create_connection(
            (host, int(port)), timeout=20, source_address=("127.7.7.7", 0)
        ) as raw:
            context = ssl.create_default_context(cafile=str(running.ca))
            with context.wrap_socket(raw, server_hostname="localhost") as tls:
                assert tls.version()
    works(running)


def silent_from(running: Running, count: int, addresses: int) -> list[socket.socket]:
    host, _, port = running.address.rpartition(":")
    place = (host, int(port))
    return [
        socket.create_connection(place, 20, source_address=(f"127.7.{number % addresses}.1", 0))
        for number in range(count)
    ]


def test_silent_connections_from_many_addresses_lock_nobody_out(running: Running) -> None:
    limit = front.MAX_STRANGERS
    with contextlib.ExitStack() as stack:
        silent = silent_from(running, limit + 128, 10)
        for item in silent:
            stack.enter_context(item)
        for _ in range(3):  # each of them is new to us, and has to get in
            works(running)
        eventually(lambda: sum(map(is_open, silent)) <= limit)


def test_connections_that_go_silent_after_their_handshake_lock_nobody_out(
    running: Running,
) -> None:
    context = ssl.create_default_context(cafile=str(running.ca))
    with contextlib.ExitStack() as stack:
        for raw in silent_from(running, front.MAX_STRANGERS + 20, 20):
            stack.enter_context(raw)
            with contextlib.suppress(OSError):
                stack.enter_context(context.wrap_socket(raw, server_hostname="localhost"))
        works(running)


async def test_of_too_many_connections_of_one_caller_an_idle_one_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "MAX_OF_PRINCIPAL", 2)
    async with serving(tmp_path) as found:
        ca = (tmp_path / tls.CA_CERT).read_bytes()
        clients: list[Client] = []
        peers_of: list[str] = []
        for number in range(3):
            clients.append(await Client.dial(found.endpoint, ca))
            assert await clients[-1].says(b"hello") == b"hello"
            names = found.front._callers  # pyright: ignore[reportPrivateUsage]
            peers_of += [name for name in names if name not in peers_of]
            with found.front.recognised(peers_of[number], "key:mine"):
                pass
        await clients[0].ends()
        assert await clients[1].says(b"still") == b"still"
        assert await clients[2].says(b"still") == b"still"
        for client in clients:
            await client.close()


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"A" * 70_000, b"\0" * 10, b""]
)
def test_what_is_no_tls_is_cut_off(running: Running, data: bytes) -> None:
    with dial(running) as raw:
        raw.sendall(data)
        with contextlib.suppress(OSError):
            raw.shutdown(socket.SHUT_WR)
            while raw.recv(4096):
                pass
    works(running)


def test_what_is_no_http2_ends_its_connection_only(running: Running) -> None:
    before = names()
    with secured(running) as tls:
        tls.sendall(b"hello\r\n" * 1000)
        with contextlib.suppress(OSError):
            while tls.recv(4096):
                pass
    works(running)
    eventually(lambda: not names() - before)


def test_a_client_without_tls_1_2_is_refused(running: Running) -> None:
    context = ssl.create_default_context(cafile=str(running.ca))
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings(action="ignore"):  # that nobody should do this
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with dial(running) as raw, pytest.raises(ssl.SSLError):
        context.wrap_socket(raw, server_hostname="localhost")


def test_connections_leave_no_names_behind(running: Running) -> None:
    before = names()
    for _ in range(20):
        with secured(running):
            pass
    works(running)
    eventually(lambda: not names() - before)


def test_a_connection_of_our_own_user_past_the_front_is_nobody(running: Running) -> None:
    """Also one with a name like those of the front: it is none that the front knows."""
    inner = socket.socket(socket.AF_UNIX)
    inner.bind("\0k8e-rpc-" + "0" * 32)
    inner.connect(str(running.folder / "r/rpc.sock"))
    ours, theirs = socket.socketpair()
    relays = [
        threading.Thread(target=_copy, args=pair, daemon=True)
        for pair in ((inner, theirs), (theirs, inner))
    ]
    path = str(running.folder / "relay.sock")
    with socket.socket(socket.AF_UNIX) as listener, inner, ours, theirs:
        listener.bind(path)
        listener.listen()
        with grpc.insecure_channel(f"unix:{path}") as channel:
            stub = pb_grpc.SandboxServiceStub(channel)
            call = stub.ListSessions.future(pb.ListSessionsRequest(), timeout=20)
            client, _ = listener.accept()
            relays += [
                threading.Thread(target=_copy, args=pair, daemon=True)
                for pair in ((client, ours), (ours, client))
            ]
            for relay in relays:
                relay.start()
            failed = failing(call.result)
        client.close()
    Path(path).unlink()
    assert failed.status is grpc.StatusCode.UNAUTHENTICATED


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)


def test_a_reader_that_does_not_read_holds_nobody_up_and_takes_no_memory(
    running: Running, session: str
) -> None:
    def memory() -> int:
        text = Path(f"/proc/{running.pid}/status").read_text()
        return int(text.split("VmRSS:")[1].split()[0]) << 10

    with running.channel() as slow:
        asked = pb.ExecRequest(session_id=session, command="yes | head -c 200000000", timeout=60)
        stream = pb_grpc.SandboxServiceStub(slow).ExecStream(asked, timeout=60)
        next(stream)
        before = memory()
        works(running)
        assert memory() - before < 64 * MIB
        stream.cancel()
    works(running)


@pytest.mark.anyio
async def test_a_handshake_that_fails_is_counted_out_once(running: Running, tmp_path: Path) -> None:
    certificates = tls.Certificates(running.folder / "d/tls")
    await certificates.load()
    loop = asyncio.get_running_loop()
    inner = await loop.create_unix_server(asyncio.Protocol, tmp_path / "inner")
    counting = front.TlsFront(tmp_path / "inner", certificates)
    endpoint = await counting.listen(identity.endpoint("127.0.0.1", 0))
    address = (str(endpoint.address), endpoint.port)
    trusted = ssl.create_default_context(cafile=str(running.ca))
    _, held = await asyncio.open_connection(*address, ssl=trusted, server_hostname="localhost")
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 10, b""):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(data)
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    assert counting.connections("127.0.0.1") == 1, "the one that is held"
    held.close()
    await held.wait_closed()
    async with asyncio.timeout(20):
        while counting.connections("127.0.0.1"):  # noqa: ASYNC110 - nobody reports it
            await asyncio.sleep(0.01)
    counting.close()
    inner.close()
