"""Callers with credentials: keys, certificates, and the requests for them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from k8e._generated import sandbox_pb2 as pb
from k8e._generated import sandbox_pb2_grpc as pb_grpc
from tests.gateway.serving import Failed, Frames, Running, failing

Stub = pb_grpc.SandboxServiceStub
Metadata = tuple[tuple[str, str], ...]
PEM = serialization.Encoding.PEM
WRONG = "k8e-" + "0" * 64
REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""How somebody is refused: at first, and after many others were, from the same address."""


class Device(NamedTuple):
    """A key pair and its certificate."""

    key: bytes
    certificate: bytes

    @contextmanager
    def channel(self, running: Running) -> Generator[grpc.Channel]:
        credentials = grpc.ssl_channel_credentials(
            running.ca.read_bytes(), self.key, self.certificate
        )
        with grpc.secure_channel(running.address, credentials) as channel:
            yield channel


def bearer(key: str) -> Metadata:
    return (("authorization", f"Bearer {key}"),)


def ask(running: Running, metadata: Metadata = (), **call: Any) -> dict[str, Any]:
    """What the gateway answers to one operation of ours; by default to its own user."""
    with running.channel() as channel, Frames(channel, metadata) as frames:
        frames.ask(1, **call)
        return frames.result(1)


def new_key(running: Running, name: str, *roles: str, ttl: str = "1d") -> Metadata:
    made = ask(running, op="create_api_key", name=name, ttl=ttl, roles=list(roles))
    return bearer(made["key"])


def request(private: Any, subject: str = "root", digest: Any = None) -> str:
    """A CSR that asks for more than it gets."""
    builder = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)]))
        .add_extension(x509.BasicConstraints(ca=True, path_length=3), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    )
    return builder.sign(private, digest).public_bytes(PEM).decode()


def private_pem(private: Any) -> bytes:
    return private.private_bytes(
        PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def log_in(stub: Stub, metadata: Metadata = (), private: Any = None) -> Device:
    """A certificate for whoever calls."""
    private = private or ec.generate_private_key(ec.SECP256R1())
    csr = request(private, digest=hashes.SHA256())
    told = stub.Login(pb.LoginRequest(csr=csr, device_name="test"), metadata=metadata, timeout=40)
    return Device(private_pem(private), told.cert.encode())


def every_kind(channel: grpc.Channel, metadata: Metadata) -> list[Failed]:
    """How a unary call, a stream and a Run fail."""
    stub = pb_grpc.SandboxServiceStub(channel)

    def run() -> object:
        with Frames(channel, metadata) as frames:
            frames.ask(1, op="status")
            return frames.receive()

    executing = pb.ExecRequest(session_id="x", command="true")
    return [
        failing(lambda: stub.ListSessions(pb.ListSessionsRequest(), metadata=metadata, timeout=30)),
        failing(lambda: list(stub.ExecStream(executing, metadata=metadata, timeout=30))),
        failing(lambda: stub.Exec(executing, metadata=metadata, timeout=30)),
        failing(run),
    ]
