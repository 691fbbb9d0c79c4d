"""K8E's state file: the session in which a tenant's commands run when they name none.

The gateway knows that better; the file is kept for tools that were written for K8E.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from k8e import rights
from k8e.cli import output

DEFAULT_TENANT = "default"
_AT_ONCE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
MAX_FILE = 4096  # bytes


def path_of(tenant: str) -> Path:
    return Path.home() / ".k8e" / "sandbox" / (tenant or DEFAULT_TENANT) / "state.json"


def save(tenant: str, session_id: str) -> None:
    """Write the file whole or not at all; a home that cannot be written to is no error."""
    now = datetime.datetime.now(datetime.UTC)
    state = {
        "created_at": now.isoformat(timespec="seconds").replace("+00:00", "Z"),
        "phase": "active",
        "session_id": session_id,
        "tenant_id": tenant,
    }
    try:
        path = path_of(tenant)
        if not Path.home().is_dir():
            return  # root could make it, where no user expects it
        with rights.of_master(path):  # under sudo it may be the home of another user
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd, scratch = tempfile.mkstemp(prefix=".state-", dir=path.parent)
            try:
                with os.fdopen(fd, "w", encoding="utf-8") as file:
                    file.write(output.encode(state))
                Path(scratch).replace(path)
            except OSError:
                Path(scratch).unlink(missing_ok=True)
    except (OSError, RuntimeError):  # or there is no home at all
        return


def load(tenant: str) -> str:
    """The session id in a tenant's file, or nothing."""
    try:
        # Whatever is there, it is not waited for, and no more is read than we ever write.
        fd = os.open(path_of(tenant), os.O_RDONLY | _AT_ONCE)
        with open(fd, "rb") as file:
            found: Any = json.loads(file.read(MAX_FILE))
        return str(found["session_id"])
    except (OSError, RuntimeError, ValueError, TypeError, KeyError):
        return ""


def forget(session_id: str) -> None:
    """Remove the files that name a removed session; those that cannot be removed do no harm."""
    with contextlib.suppress(OSError, RuntimeError), rights.of_master(path_of(DEFAULT_TENANT)):
        for path in path_of(DEFAULT_TENANT).parent.parent.glob("*/state.json"):
            if load(path.parent.name) == session_id:
                path.unlink(missing_ok=True)
