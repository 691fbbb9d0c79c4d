"""API keys: made, listed, deleted, and recognised when somebody shows one."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from k8e import errors
from k8e.auth.attempts import Attempts
from k8e.auth.store import Key, KeyStore
from k8e.model import Principal, Role

log = logging.getLogger(__name__)

PREFIX = "k8e-"
E2B_PREFIX = "e2b_"
OWNER_PREFIX = "key:"
"""Before a key's name in the name of its principal; no other principal has one like it."""
DAY = 24 * 3600.0
DEFAULT_TTL = "30d"
MAX_TTL_DAYS = 3650
KEEP = 400 * DAY  # how long a key that is over is still known
MAX_KEYS = 10_000
_TTL = re.compile(r"([0-9]{1,6})([dh])")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,58}[A-Za-z0-9])?")
_SHAPE = re.compile(r"k8e-[0-9a-f]{64}")


class Unknown(Exception):
    """Who shows this credential is nobody that we know; the text says why."""


class Created(NamedTuple):
    """A new key; nobody can be told its secret again."""

    key: Key
    secret: str


class Keys:
    """All keys of this gateway, on one event loop."""

    def __init__(self, store: KeyStore) -> None:
        self._store = store
        self.attempts = Attempts()
        self._open: dict[int, set[asyncio.Timeout]] = {}

    # Managing.

    def create(self, name: str, ttl: str = "", roles: Sequence[str] = ()) -> Created:
        """A new key, good for ``ttl`` (``30d``, ``12h``, ``never``) and for ``roles``."""
        if not _NAME.fullmatch(name):
            raise errors.InvalidRequest(
                f"{name[:80]!r} cannot be the name of a key",
                hint="use at most 60 letters, digits and inner hyphens, dots and underscores",
            )
        now = time.time()
        seconds = parse_ttl(ttl or DEFAULT_TTL)
        self._store.forget(now - KEEP)
        if len(self._store.listing()) >= MAX_KEYS:
            raise errors.LimitExceeded(f"there are {MAX_KEYS} keys", hint="delete some")
        secret = PREFIX + secrets.token_hex(32)
        key = Key(0, name, parse_roles(roles), now, now + seconds if seconds else 0)
        created = self._store.insert(key, digest(secret))
        log.info("key %s is made, for %s", name, ", ".join(sorted(key.roles)))
        return Created(created, secret)

    def listing(self) -> list[tuple[Key, int]]:
        """Each key, and how many certificates of it are still good."""
        now = time.time()
        return [(key, self._store.certificates(key.key_id, now)) for key in self._store.listing()]

    def delete(self, name: str) -> None:
        """End a key, its certificates, and the calls that are under way with either."""
        gone = self._store.revoke(name, time.time())
        if gone is None:
            raise errors.InvalidRequest(
                f"there is no key {name[:80]!r}", hint="k8e sandbox api-key list shows them"
            )
        log.info("key %s is deleted", name)
        now = asyncio.get_running_loop().time()
        for scope in self._open.get(gone.key_id, ()):
            scope.reschedule(now)

    # Recognising.

    def of_secret(self, secret: str) -> Key:
        """The key that somebody shows.

        Found by its hash, so the time that this takes tells nothing about any other key.
        """
        shown = secret.removeprefix(E2B_PREFIX)
        if not _SHAPE.fullmatch(shown):
            raise Unknown("this is not an API key; keys look like k8e-, then 64 hex digits")
        found = self._store.hashed(digest(shown))
        if found is None:
            raise Unknown("this API key is not known here")
        return _checked(found)

    def of_certificate(self, serial: str, name: str) -> Key:
        """The key for which a certificate of our CA was issued."""
        found = self._store.of_certificate(serial.lower(), time.time())
        if found is None or not hmac.compare_digest(found.name.encode(), name.encode()):
            raise Unknown("this client certificate is not known here")
        return _checked(found)

    def of_principal(self, principal: Principal) -> Key | None:
        """The living key behind a principal, if there is one."""
        if not principal.name.startswith(OWNER_PREFIX):
            return None
        found = self._store.named(principal.name.removeprefix(OWNER_PREFIX))
        return found if found is not None and found.valid(time.time()) else None

    def issued(self, serial: str, key: Key, device: str, expires_at: float) -> None:
        """Remember a certificate; one that is not remembered is nobody's."""
        self._store.add_certificate(serial.lower(), key.key_id, device, time.time(), expires_at)
        log.info("a certificate is issued for key %s, device %s", key.name, device)

    @contextlib.asynccontextmanager
    async def while_valid(self, key: Key) -> AsyncGenerator[None]:
        """Let a call go on for as long as its key is good; Unknown when that ends first."""
        loop = asyncio.get_running_loop()
        end = loop.time() + key.expires_at - time.time() if key.expires_at else None
        scope = asyncio.timeout_at(end)
        try:
            async with scope:
                calls = self._open.setdefault(key.key_id, set())
                calls.add(scope)
                try:
                    yield
                finally:
                    calls.discard(scope)
                    if not calls:
                        self._open.pop(key.key_id, None)
        except TimeoutError:
            if not scope.expired():
                raise
            raise Unknown(f"key {key.name} was deleted or has expired meanwhile") from None


def principal(key: Key) -> Principal:
    return Principal(OWNER_PREFIX + key.name, key.roles)


def digest(secret: str) -> bytes:
    """What is kept of a key: 256 random bits need no salt and no slow hash."""
    return hashlib.sha256(secret.encode()).digest()


def parse_ttl(text: str) -> float:
    """Seconds; 0 for ``never``."""
    if text == "never":
        return 0
    found = _TTL.fullmatch(text)
    seconds = int(found[1]) * (DAY if found[2] == "d" else 3600.0) if found else 0
    if not 0 < seconds <= MAX_TTL_DAYS * DAY:
        raise errors.InvalidRequest(
            f"{text[:40]!r} is not how long a key can live",
            hint=f"use 30d, 12h or never; at most {MAX_TTL_DAYS}d",
        )
    return seconds


def parse_roles(names: Sequence[str]) -> frozenset[Role]:
    try:
        return frozenset(Role(name) for name in names) or frozenset({Role.AGENT})
    except ValueError:
        known = ", ".join(Role)
        raise errors.InvalidRequest(f"unknown role; known are {known}") from None


def _checked(key: Key) -> Key:
    if key.revoked_at:
        raise Unknown(f"key {key.name} was deleted")
    if not key.valid(time.time()):
        raise Unknown(f"key {key.name} has expired")
    return key
