"""Renewal of a login's certificate before it ends, by a client that uses it then.

The private key stays the same, so a single file changes, and its readers always get a valid one. No
call waits for this; a failed renewal is tried again later, and the old certificate is used until
its end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Generator
from pathlib import Path

from k8e import errors
from k8e.client import credentials
from k8e.client.endpoints import Endpoint

log = logging.getLogger(__name__)

DAY = 24 * 3600.0
PART = 2 / 3  # of a certificate's life, after which it is renewed
SECONDS = 5.0  # that a gateway has to answer: a program that ends waits for it
RETRY_SECONDS = 3600.0  # after a failure
STALE_SECONDS = 120.0  # after which the process that began it must have given up
FILE = "renew_at"
"""In the folder of a certificate: when, and under which name of this device."""
_LOCK = "renewing"


def plan(days: int, device: str) -> bytes:
    """When to renew, for the file: only certificates that end soon need it."""
    return _plan(days * DAY * PART, device) if days else b"never\n"


def _plan(seconds: float, device: str) -> bytes:
    return f"{time.time() + seconds:.0f}\n{device}\n".encode()


def begin(endpoint: Endpoint) -> threading.Thread | None:
    """Renew the certificate for an endpoint if it is time, in the background.

    It does not fail: its caller has something else to do.
    """
    try:
        if not is_due(endpoint):
            return None
        # No daemon: a command that is shorter than this lets it come to its end.
        thread = threading.Thread(target=renew, args=(endpoint,), name="k8e-renew")
        thread.start()
    except (OSError, RuntimeError, errors.K8eError) as error:
        log.warning("whether a certificate is to be renewed cannot be told: %s", error)
        return None
    return thread


def is_due(endpoint: Endpoint) -> bool:
    if not endpoint.cert_dir or endpoint.api_key or not endpoint.target:
        return False
    try:
        due = float(_planned(endpoint)[0])
    except (OSError, ValueError, IndexError):
        return False  # of a login that did not record it, or of a key that ends soon
    return time.time() >= due and credentials.is_of_folder(endpoint) and _is_ours(endpoint)


def _planned(endpoint: Endpoint) -> list[str]:
    return Path(endpoint.cert_dir, FILE).read_text("utf-8").split("\n")


def _is_ours(endpoint: Endpoint) -> bool:
    """Whether its owner could still read the files that we would write."""
    owner = Path(endpoint.cert_dir, credentials.CERT).stat().st_uid
    return not hasattr(os, "geteuid") or os.geteuid() == owner


def renew(endpoint: Endpoint) -> None:
    """Get a new certificate for the existing key."""
    folder = Path(endpoint.cert_dir)
    with only_one(folder) as alone:
        device = ""
        try:
            if not alone or not is_due(endpoint):  # another process does it, or did
                return
            device = next(iter(_planned(endpoint)[1:]), "")
            _renew(endpoint, folder, device)
        except Exception as error:  # whatever it is: no caller's work depends on this
            log.warning("the certificate in %s could not be renewed: %s", folder, error)
            with contextlib.suppress(OSError, errors.K8eError):
                _store(folder, {FILE: _plan(RETRY_SECONDS, device)})


def _renew(endpoint: Endpoint, folder: Path, device: str) -> None:
    from k8e.client import login

    key = folder / credentials.KEY
    pair = login.pair_of(key.read_bytes(), device)
    issued = login.login(endpoint, pair.csr, device, None, SECONDS)
    if not pair.fits(issued.certificate):
        raise errors.Denied(f"{endpoint.target} answered with no certificate for our key")
    files = {credentials.CERT: issued.certificate.encode(), FILE: plan(issued.days, device)}
    if issued.ca and (folder / credentials.CA).exists():
        files[credentials.CA] = issued.ca.encode()
    if key.read_bytes() == pair.key:  # otherwise a login meanwhile has brought a newer one
        _store(folder, files)


def _store(folder: Path, files: dict[str, bytes]) -> None:
    from k8e.client import login

    login.store(folder, files)


@contextlib.contextmanager
def only_one(folder: Path, seconds: float = 0) -> Generator[bool]:
    """Whether no other process here changes the folder; waits up to ``seconds``."""
    lock, until = folder / _LOCK, time.monotonic() + seconds
    while not (alone := _take(lock)) and time.monotonic() < until and folder.is_dir():
        time.sleep(0.05)
    try:
        yield alone
    finally:
        if alone:
            with contextlib.suppress(OSError):
                lock.unlink()


def _take(lock: Path) -> bool:
    with contextlib.suppress(OSError):  # there is none, mostly
        if time.time() - lock.stat().st_mtime > STALE_SECONDS:
            lock.unlink()
    try:
        os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except OSError:  # of another user, or a folder that we cannot write
        return False
    return True
