"""The token of our HTTP servers: made at the first start, in a file that only its owner reads."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from k8e import errors, folders

VARIABLE = "K8E_SANDBOX_MCP_TOKEN"
FILE_VARIABLE = "K8E_SANDBOX_MCP_TOKEN_FILE"
MIN_LENGTH = 16
MAX_LENGTH = 4096


def default_file() -> Path:
    given = os.environ.get(FILE_VARIABLE)
    try:
        return Path(given) if given else Path.home() / ".k8e" / "sandbox" / "mcp-token"
    except RuntimeError:
        raise errors.InvalidRequest(
            "there is no home folder for the token", hint=f"name a file with {FILE_VARIABLE}"
        ) from None


def token(file: Path | None = None) -> str:
    """The token of the environment, or of the file, which is made if it is missing."""
    given = os.environ.get(VARIABLE)
    if given and file is None:
        return _checked(given, f"the variable {VARIABLE}")
    path = file or default_file()
    try:
        return _read(path)
    except FileNotFoundError:
        return _make(path)
    except OSError as error:
        raise errors.InvalidRequest(
            f"the token in {path} cannot be read: {error.strerror}",
            hint=f"remove it, or name another file with {FILE_VARIABLE}",
        ) from None


def _read(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "r", encoding="ascii", errors="replace") as opened:
        info = os.fstat(descriptor)
        others = stat.S_IMODE(info.st_mode) & 0o077
        if info.st_uid != os.geteuid() or others:
            raise errors.Denied(
                f"others can read the token in {path}, or it is not yours",
                hint=f"remove it, or make it yours alone: chmod 600 {path}",
            )
        return _checked(opened.read(MAX_LENGTH).strip(), str(path))


def _make(path: Path) -> str:
    """Make a token; of two that start at once, both have the one that came first."""
    made = secrets.token_urlsafe(32)
    try:
        if not folders.add_file(path, f"{made}\n".encode()):
            return _read(path)
    except OSError as error:
        raise errors.InvalidRequest(
            f"the token cannot be kept in {path}: {error.strerror}",
            hint=f"name another file with {FILE_VARIABLE}",
        ) from None
    return made


def _checked(found: str, where: str) -> str:
    if len(found) < MIN_LENGTH or not found.isascii() or not found.isprintable() or " " in found:
        raise errors.InvalidRequest(
            f"{where} holds no token of at least {MIN_LENGTH} plain characters",
            hint="remove it; a new token is made at the next start",
        )
    return found
