"""Login at a remote gateway: its CA first, then a client certificate.

An API key is sent only to a gateway whose certificate was checked: against a CA that was given as a
file, one whose fingerprint was given, or what the system trusts. Nothing is trusted at first sight.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from k8e import _version, errors, system
from k8e.client import credentials, remote
from k8e.client.endpoints import Endpoint

SECONDS = 30.0
_PREFIX = "sha256:"


class Pair(NamedTuple):
    """A private key and the request for its certificate, in PEM."""

    key: bytes
    csr: str

    def fits(self, certificate: str) -> bool:
        """Whether a certificate is for this key."""
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization

        try:
            issued = x509.load_pem_x509_certificate(certificate.encode())
        except ValueError:
            return False
        private = serialization.load_pem_private_key(self.key, password=None)
        return issued.public_key() == private.public_key()


class LoginCertificate(NamedTuple):
    """The result of a login."""

    certificate: str
    days: int
    ca: str
    """The gateway's present CA; it may have been renewed."""


def fingerprint(pem: str) -> str:
    """The hash of a certificate by which people compare it."""
    return _PREFIX + hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.strip())).hexdigest()


def fetch_ca(target: str, expected: str) -> bytes:
    """The CA of a gateway, if it is the expected one. Nothing secret is sent for it.

    Raises:
        Denied: it is another one, so another server may be in between.
    """
    wanted = expected.lower().replace(":", "").removeprefix("sha256")
    if len(wanted) != 64 or set(wanted) - set("0123456789abcdef"):
        raise errors.InvalidRequest(
            f"{expected[:100]!r} is not a fingerprint",
            hint="k8e gateway fingerprint on the gateway's machine prints it: sha256:…",
        )
    # Trusted for one question only, whose answer is compared with the CA that we expect.
    shown = _shown(target)
    with _service(Endpoint(target=target), shown.encode()) as (service, messages):
        told = service.GetCACert(messages.GetCACertRequest(), timeout=SECONDS).cert
    try:
        der = ssl.PEM_cert_to_DER_cert(told.strip())
    except ValueError:
        raise errors.Denied(f"{target} answered with something that is not a certificate") from None
    if hashlib.sha256(der).hexdigest() != wanted:
        raise errors.Denied(
            f"the CA of {target} has another fingerprint: {fingerprint(told)}",
            hint="compare it with k8e gateway fingerprint on the gateway's machine; if they "
            "differ, another server is in between",
        )
    return ssl.DER_cert_to_PEM_cert(der).encode()


def _shown(target: str) -> str:
    """The certificate that a server presents, whatever server it is."""
    host, _, port = target.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, int(port)), timeout=SECONDS) as raw,
            context.wrap_socket(raw, server_hostname=host) as secured,
        ):
            return ssl.DER_cert_to_PEM_cert(secured.getpeercert(binary_form=True) or b"")
    except OSError as error:
        raise errors.GatewayUnreachable(
            f"the gateway at {target} cannot be reached: {error}",
            hint="check the address, and that the gateway runs and listens there (K8E_LISTEN)",
        ) from None


def new_pair(device: str) -> Pair:
    """A new private key, and a request to certify it."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise errors.InvalidRequest(
            "making a client certificate needs the package cryptography, which is not installed",
            hint=errors.install_extra("login")
            + ", or keep to the API key: k8e sandbox login --key-only",
        ) from None
    private = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return pair_of(private, device)


def pair_of(private: bytes, device: str = "k8e") -> Pair:
    """An existing private key, and a request to certify it."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise errors.InvalidRequest(str(error), hint=errors.install_extra("login")) from None
    key: Any = serialization.load_pem_private_key(private, password=None)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, device[:64] or "k8e")])
    csr = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return Pair(private, csr.public_bytes(serialization.Encoding.PEM).decode())


def login(
    endpoint: Endpoint, csr: str, device: str, ca: bytes | None, seconds: float = SECONDS
) -> LoginCertificate:
    """A client certificate for the key (or the old certificate) that ``endpoint`` has."""
    with _service(endpoint, ca) as (service, messages):
        asked = messages.LoginRequest(
            csr=csr, device_name=device, client_version=_version.__version__
        )
        told = service.Login(asked, metadata=remote.metadata(endpoint), timeout=seconds)
    return LoginCertificate(told.cert, told.valid_days, told.ca_cert)


def check(endpoint: Endpoint, ca: bytes | None) -> None:
    """Check an API key, so that a wrong one is refused here, before it is stored."""
    with _service(endpoint, ca) as (service, messages):
        asked = messages.ListApprovalsRequest()  # a question that every role may ask
        service.ListApprovals(asked, metadata=remote.metadata(endpoint), timeout=SECONDS)


@contextlib.contextmanager
def _service(endpoint: Endpoint, ca: bytes | None) -> Generator[tuple[Any, Any]]:
    """The gateway's calls and their messages; failures become our own errors."""
    grpc, messages, services = remote.libraries()
    found = credentials.load(endpoint)
    secure = grpc.ssl_channel_credentials(ca or found.ca, found.key, found.certificate)
    with grpc.secure_channel(endpoint.target, secure, remote.OPTIONS) as channel:
        try:
            yield services.SandboxServiceStub(channel), messages
        except grpc.RpcError as error:
            raise _explain(error, endpoint, trusted=ca or found.ca) from None


def _explain(error: Any, endpoint: Endpoint, trusted: bytes | None) -> errors.K8eError:
    known = remote.explain(error, endpoint)
    if isinstance(known, errors.GatewayUnreachable) and trusted is None:
        known.hint = (
            "the system does not know its CA, perhaps: k8e gateway fingerprint on the gateway's "
            "machine prints what --ca-fingerprint takes; or copy its ca.crt, and set "
            "K8E_SANDBOX_CERT to it"
        )
    return known


def trust(endpoint: Endpoint, expected: str) -> bytes | None:
    """The CA to use: the pinned one, or that of the files and the environment."""
    if expected:
        return fetch_ca(endpoint.target, expected)
    return credentials.load(replace(endpoint, api_key="")).ca


def store(folder: Path, files: dict[str, bytes]) -> None:
    """Write files that only their owner may read, each all at once."""
    try:
        system.replace_files(folder, files)
    except OSError as error:
        raise errors.InvalidRequest(
            f"the folder {folder} cannot be written: {error.strerror}",
            hint=errors.folder_hint(
                error, "make it writable, or set K8E_SANDBOX_CERT_DIR to another one"
            ),
        ) from None
