"""The gateway's CA where K8E's clients look for it, so that they need no variable.

K8E's own server keeps its certificates in the same place. What it wrote there is left alone: only
a file that we wrote ourselves is ever replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from pathlib import Path

from k8e import errors

log = logging.getLogger(__name__)

FOLDERS = ("server", "server/tls")
PLACES = ("server/tls/serving-kube-apiserver.crt", "server/tls/sandbox-ca.crt")
"""In K8E's data folder, which is ours too: ``/var/lib/k8e``. The first is for the published SDKs,
the second for K8E's newest client."""
RECORD = "published.json"


def publish(data_dir: Path, certificate: bytes) -> None:
    """Put the CA's certificate where everybody on this machine can read it; it is no secret."""
    record = data_dir / "tls" / RECORD
    before = _read(record)
    digest = hashlib.sha256(certificate).hexdigest()
    try:
        for name in FOLDERS:
            with contextlib.suppress(FileExistsError):
                (data_dir / name).mkdir()
                (data_dir / name).chmod(0o755)
        # Before any file is written: whoever is killed in between must know it as ours again.
        record.write_text(json.dumps(sorted({*before, digest})), "ascii")
        written = [_write(data_dir / name, certificate, before) for name in PLACES]
        if all(written):
            record.write_text(json.dumps([digest]), "ascii")
    except OSError as error:
        log.warning("K8E's clients need K8E_SANDBOX_CERT: %s", error)


def _write(path: Path, certificate: bytes, ours: set[str]) -> bool:
    """Write one file; False if it is somebody else's."""
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
