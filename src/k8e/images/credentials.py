"""The operator's passwords for registries, from a file in the form of Docker's ``config.json``."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, cast

from k8e import errors

MOST_BYTES = 1 << 20


def find(setting: str, host: str) -> str:
    """``user:password`` for a registry, as base64; empty if the file has none.

    Read anew each time: logging in elsewhere changes it. Only ``auths`` is looked at; programs that
    keep passwords are not started.
    """
    path = Path(setting) if setting else Path.home() / ".docker/config.json"
    try:
        text = path.read_bytes()[:MOST_BYTES]
    except FileNotFoundError:
        if not setting:
            return ""
        raise _unusable(path, "it is not there") from None
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from None
    try:
        found: Any = json.loads(text)
        auths = cast("dict[str, dict[str, Any]]", found.get("auths") or {})
        known = {_host(name): item for name, item in auths.items()}
        auth = str(known[host].get("auth") or "") if host in known else ""
        if auth and b":" not in base64.b64decode(auth, validate=True):
            raise ValueError("an auth is not user:password")
    except errors.UNREADABLE as error:
        raise _unusable(path, str(error)) from None
    return auth


def _host(name: str) -> str:
    """What a key of ``auths`` is about: some programs write whole addresses."""
    return name.removeprefix("https://").removeprefix("http://").partition("/")[0].lower()


def _unusable(path: Path, why: str) -> errors.InvalidRequest:
    return errors.InvalidRequest(
        f"the passwords for registries in {path} cannot be read: {why}",
        hint="correct the file, or set K8E_REGISTRY_CREDENTIALS to another one",
    )
