"""Who may call: a file with one line for each caller, its name and its token."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path
from typing import NamedTuple

from k8e import errors, system

FIRST = "default"
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")
_PRIVATE = 0o600
_BYTES = 32


class A2aCaller(NamedTuple):
    """Who calls. Who gets the name of somebody that was there before is somebody else."""

    name: str
    mark: str
    """Tells tokens apart, and nothing more about them."""


class Tokens:
    """The callers of a file. Who is added or removed there counts from the next request on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int, int] | None = None
        self._callers: dict[str, bytes] = {}

    def prepare(self) -> None:
        """Make the file with a first caller, if there is none; refuse one that others can read."""
        if not self.path.exists():
            self._save({FIRST: _new()})
        self._load()

    def caller(self, token: str) -> A2aCaller | None:
        """Whose token it is."""
        self._load()
        given = token.encode("utf-8", "surrogateescape")
        found = None
        for name, known in self._callers.items():  # all of them: the time tells nothing
            if hmac.compare_digest(given, known):
                found = _caller(name, known)
        return found

    def callers(self) -> set[A2aCaller]:
        """All who may call now."""
        self._load()
        return {_caller(name, known) for name, known in self._callers.items()}

    def token(self, name: str) -> str:
        """The token of a caller, who is added if new."""
        check(name)
        if self.path.exists():
            self._load()
        known = {key: value.decode() for key, value in self._callers.items()}
        if name not in known:
            self._save({**known, name: _new()})
            self._load()
        return self._callers[name].decode()

    def revoke(self, name: str) -> None:
        self._load()
        if name not in self._callers:
            raise errors.InvalidRequest(
                f"there is no caller {name!r}", hint=f"{self.path} has the names"
            )
        self._save({key: value.decode() for key, value in self._callers.items() if key != name})

    def _load(self) -> None:
        try:
            with open(self.path, encoding="utf-8") as file:
                told = os.fstat(file.fileno())
                seen = (told.st_mtime_ns, told.st_size, told.st_ino)
                if seen == self._seen:
                    return
                if os.name != "nt" and told.st_mode & 0o077:
                    raise errors.Denied(
                        f"{self.path} holds tokens, and others can read it",
                        hint=f"chmod 600 {self.path}",
                    )
                lines = file.read().splitlines()
        except OSError as error:
            self._callers, self._seen = {}, None  # nobody may call
            raise errors.InvalidRequest(
                f"cannot read {self.path}: {error.strerror}", hint="k8e a2a token makes it anew"
            ) from None
        self._callers = dict(_line(line) for line in lines if line.strip() and line[0] != "#")
        self._seen = seen

    def _save(self, callers: dict[str, str]) -> None:
        text = "".join(f"{key} {value}\n" for key, value in callers.items())
        system.replace_files(self.path.parent, {self.path.name: text.encode()})


def check(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise errors.InvalidRequest(
            f"{name!r} is no name of a caller",
            hint="up to 32 lowercase letters, digits and hyphens",
        )


def _line(line: str) -> tuple[str, bytes]:
    name, _, token = line.strip().partition(" ")
    check(name)
    if len(token) < _BYTES:
        raise errors.InvalidRequest(
            f"the token of {name} has less than {_BYTES} characters",
            hint=f"remove its line; k8e a2a token {name} makes a good one",
        )
    return name, token.encode()


def _caller(name: str, token: bytes) -> A2aCaller:
    return A2aCaller(name, hashlib.sha256(token).hexdigest()[:32])


def _new() -> str:
    return secrets.token_urlsafe(_BYTES)
