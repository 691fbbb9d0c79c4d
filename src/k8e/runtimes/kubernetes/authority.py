"""By what a pod's guest knows a gateway: certificates of an authority for links alone.

The authority's certificate stands in every pod that its gateways make. Its key never leaves the
gateway's data folder, and signs nothing but what lets a gateway dial pods.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import ssl
import tempfile
import time
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from k8e import errors
from k8e.guest.pod import GATEWAY_NAME

_AUTHORITY_DAYS, _DAYS = 3650, 30
_RENEW_SECONDS = 10 * 24 * 3600.0
_BACKDATE = datetime.timedelta(minutes=5)
_PEM = serialization.Encoding.PEM


class LinkAuthority:
    """Signs the certificates with which one gateway, or several that share it, dial pods."""

    def __init__(self, folder: Path) -> None:
        """The authority of a folder, made where there is none."""
        key, certificate = folder / "link.key", folder / "link.crt"
        if not certificate.exists():
            _make(key, certificate)
        try:
            loaded = serialization.load_pem_private_key(key.read_bytes(), None)
            self._certificate = x509.load_pem_x509_certificate(certificate.read_bytes())
        except (OSError, ValueError) as error:
            raise errors.StateUnusable(
                f"the authority of links in {folder} is damaged: {error}",
                hint="restore link.key and link.crt; without them, sandboxes in pods that run are "
                "lost, and both files may be removed",
            ) from None
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise errors.StateUnusable(f"{key} is no key of an elliptic curve", hint="restore it")
        self._key = loaded
        self._folder = folder
        self._context: ssl.SSLContext | None = None
        self._made_at = 0.0

    @property
    def pem(self) -> str:
        """What pods know it by."""
        return self._certificate.public_bytes(_PEM).decode("ascii")

    @property
    def fingerprint(self) -> str:
        """A short name for it, which labels may have."""
        der = self._certificate.public_bytes(serialization.Encoding.DER)
        return hashlib.sha256(der).hexdigest()[:16]

    def context(self) -> ssl.SSLContext:
        """For the next connection to a pod; its certificate is made anew in time."""
        now = time.monotonic()
        if self._context is None or now - self._made_at > _RENEW_SECONDS:
            self._context, self._made_at = self._make_context(), now
        return self._context

    def _make_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # a new connection proves everything anew
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        names = x509.SubjectAlternativeName([x509.DNSName(GATEWAY_NAME)])
        signed = (
            _builder("k8e gateway", self._certificate.subject, key.public_key(), _DAYS)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(names, critical=False)
            .add_extension(usage, critical=False)
            .add_extension(_identifier(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        # The library reads files alone. This one is gone at once, and was nobody else's to read.
        with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".pem") as pair:
            pair.write(signed.public_bytes(_PEM) + _private(key))
            pair.flush()
            context.load_cert_chain(pair.name)
        return context


def _make(key_file: Path, certificate_file: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = "k8e links"
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = x509.KeyUsage(
        **dict.fromkeys(
            (
                "digital_signature content_commitment key_encipherment data_encipherment "
                "key_agreement crl_sign encipher_only decipher_only"
            ).split(),
            False,
        ),
        key_cert_sign=True,
    )
    signed = (
        _builder(name, subject, key.public_key(), _AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    certificate_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The certificate last: with it, all is there.
    _write(key_file, _private(key))
    _write(certificate_file, signed.public_bytes(_PEM))


def _write(path: Path, content: bytes) -> None:
    scratch = path.with_suffix(".tmp")
    scratch.unlink(missing_ok=True)
    with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    scratch.rename(path)


def _builder(
    name: str, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATE)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _identifier(key: ec.EllipticCurvePublicKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    pkcs8 = serialization.PrivateFormat.PKCS8
    return key.private_bytes(_PEM, pkcs8, serialization.NoEncryption())
