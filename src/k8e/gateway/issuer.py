"""Makes the gateway's certificate: ``python -m k8e.gateway.issuer FOLDER NAME...``."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from k8e.gateway import tls

CA_DAYS = 3650
SERVER_DAYS = 90
CLOCK_SKEW = tls.DAY  # seconds; a client's clock may be behind ours
_Pair = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


def make(folder: Path, more_names: Sequence[str] = ()) -> None:
    """Write a new server certificate into ``folder``, and a CA before that if there is none."""
    names = tls.names(more_names)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    ca, ca_key = _current_ca(folder)
    certificate, key = _issue(ca, ca_key, names)
    _write(folder / tls.KEY, _key_pem(key), mode=0o600)
    _write(folder / tls.CERT, pem(certificate), mode=0o644)
    record = {
        "not_after": int(certificate.not_valid_after_utc.timestamp()),
        "ca_not_after": int(ca.not_valid_after_utc.timestamp()),
        "names": names,
        "sha256": tls.checksum(folder),
    }
    _write(folder / tls.RECORD, json.dumps(record).encode(), mode=0o644)


def load_ca(folder: Path) -> _Pair | None:
    """The CA, if it is intact and outlives the certificates that it would sign."""
    ca, key = _load(folder / tls.CA_CERT), _load_key(folder)
    if ca is None or key is None or key.public_key() != ca.public_key():
        return None
    lasts = ca.not_valid_after_utc.timestamp() - time.time()
    return (ca, key) if lasts > SERVER_DAYS * tls.DAY else None


def _current_ca(folder: Path) -> _Pair:
    """A current CA, of the same name and key as the one before if possible.

    Then clients that know only the CA's certificate of before trust what this one signs, for as
    long as theirs lasts; and certificates of clients stay good.
    """
    known = load_ca(folder)
    if known is not None:
        lasts = known[0].not_valid_after_utc.timestamp() - time.time()
        if lasts > tls.RENEW_CA_DAYS * tls.DAY:
            return known
    key = _load_key(folder)
    # The certificates that a damaged or lost CA signed still name it.
    signed = _load(folder / tls.CERT)
    before = known[0].subject if known else (signed.issuer if signed and key else None)
    return _make_ca(folder, key, before)


def _load(path: Path) -> x509.Certificate | None:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError):
        return None


def _load_key(folder: Path) -> ec.EllipticCurvePrivateKey | None:
    try:
        key = serialization.load_pem_private_key((folder / tls.CA_KEY).read_bytes(), password=None)
    except (OSError, ValueError):
        return None
    return key if isinstance(key, ec.EllipticCurvePrivateKey) else None


def _make_ca(folder: Path, key: ec.EllipticCurvePrivateKey | None, name: x509.Name | None) -> _Pair:
    key = key or ec.generate_private_key(ec.SECP256R1())
    name = name or common_name(f"k8e CA of {socket.gethostname()}")
    ca = (
        _builder(name, name, key.public_key(), days=CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(folder / tls.CA_KEY, _key_pem(key), mode=0o600)
    _write(folder / tls.CA_CERT, pem(ca), mode=0o644)
    return ca, key


def _issue(ca: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey, names: Sequence[str]) -> _Pair:
    """A server certificate for these names, with its new key."""
    alternatives: list[x509.GeneralName] = []
    for name in names:
        try:
            alternatives.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            alternatives.append(x509.DNSName(name))
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    certificate = (
        _builder(common_name("k8e gateway"), ca.subject, key.public_key(), days=SERVER_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(issuer, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    return certificate, key


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, *, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(seconds=CLOCK_SKEW))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(path: Path, data: bytes, *, mode: int) -> None:
    """Replace a file as a whole; it never exists with a wider mode than ``mode``."""
    scratch = path.with_name(f".{path.name}.new")
    scratch.unlink(missing_ok=True)
    try:
        with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        scratch.rename(path)
    finally:
        scratch.unlink(missing_ok=True)


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2:])
