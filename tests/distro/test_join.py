"""Joining, as far as it needs no cluster: what a server shows before a token is sent."""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import json
import socket
import ssl
import threading
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from k8e import errors
from k8e.distro import certificates, join, node, tokens
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


def test_a_server_that_shows_the_authority_and_has_another_key_is_refused(
    tmp_path: Path, authority: Authority
) -> None:
    """The certificate of an authority is known to everybody; somebody between can show it."""
    forger = certificates.authority(tmp_path / "forger", "ca")
    subject = Subject("web", hosts=("127.0.0.1",))
    certificates.leaf(forger, subject, tmp_path / "forger/web", days=1)
    with (tmp_path / "forger/web.crt").open("ab") as shown:
        shown.write(authority.pem)
    between = Front(tmp_path / "forger")
    try:
        pinned = tokens.Token(certificates.fingerprint(authority.certificate), BARE)
        assert join.pinned_authority(between.url, pinned) == authority.certificate
        with pytest.raises(errors.Denied, match="cannot prove that it is of this token's cluster"):
            join.check_server(between.url, trusting(tmp_path / "ca.crt"))
    finally:
        between.close()
    assert BARE.encode() not in between.received


def test_a_server_that_is_called_otherwise_is_told_with_what_to_do(
    front: Front, tmp_path: Path
) -> None:
    url = front.url.replace("127.0.0.1", "localhost")
    with pytest.raises(errors.Denied, match="certificate is not for localhost") as refused:
        join.check_server(url, trusting(tmp_path / "ca.crt"))
    assert "--tls-san localhost" in refused.value.hint


def test_a_server_that_proves_who_it_is_gets_on(front: Front, tmp_path: Path) -> None:
    join.check_server(front.url, trusting(tmp_path / "ca.crt"))


def trusting(authority: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority))


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


def joined(tmp_path: Path, authority: Authority, **options: str) -> Configuration:
    """The configuration of a machine that has joined as ``one``."""
    config = Configuration(
        **{"node_name": "one", "node_ip": "192.0.2.1", "server": "https://192.0.2.9:6443"}
        | options,  # pyright: ignore[reportArgumentType]
        data_dir=tmp_path / "data",
        run_dir=tmp_path / "run",
    )
    layout = config.layout
    layout.make()
    (layout.pki / "server-ca.crt").write_bytes(authority.pem)
    key = certificates.own_key(layout.pki / "own.key")
    subject = Subject("system:node:one", ("system:nodes",))
    signed = certificates.sign(authority, subject, key.public_key(), days=1)
    pem = signed.public_bytes(serialization.Encoding.PEM)
    join.store_kubelet_certificate(layout, pem + certificates.private_pem(key))
    networks = ("cluster_cidr", "service_cidr", "cluster_dns", "cluster_domain")
    layout.cluster.write_text(json.dumps({"cni": "basic"} | dict.fromkeys(networks, "")))
    return config


@pytest.mark.anyio
async def test_a_node_follows_a_server_that_has_moved(tmp_path: Path, authority: Authority) -> None:
    programs = Path("/components/bin")
    config = joined(tmp_path, authority)
    found = await join.join(config)
    before = [item.digest() for item in node.components(found, programs)]
    moved = await join.join(joined(tmp_path, authority, server="https://192.0.2.10:6443"))
    assert "https://192.0.2.10:6443" in moved.kubeconfig.read_text("utf-8")
    containerd, kubelet, _ = (item.digest() for item in node.components(moved, programs))
    assert containerd == before[0]
    assert kubelet != before[1], "it reads its kubeconfig at start, and starts anew"


@pytest.mark.anyio
async def test_a_machine_that_was_renamed_is_told_how_to_stay_its_node(
    tmp_path: Path, authority: Authority
) -> None:
    with pytest.raises(errors.Conflict, match="has joined as one, and is called two") as refused:
        await join.join(joined(tmp_path, authority, node_name="two"))
    assert "--node-name one" in refused.value.hint


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


def test_a_node_starts_without_its_server_as_long_as_its_certificates_serve(
    tmp_path: Path, authority: Authority
) -> None:
    """One that is due is renewed later; one that has expired cannot be waited with."""
    config = Configuration(data_dir=tmp_path / "data", run_dir=tmp_path / "run")
    found = node.Node(config.layout, "one", "", "", "basic", "", "", "", "")
    path = config.layout.pki / "kube-proxy"
    config.layout.make()
    assert not join.has_component_certificate(found, "kube-proxy")
    key = certificates.own_key(path.with_suffix(".key")).public_key()
    for days, serves in ((1 / 1440, True), (-1 / 1440, False)):
        signed = certificates.sign(authority, Subject("proxy"), key, days=days)
        path.with_suffix(".crt").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        assert join.has_component_certificate(found, "kube-proxy") is serves
        assert certificates.renewal_time(signed) <= datetime.datetime.now(datetime.UTC)
