"""The gateway's certificate: made on first start, renewed by itself, signed by a CA of our own.

Making one needs ``cryptography``, whose memory the gateway would keep for good. So a child process
does it (:mod:`k8e.gateway.issuing`) and writes down beside the certificate what the gateway needs
to know of it. That record is written last and has a checksum: after a crash in between, the next
start makes the certificate again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple

from k8e import errors

log = logging.getLogger(__name__)

DAY = 24 * 3600
RENEW_DAYS = 30  # days before its end that a certificate is replaced
CHECK_EVERY = DAY / 2  # seconds
CHILD_SECONDS = 30.0
CA_CERT, CA_KEY, CERT, KEY, RECORD = "ca.crt", "ca.key", "server.crt", "server.key", "server.json"
_LABEL = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_HOST_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")


class Identity(NamedTuple):
    """What a TLS server shows and what it keeps, in PEM."""

    key: bytes
    certificate: bytes


class Certificates:
    """The certificate in one folder, current for as long as ``keep`` runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._identity: Identity | None = None

    @property
    def identity(self) -> Identity:
        """The newest key and certificate; read from any thread."""
        if self._identity is None:
            raise RuntimeError("load() comes first")
        return self._identity

    async def load(self) -> None:
        """Make or renew the certificate where needed, and read it."""
        if due(self._folder, time.time()):
            await _make_in_child(self._folder)
        elif self._identity is not None:
            return
        key, certificate = (self._folder / KEY).read_bytes(), (self._folder / CERT).read_bytes()
        self._identity = Identity(key, certificate)

    async def keep(self) -> None:
        """Renew in time, for ever."""
        while True:
            await asyncio.sleep(CHECK_EVERY)
            try:
                await self.load()
            except (errors.K8eError, OSError):
                log.exception("the TLS certificate could not be renewed; trying again later")


def due(folder: Path, now: float) -> bool:
    """Whether the certificate is missing, damaged, for other names, or soon at its end."""
    try:
        record = json.loads((folder / RECORD).read_text("utf-8"))
        if record["sha256"] != checksum(folder) or record["names"] != names():
            return True
        return now > record["not_after"] - RENEW_DAYS * DAY
    except (OSError, ValueError, KeyError, TypeError):
        return True


def names() -> list[str]:
    """What clients on this machine may call the gateway."""
    host = socket.gethostname().lower()
    known = ["localhost", "127.0.0.1", "::1"]
    return [*known, host] if _HOST_NAME.fullmatch(host) and host not in known else known


def checksum(folder: Path) -> str:
    """Of everything that must fit together."""
    parts = [(folder / name).read_bytes() for name in (CA_CERT, CERT, KEY)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


async def _make_in_child(folder: Path) -> None:
    # -P: without it the working directory, which may be anybody's, comes first on the import path.
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "k8e.gateway.issuing", str(folder)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(CHILD_SECONDS):
            _, complaint = await child.communicate()
    except TimeoutError:
        complaint = b"it took too long"
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode:
        reason = complaint.decode(errors="replace").strip().rpartition("\n")[2]
        raise errors.K8eError(f"making the TLS certificate in {folder} failed: {reason}")
