"""Joining, as far as it needs no cluster: what a server shows before a token is sent."""

from __future__ import annotations

import contextlib
import email.utils
import socket
import ssl
import threading
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from k8e import errors
from k8e.distro import certificates, join, tokens
from k8e.distro.certificates import Authority, Subject
from k8e.distro.configuration import Configuration

BARE = "abcdef.0123456789abcdef"


class Front:
    """A TLS server that shows a chain, and answers every request with 401 and a date."""

    def __init__(self, folder: Path, skew: float = 0.0) -> None:
        self.received = b""
        self._skew = skew
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(folder / "web.crt", folder / "web.key")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = self._listener.accept()
                with contextlib.suppress(OSError):
                    self._answer(plain)

    def _answer(self, plain: socket.socket) -> None:
        plain.settimeout(10)
        with self._context.wrap_socket(plain, server_side=True) as secure:
            self.received += secure.recv(4096)
            date = email.utils.formatdate(time.time() + self._skew, usegmt=True)
            secure.sendall(f"HTTP/1.1 401 Unauthorized\r\nDate: {date}\r\n\r\n".encode())

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    signer = certificates.authority(tmp_path, "ca")
    subject = Subject("web", hosts=("127.0.0.1",))
    certificates.leaf(signer, subject, tmp_path / "web", days=1, chain=True)
    return signer


@pytest.fixture
def front(tmp_path: Path, authority: Authority) -> Generator[Front]:
    found = Front(tmp_path)
    yield found
    found.close()


def test_the_authority_that_a_token_pins_is_found_in_the_handshake(
    front: Front, authority: Authority
) -> None:
    token = tokens.Token(certificates.fingerprint(authority.certificate), BARE)
    assert join.pinned_authority(front.url, token) == authority.certificate


def test_another_clusters_server_is_refused_and_never_sees_the_token(front: Front) -> None:
    with pytest.raises(errors.Denied, match="is not the cluster of this token"):
        join.pinned_authority(front.url, tokens.Token("00" * 32, BARE))
    assert BARE.encode() not in front.received


def test_a_server_that_is_not_there_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(errors.InvalidRequest, match="cannot reach the server"):
        join.pinned_authority(f"https://127.0.0.1:{port}", tokens.Token("00" * 32, BARE))


@pytest.mark.parametrize(("skew", "way"), [(3600.0, "behind"), (-3600.0, "ahead of")])
@pytest.mark.usefixtures("authority")
def test_a_clock_that_is_wrong_is_told(tmp_path: Path, skew: float, way: str) -> None:
    front = Front(tmp_path, skew)
    try:
        with pytest.raises(errors.InvalidRequest, match=f"s {way} the server's"):
            join.check_clock(front.url)
    finally:
        front.close()


def test_a_clock_that_is_right_is_fine(front: Front) -> None:
    join.check_clock(front.url)


@pytest.mark.anyio
async def test_a_node_whose_certificate_has_expired_is_told_how_to_come_back(
    tmp_path: Path, authority: Authority
) -> None:
    config = Configuration(data_dir=tmp_path / "data", node_name="one", run_dir=tmp_path / "run")
    layout = config.layout
    layout.make()
    subject = Subject("system:node:one", ("system:nodes",))
    key = certificates.own_key(layout.pki / "own.key")
    signed = certificates.sign(authority, subject, key.public_key(), days=-1 / 1440)
    pem = signed.public_bytes(serialization.Encoding.PEM)
    join.store_kubelet_certificate(layout, pem + certificates.private_pem(key))
    layout.cluster.write_text("{}")
    with pytest.raises(errors.Denied, match="has expired") as refused:
        await join.join(config)
    assert "kubectl delete node" in refused.value.hint


@pytest.mark.anyio
async def test_a_machine_that_has_joined_refuses_the_token_of_another_cluster(
    tmp_path: Path, authority: Authority
) -> None:
    config = Configuration(
        data_dir=tmp_path / "data",
        token=str(tokens.Token("00" * 32, BARE)),
        run_dir=tmp_path / "run",
    )
    layout = config.layout
    layout.make()
    (layout.pki / "server-ca.crt").write_bytes(authority.pem)
    (layout.pki / "kubelet-client-current.pem").touch()
    layout.cluster.write_text("{}")
    with pytest.raises(errors.Conflict, match="this machine has joined the cluster with the CA"):
        await join.join(config)
