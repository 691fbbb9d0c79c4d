"""Certificate authorities of a cluster, the certificates that they sign, and their renewal."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from k8e import errors
from k8e.distro.layout import write_private

CA_DAYS = 3650
_BACKDATE = datetime.timedelta(minutes=5)
"""Certificates begin a little earlier, for machines whose clocks are a little behind."""
_PEM = serialization.Encoding.PEM


@dataclass(frozen=True)
class Authority:
    """A certificate authority: its certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(_PEM)


@dataclass(frozen=True)
class Subject:
    """Whom a certificate is for."""

    name: str
    groups: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    """Names and addresses of a server; without any, it is a client's certificate."""
    both: bool = False
    """Whether a server's certificate also serves as a client's, as between members of etcd."""


def fingerprint(certificate: x509.Certificate) -> str:
    """What a token pins: the SHA-256 of an authority's certificate."""
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest()


def read(path: Path) -> x509.Certificate:
    """The first certificate of a file."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise errors.StateUnusable(
            f"the certificate {path} is damaged: {error}",
            hint="restore it from a backup; a certificate that is no authority's may be removed",
        ) from None


def expires(path: Path) -> datetime.datetime:
    return read(path).not_valid_after_utc


def authority(folder: Path, name: str) -> Authority:
    """The authority ``NAME.crt`` and ``NAME.key`` of a folder, made where there is none."""
    crt, key = folder / f"{name}.crt", folder / f"{name}.key"
    if not crt.exists() and not key.exists():
        made = _make_authority(f"k8e-{name}")
        write_private(key, private_pem(made.key))
        write_private(crt, made.pem)
        return made
    if not crt.exists() or not key.exists():
        missing = crt if key.exists() else key
        raise errors.StateUnusable(
            f"{missing} is missing: the certificate authority of this cluster is half there",
            hint="restore it from a backup; a new one would lock every node out. If this server "
            "has never been ready: k8e server uninstall, and start it again",
        )
    loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    if not isinstance(loaded, ec.EllipticCurvePrivateKey):
        raise errors.StateUnusable(f"{key} is no key of an elliptic curve", hint="restore it")
    return Authority(read(crt), loaded)


def _make_authority(common_name: str) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    now = _now()
    # The date makes the names of two clusters' authorities differ, so that errors can tell them.
    name = _name(f"{common_name}@{int(now.timestamp())}", ())
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATE)
        .not_valid_after(now + datetime.timedelta(days=CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(_usage(is_authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return Authority(builder.sign(key, hashes.SHA256()), key)


def leaf(
    signer: Authority, subject: Subject, path: Path, *, days: int, chain: bool = False
) -> bool:
    """Write ``PATH.crt`` and ``PATH.key`` unless what is there still serves; True if written.

    Renewed in the last third of its life, when its authority or its names have changed. ``chain``
    adds the authority's certificate: whoever pins that one then sees it in the handshake.
    """
    crt, key_file = path.with_suffix(".crt"), path.with_suffix(".key")
    if _serves(crt, key_file, signer, subject):
        return False
    key = ec.generate_private_key(ec.SECP256R1())
    made = sign(signer, subject, key.public_key(), days=days)
    write_private(key_file, private_pem(key))
    write_private(crt, made.public_bytes(_PEM) + (signer.pem if chain else b""))
    return True


def sign(
    signer: Authority, subject: Subject, key: ec.EllipticCurvePublicKey, *, days: float
) -> x509.Certificate:
    now = _now()
    usages = [ExtendedKeyUsageOID.SERVER_AUTH] if subject.hosts else []
    if not subject.hosts or subject.both:
        usages.append(ExtendedKeyUsageOID.CLIENT_AUTH)
    issuer_key = signer.key.public_key()
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject.name, subject.groups))
        .issuer_name(signer.certificate.subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATE)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(is_authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False
        )
    )
    if subject.hosts:
        names = x509.SubjectAlternativeName(_alternatives(subject.hosts))
        builder = builder.add_extension(names, critical=False)
    return builder.sign(signer.key, hashes.SHA256())


def renewal_time(certificate: x509.Certificate) -> datetime.datetime:
    """When a certificate is to be renewed: two thirds into its life."""
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return begin + (end - begin) * 2 / 3


def _serves(crt: Path, key: Path, signer: Authority, subject: Subject) -> bool:
    if not crt.exists() or not key.exists():
        return False
    try:
        found = read(crt)
        found.verify_directly_issued_by(signer.certificate)
    except (errors.StateUnusable, InvalidSignature, ValueError, TypeError):
        return False  # damaged, or of another authority
    same = is_for(found, subject) and _hosts(found) == set(subject.hosts)
    # One that begins later was made while the clock was ahead.
    return same and found.not_valid_before_utc <= _now() < renewal_time(found)


def is_for(certificate: x509.Certificate, subject: Subject) -> bool:
    return certificate.subject == _name(subject.name, subject.groups)


def _hosts(certificate: x509.Certificate) -> set[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return set()
    return {str(name.value) for name in names}


def _name(common_name: str, groups: Iterable[str]) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*parts, x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _alternatives(hosts: Iterable[str]) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = []
    for host in hosts:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    return names


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


# Keys and requests.


def private_pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(_PEM, form, serialization.NoEncryption())


def service_account_key(path: Path) -> None:
    """The key that signs tokens of service accounts, made where there is none."""
    if not path.exists():  # RSA: not every library that checks such tokens knows curves
        write_private(path, private_pem(rsa.generate_private_key(65537, 2048)))


def own_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A private key of this node, made where there is none."""
    if path.exists():
        loaded = serialization.load_pem_private_key(path.read_bytes(), None)
        if isinstance(loaded, ec.EllipticCurvePrivateKey):
            return loaded
    key = ec.generate_private_key(ec.SECP256R1())
    write_private(path, private_pem(key))
    return key


def request(key: ec.EllipticCurvePrivateKey, subject: Subject) -> bytes:
    """A certificate request, as PEM."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(
        _name(subject.name, subject.groups)
    )
    return builder.sign(key, hashes.SHA256()).public_bytes(_PEM)
