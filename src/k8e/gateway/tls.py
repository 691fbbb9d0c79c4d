"""The gateway's certificate and its CA, and the places where clients find them.

Making one needs ``cryptography``, whose memory the gateway would keep for good. So a child process
does it (:mod:`k8e.gateway.issuer`) and writes down beside the certificate what the gateway needs
to know of it. That record is written last and has a checksum: after a crash in between, the next
start makes the certificate again.

K8E's own server keeps its certificates in the same place. What it wrote there is left alone: only
a file that we wrote ourselves is ever replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import json
import logging
import re
import socket
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from k8e import errors, settings

log = logging.getLogger(__name__)

FOLDERS = ("server", "server/tls")
PLACES = ("server/tls/serving-kube-apiserver.crt", "server/tls/sandbox-ca.crt")
"""In K8E's data folder, which is ours too: ``/var/lib/k8e``. The first is for the published SDKs,
the second for K8E's newest client."""
PUBLISHED_RECORD = "published.json"


def publish_ca(data_dir: Path, certificate: bytes) -> None:
    """Write the CA's certificate where every user of this machine can read it; it is not secret."""
    record = data_dir / "tls" / PUBLISHED_RECORD
    if data_dir == settings.SERVER_GATEWAY:  # clients know the server's folder alone
        data_dir = settings.SYSTEM_DATA
    before = _read(record)
    digest = hashlib.sha256(certificate).hexdigest()
    try:
        for name in FOLDERS:
            with contextlib.suppress(FileExistsError):
                (data_dir / name).mkdir()
                (data_dir / name).chmod(0o755)
        # Before any file is written: a gateway that is killed in between must recognise it as ours.
        record.write_text(json.dumps(sorted({*before, digest})), "ascii")
        written = [_write(data_dir / name, certificate, before) for name in PLACES]
        if all(written):
            record.write_text(json.dumps([digest]), "ascii")
    except OSError as error:
        log.warning("K8E's clients need K8E_SANDBOX_CERT: %s", error)


def _write(path: Path, certificate: bytes, ours: set[str]) -> bool:
    """Write one file; False if the file there is not ours."""
    with contextlib.suppress(FileNotFoundError):
        there = path.read_bytes()
        if there == certificate:
            return True
        if hashlib.sha256(there).hexdigest() not in ours:
            log.info("%s is not ours, so it stays as it is", path)
            return False
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_bytes(certificate)
    scratch.chmod(0o644)
    scratch.rename(path)
    return True


def _read(record: Path) -> set[str]:
    try:
        return {str(item) for item in json.loads(record.read_text("ascii"))}
    except errors.UNREADABLE:
        return set()


DAY = 24 * 3600
RENEW_DAYS = 30  # days before its end that a certificate is replaced
RENEW_CA_DAYS = 2 * 365  # the same for the CA, whose holders need time to get the new one
CHECK_EVERY = DAY / 2  # seconds
CHILD_SECONDS = 30.0
MAX_NAME = 253
CA_CERT, CA_KEY, CERT, KEY, RECORD = "ca.crt", "ca.key", "server.crt", "server.key", "server.json"
_LABEL = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_HOST_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")


class Identity(NamedTuple):
    """The certificate chain of a TLS server, and its private key, in PEM."""

    key: bytes
    certificate: bytes


