"""API keys: created, listed, deleted, and recognised in calls."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from k8e import errors
from k8e.auth.rates import FailureRates
from k8e.auth.store import Key, KeyStore
from k8e.model import Principal, Role, new_id

log = logging.getLogger(__name__)

PREFIX = "k8e-"
E2B_PREFIX = "e2b_"
OWNER_PREFIX = "key:"
"""Before a key's name in the name of its principal; no other principal has one like it."""
MAX_RATE = 1e6  # calls a second
MAX_QUOTA = 100_000  # sessions
DAY = 24 * 3600.0
DEFAULT_TTL = "30d"
MAX_TTL_DAYS = 3650
KEEP = 400 * DAY  # how long a key that is over is still known
MAX_KEYS = 10_000
_TTL = re.compile(r"([0-9]{1,6})([dh])")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,58}[A-Za-z0-9])?")
_SHAPE = re.compile(r"k8e-[0-9a-f]{64}")


class Unknown(Exception):
    """The credential is not valid; the text says why."""


class KeyQuota(NamedTuple):
    """The limits of one key; 0 means the default."""

    max_sessions: int = 0
    rate: float = 0
    """Calls per second."""


class Created(NamedTuple):
    """A new key; its secret cannot be shown again."""

    key: Key
    secret: str

    def __repr__(self) -> str:
        return f"Created({self.key!r})"


class Keys:
    """All keys of this gateway, on one event loop."""

    def __init__(self, store: KeyStore) -> None:
        self._store = store
        self.attempts = FailureRates()
        self._open: dict[int, set[asyncio.Timeout]] = {}
        self.on_end: list[Callable[[Key], None]] = []
        """Called with each key that was deleted or rotated."""
        self.on_delete: list[Callable[[Key], None]] = []
        """Called with each key that is deleted, before the calls with it end."""
        store.on_end.append(self._end_calls)

    # Managing.

    async def create(
        self, name: str, ttl: str = "", roles: Sequence[str] = (), quota: KeyQuota | None = None
    ) -> Created:
        """Create a key, valid for ``ttl`` (``30d``, ``12h``, ``never``), with ``roles``."""
        if not _NAME.fullmatch(name):
            raise errors.InvalidRequest(
                f"{name[:80]!r} cannot be the name of a key",
                hint="use at most 60 letters, digits and inner hyphens, dots and underscores",
            )
        now = time.time()
        quota = _checked_quota(quota or KeyQuota())
        ends = _ends(ttl, now)
        await self._store.forget(now - KEEP, now)
        if len(self._store.listing()) >= MAX_KEYS:
            raise errors.LimitExceeded(f"there are {MAX_KEYS} keys", hint="delete some")
        secret = _new_secret()
        # Not the name alone: who gets that name next must not find what this one leaves.
        owner = new_id(f"{OWNER_PREFIX}{name}:id")
        key = Key(0, name, parse_roles(roles), now, ends, 0, owner, *quota)
        created = await self._store.insert(key, digest(secret))
        log.info("key %s is made, for %s", name, ", ".join(sorted(key.roles)))
        return Created(created, secret)

    def listing(self) -> list[tuple[Key, int]]:
        """Each key, and how many certificates of it are still valid."""
        now = time.time()
        return [(key, self._store.certificates(key.key_id, now)) for key in self._store.listing()]

    def get(self, name: str) -> Key:
        found = self._store.named(name)
        if found is None:
            raise errors.InvalidRequest(
                f"there is no key {name[:80]!r}", hint="k8e sandbox api-key list shows them"
            )
        return found

    async def delete(self, name: str) -> Key:
        """End a key, its certificates, and the calls that are under way with either."""
        gone = self.get(name)
        await self._store.revoke(name, time.time())
        log.info("key %s is deleted", name)
        for tell in self.on_delete:
            tell(gone)
        self._end_calls(gone)
        return gone

    async def rotate(self, name: str, ttl: str = "") -> Created:
        """Replace a key's secret: the principal stays the same, and everything older is invalid."""
        before, now = self.get(name), time.time()
        secret = _new_secret()
        key = replace(before, created_at=now, expires_at=_ends(ttl, now))
        await self._store.rotate(key, digest(secret))
        log.info("key %s has a new secret", name)
        self._end_calls(before)
        return Created(key, secret)

    def _end_calls(self, key: Key) -> None:
        now = asyncio.get_running_loop().time()
        for scope in self._open.get(key.key_id, ()):
            if not scope.expired():  # it may be on its way out
                scope.reschedule(now)
        for tell in self.on_end:
            tell(key)

    def gone(self) -> set[str]:
        """The principals of deleted keys; one that only expired may be rotated."""
        return self._store.revoked()

    def max_sessions(self, owner: str) -> int:
        """How many sessions a principal may have at once; 0 means the default."""
        found = self._store.owned(owner) if owner.startswith(OWNER_PREFIX) else None
        return found.max_sessions if found is not None else 0

    # Recognising.

    def of_secret(self, secret: str) -> Key:
        """The key with this secret.

        Found by its hash, so the time that this takes reveals nothing about any other key.
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
        """The living key of a principal, if there is one."""
        if not principal.name.startswith(OWNER_PREFIX):
            return None
        found = self._store.owned(principal.name)
        return found if found is not None and found.valid(time.time()) else None

    async def issued(self, serial: str, key: Key, device: str, expires_at: float) -> None:
        """Record a certificate; an unrecorded one belongs to no key."""
        await self._store.add_certificate(
            serial.lower(), key.key_id, device, time.time(), expires_at
        )
        log.info("a certificate is issued for key %s, device %s", key.name, device)

    @contextlib.asynccontextmanager
    async def while_valid(self, key: Key) -> AsyncGenerator[None]:
        """Let a call go on for as long as its key is valid; Unknown when that ends first."""
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
    return Principal(key.owner, key.roles, OWNER_PREFIX + key.name, key.rate)


def digest(secret: str) -> bytes:
    """The stored form of a key: 256 random bits need no salt and no slow hash."""
    return hashlib.sha256(secret.encode()).digest()


def _new_secret() -> str:
    return PREFIX + secrets.token_hex(32)


def _ends(ttl: str, now: float) -> float:
    seconds = parse_ttl(ttl or DEFAULT_TTL)
    return now + seconds if seconds else 0


def _checked_quota(quota: KeyQuota) -> KeyQuota:
    if not 0 <= quota.max_sessions <= MAX_QUOTA:
        raise errors.InvalidRequest(f"a key may have 1 to {MAX_QUOTA} sessions; 0 means no limit")
    if not 0 <= quota.rate <= MAX_RATE:  # so that NaN is refused too
        raise errors.InvalidRequest(f"a rate is 0 (the usual one) to {MAX_RATE:g} calls a second")
    return quota


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
