"""The client of the Kubernetes API, at a server that asks for certificates."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Generator
from pathlib import Path

import pytest
from cryptography import x509

from k8e.distro import certificates
from k8e.distro.certificates import Authority, Subject
from k8e.kubernetes import api

pytestmark = pytest.mark.anyio
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


class Front:
    """A server that writes down the certificate of whoever asks, and keeps connections open."""

    def __init__(self, folder: Path) -> None:
        self.serials: list[int] = []
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(folder / "web.crt", folder / "web.key")
        self._context.load_verify_locations(folder / "ca.crt")
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(plain,)))
            self._threads[-1].start()

    def _serve(self, plain: socket.socket) -> None:
        plain.settimeout(20)
        with self._context.wrap_socket(plain, server_side=True) as secure:
            shown = x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b"")
            while b"\r\n\r\n" in _received(secure):
                self.serials.append(shown.serial_number)
                secure.sendall(ANSWER)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(30)


def _received(secure: ssl.SSLSocket) -> bytes:
    try:
        return secure.recv(4096)
    except OSError:
        return b""


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    signer = certificates.authority(tmp_path, "ca")
    certificates.leaf(signer, Subject("web", hosts=("127.0.0.1",)), tmp_path / "web", days=1)
    certificates.leaf(signer, Subject("caller"), tmp_path / "caller", days=1)
    return signer


@pytest.fixture
def front(tmp_path: Path, authority: Authority) -> Generator[Front]:
    found = Front(tmp_path)
    yield found
    found.close()


def serial(folder: Path) -> int:
    return certificates.read(folder / "caller.crt").serial_number


async def test_a_caller_shows_the_certificate_that_was_renewed_while_it_ran(
    front: Front, authority: Authority, tmp_path: Path
) -> None:
    caller = api.by_certificate(
        front.url,
        authority=tmp_path / "ca.crt",
        certificate=tmp_path / "caller.crt",
        key=tmp_path / "caller.key",
    )
    try:
        for _ in range(2):
            await caller.get("/version")
        first = serial(tmp_path)
        (tmp_path / "caller.crt").unlink()
        certificates.leaf(authority, Subject("caller"), tmp_path / "caller", days=1)
        await caller.get("/version")
    finally:
        caller.close()
    assert front.serials == [first, first, serial(tmp_path)]
    assert first != serial(tmp_path)


async def test_a_certificate_that_is_half_renewed_is_passed_over(
    front: Front, authority: Authority, tmp_path: Path
) -> None:
    caller = api.by_certificate(
        front.url,
        authority=tmp_path / "ca.crt",
        certificate=tmp_path / "caller.crt",
        key=tmp_path / "caller.key",
    )
    first = serial(tmp_path)
    other = tmp_path / "other"
    certificates.leaf(authority, Subject("caller"), other, days=1)
    other.with_suffix(".key").replace(tmp_path / "caller.key")  # written before its certificate
    try:
        await caller.get("/version")
        other.with_suffix(".crt").replace(tmp_path / "caller.crt")
        await caller.get("/version")
    finally:
        caller.close()
    assert front.serials == [first, serial(tmp_path)]


async def test_what_vanished_while_the_api_server_was_away_is_told_as_deleted(
    authority: Authority, tmp_path: Path
) -> None:
    """A watch that breaks tells nothing of it, and the list that follows has it no more."""
    del authority
    lists = [["one", "two", "three"], ["one"]]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            body = b""
            if b"watch=1" not in head:
                found = [{"metadata": {"name": name}} for name in lists.pop(0)]
                listed = {"metadata": {"resourceVersion": "1"}, "items": found}
                body = json.dumps(listed).encode()
            elif lists:
                event = {"metadata": {"name": "two", "resourceVersion": "2"}}
                line = json.dumps({"type": "DELETED", "object": event}).encode() + b"\n"
                body = b"%x\r\n%s\r\n" % (len(line), line)
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
                await writer.drain()
                writer.transport.abort()
                return
            else:
                await asyncio.Event().wait()  # until the test ends
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            await writer.drain()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "web.crt", tmp_path / "web.key")
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    trusting = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    caller = api.Api(f"https://127.0.0.1:{port}", trusting)
    told: list[tuple[str, str]] = []
    try:
        async with (
            asyncio.timeout(20),
            contextlib.aclosing(caller.follow("/api/v1/nodes")) as changes,
        ):
            async for change, item in changes:
                told.append((change, item["metadata"]["name"] if item else ""))
                if [change for change, _ in told].count("SYNCED") == 2:
                    break
    finally:
        caller.close()
        server.close()
    first = [("ADDED", name) for name in ("one", "two", "three")]
    assert told[:5] == [*first, ("SYNCED", ""), ("DELETED", "two")]
    assert told[5:] == [("DELETED", "three"), ("ADDED", "one"), ("SYNCED", "")]