class Certificates:
    """The certificate in one folder, current for as long as ``keep`` runs."""

    def __init__(self, folder: Path, more_names: Sequence[str] = ()) -> None:
        self.folder = folder
        self._more_names = more_names
        self._identity: Identity | None = None
        self._loading = asyncio.Lock()

    @property
    def identity(self) -> Identity:
        """The newest key and certificate; read from any thread."""
        if self._identity is None:
            raise RuntimeError("load() comes first")
        return self._identity

    def is_for(self, name: str) -> bool:
        """Whether a host name or address is one of the certificate's own."""
        name = name.lower().rstrip(".")
        wildcard = "*." + name.partition(".")[2]
        return not {name, wildcard}.isdisjoint(names(self._more_names))

    async def load(self) -> None:
        """Read the certificate, and make or renew it first if needed."""
        async with self._loading:
            await self._load()

    async def _load(self) -> None:
        if due(self.folder, time.time(), self._more_names):
            await make_in_child("issuer", str(self.folder), *self._more_names)
        elif self._identity is not None:
            return
        key, certificate = (self.folder / KEY).read_bytes(), (self.folder / CERT).read_bytes()
        publish_ca(self.folder.parent, (self.folder / CA_CERT).read_bytes())
        self._identity = Identity(key, certificate)

    async def keep(self, on_check: Callable[[], object] | None = None) -> None:
        """Renew in time, for ever; after each check, ``on_check`` can look for a new one."""
        while True:
            await asyncio.sleep(CHECK_EVERY)
            try:
                await self.load()
                if on_check is not None:
                    on_check()
            except (errors.K8eError, OSError):
                log.exception("the TLS certificate could not be renewed; trying again later")


def due(folder: Path, now: float, more_names: Sequence[str] = ()) -> bool:
    """Whether the certificate is missing, damaged, for other names, or soon at its end."""
    try:
        record = json.loads((folder / RECORD).read_text("utf-8"))
        if record["sha256"] != checksum(folder) or record["names"] != names(more_names):
            return True
        if now > record["ca_not_after"] - RENEW_CA_DAYS * DAY:
            return True
        return now > record["not_after"] - RENEW_DAYS * DAY
    except errors.UNREADABLE:
        return True


def names(more: Sequence[str] = ()) -> list[str]:
    """The names by which clients may call the gateway: this machine's, and ``more``."""
    host = socket.gethostname().lower()
    known = ["localhost", "127.0.0.1", "::1"]
    usable = [host] if _HOST_NAME.fullmatch(host) else []
    return list(dict.fromkeys([*known, *usable, *more]))


def names_of(known: settings.Settings) -> list[str]:
    """All further names and addresses by which clients call a gateway, of gRPC and HTTP."""
    found = [_address(known.listen), *advertised(known.advertise_names)]
    http = _address(known.http)
    if http and not ipaddress.ip_address(http).is_loopback:
        found.append(http)
    return [name for name in found if name]


def _address(listening: str) -> str:
    """The address of one that is listened on; empty if it is none, or all that there are."""
    host = listening.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return ""
    return "" if address.is_unspecified else str(address)


def advertised(text: str) -> list[str]:
    """The names and addresses in a comma list, each as certificates spell it."""
    found: list[str] = []
    for item in filter(None, (part.strip().lower() for part in text.split(","))):
        try:
            found.append(str(ipaddress.ip_address(item.removeprefix("[").removesuffix("]"))))
        except ValueError:
            if not _HOST_NAME.fullmatch(item.removeprefix("*.")) or len(item) > MAX_NAME:
                raise errors.InvalidRequest(
                    f"{item[:80]!r} is neither a host name nor an address (K8E_ADVERTISE_NAMES)",
                    hint="use names and addresses, separated by commas",
                ) from None
            found.append(item)
    return found


def fingerprint(folder: Path) -> str:
    """The hash by which users on other machines recognise our CA."""
    try:
        der = ssl.PEM_cert_to_DER_cert((folder / CA_CERT).read_text("ascii"))
    except (OSError, ValueError):
        return ""
    return "sha256:" + hashlib.sha256(der).hexdigest()


def checksum(folder: Path) -> str:
    """A checksum of everything that must fit together."""
    parts = [(folder / name).read_bytes() for name in (CA_CERT, CERT, KEY)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


async def make_in_child(module: str, folder: str, *arguments: str, given: bytes = b"") -> bytes:
    """The output of a module of this package that runs as a process of its own."""
    # -P: without it the working directory, which any user may own, comes first on the import path.
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", f"k8e.gateway.{module}", folder, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    told = b""
    try:
        async with asyncio.timeout(CHILD_SECONDS):
            told, complaint = await child.communicate(given)
    except TimeoutError:
        complaint = b"it took too long"
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode:
        reason = complaint.decode(errors="replace").strip().rpartition("\n")[2]
        raise errors.K8eError(f"making the TLS certificate in {folder} failed: {reason}")
    return told
