"""Signs a client's CSR, as a process: ``python -m k8e.gateway.signer FOLDER``.

A CSR is a stranger's file, so it is parsed away from the gateway, by a process with little time and
memory. Only its public key is used: name, validity and purpose are ours.
"""

from __future__ import annotations

import json
import resource
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from k8e.gateway import issuer as gateway_issuer

CPU_SECONDS = 5
MEMORY = 1 << 30
CURVES = (ec.SECP256R1, ec.SECP384R1)
RSA_BITS = range(2048, 8193)

PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey


class RefusedError(Exception):
    """The certificate request will not be signed; the text says why."""


def sign(folder: Path, csr: str, name: str, not_after: float) -> dict[str, str]:
    """A certificate for the key in ``csr``, and its serial number as TLS spells it."""
    authority = gateway_issuer.load_ca(folder)
    if authority is None:
        raise RuntimeError("the CA is missing or damaged")
    ca, ca_key = authority
    public = _public_key(csr)
    now = datetime.now(UTC)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(gateway_issuer.common_name(name))
        .issuer_name(ca.subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(seconds=gateway_issuer.CLOCK_SKEW))
        .not_valid_after(datetime.fromtimestamp(not_after, UTC))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(gateway_issuer.usage(signs_certificates=False), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(issuer, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    serial = f"{certificate.serial_number:x}"
    serial = serial.zfill(len(serial) + len(serial) % 2)  # whole bytes
    return {"certificate": gateway_issuer.pem(certificate).decode(), "serial": serial}


def _public_key(csr: str) -> PublicKey:
    """The key in a CSR whose sender has proved to have the private one."""
    try:
        request = x509.load_pem_x509_csr(csr.encode())
        public = request.public_key()
        genuine = _strong(public) and request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature) as error:
        raise RefusedError(f"it cannot be read ({type(error).__name__})") from None
    if not isinstance(public, PublicKey) or not _strong(public):
        raise RefusedError(
            "its key must be EC P-256 or P-384, Ed25519, or RSA of 2048 to 8192 bits"
        )
    if not genuine:
        raise RefusedError("its signature is wrong")
    return public


def _strong(public: Any) -> bool:
    if isinstance(public, ec.EllipticCurvePublicKey):
        return isinstance(public.curve, CURVES)
    if isinstance(public, rsa.RSAPublicKey):
        return public.key_size in RSA_BITS
    return isinstance(public, ed25519.Ed25519PublicKey)


def main() -> None:
    """One request on stdin, one answer on stdout."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    asked = json.load(sys.stdin)
    try:
        told = sign(Path(sys.argv[1]), asked["csr"], asked["name"], asked["not_after"])
    except RefusedError as error:
        told = {"refused": str(error)}
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
