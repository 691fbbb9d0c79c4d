"""Tokens of sandboxes: short-lived JWTs that say who, which sandbox, and what may be done with it.

A token is good for one audience and one sandbox, and for the operations that it names. They are
signed with Ed25519 keys that all gateways of a database share and publish (:class:`KeyRing`), or,
where the operator set ``TOKEN_SIGNING_KEY``, with that by HMAC. One deployment accepts one
algorithm: what a token's own header says about that only ever leads to its refusal.

PyJWT and cryptography are loaded with the first token: most gateways never sign one.
"""

from __future__ import annotations

import asyncio
import base64
import math
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, cast

from k8e import errors
from k8e.auth.token_store import RevocationStore, SigningKey, SigningKeyStore
from k8e.errors import TokenRefused

ISSUER = "k8e"
REST_AUDIENCE = "k8e-rest"
"""The audience of tokens for the gateway's own REST."""
ROUTER_AUDIENCE = "k8e-router"
"""The audience of tokens for agent-sandbox's router."""
DEFAULT_TTL = 3600.0
MIN_TTL, MAX_TTL = 60.0, 24 * 3600.0
LEEWAY = 10.0
"""Seconds by which the clocks of gateways may differ."""
MAX_TOKEN = 4096
"""Characters of a token."""
MIN_SECRET = 32
"""Bytes of an HMAC key: as many as the digest has (RFC 7518, 3.2)."""
ROTATE_SECONDS = 7 * 24 * 3600.0
"""After which a new key takes over."""
PUBLISH_SECONDS = 600.0
"""How long a key is published before it signs, so that whoever remembers the list has it."""
REMEMBER_SECONDS = 30.0
"""How long the list of keys is remembered."""
LOOK_AGAIN_SECONDS = 1.0
"""… and for how long at least, whatever keys tokens name."""
_WELL_KNOWN = (
    "change-me-in-production", "changeme", "secret", "password", "your-256-bit-secret", "token",
    "signing-key", "test", "example", "default", "insecure",
)  # fmt: skip
_TTL = re.compile(r"(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,9})s?)?", re.ASCII)
_KID = re.compile(r"[A-Za-z0-9_-]{8,64}")
_REQUIRED = ("iss", "aud", "sub", "iat", "nbf", "exp", "jti")


@dataclass(frozen=True)
class Grant:
    """What a token says: who may do what with which sandbox, and until when."""

    owner: str
    """The principal whose sandbox it is."""
    tenant: str
    user_id: str
    conversation_id: str
    """Empty for a sandbox without a conversation."""
    sandbox_id: str
    """The id of the session, as clients know it."""
    audience: str
    operations: frozenset[str]
    """Names of operations; nothing else is allowed."""
    token_id: str = ""
    issued_at: float = 0
    expires_at: float = 0

    def claims(self) -> dict[str, Any]:
        """The payload of the JWT."""
        return {
            "iss": ISSUER,
            "aud": self.audience,
            "sub": self.user_id or self.owner,
            "iat": self.issued_at,
            "nbf": self.issued_at,
            "exp": math.ceil(self.expires_at),
            "jti": self.token_id,
            "owner": self.owner,
            "tenant": self.tenant,
            "user_id": self.user_id,
            "conversation_id": self.conversation_id,
            "sandbox_id": self.sandbox_id,
            "operations": sorted(self.operations),
        }

    def subjects(self) -> tuple[str, ...]:
        """What a revocation can name to mean this token, among others."""
        return (
            EVERYTHING,
            subject("token", self.token_id),
            subject("sandbox", self.owner, self.sandbox_id),
            subject("conversation", self.owner, self.tenant, self.conversation_id),
            subject("user", self.owner, self.tenant, self.user_id),
            subject("owner", self.owner),
        )


EVERYTHING = "all"
"""The subject of all tokens."""


def subject(kind: str, *names: str) -> str:
    """What a revocation names; no names of one can be taken for those of another."""
    return "/".join((kind, *(f"{len(name)}:{name}" for name in names)))


def read_claims(claims: Mapping[str, Any]) -> Grant:
    """The grant in a payload whose signature, issuer, audience and dates are checked already."""
    texts = [claims.get(name) for name in ("owner", "tenant", "user_id", "conversation_id")]
    texts += [claims.get(name) for name in ("sandbox_id", "aud", "jti")]
    operations: Any = claims.get("operations")
    dates: list[Any] = [claims.get("iat"), claims.get("exp")]
    if (
        not all(isinstance(item, str) for item in texts)
        or not isinstance(operations, list)
        or not all(isinstance(item, str) for item in cast("list[object]", operations))
        or not all(type(item) in (int, float) and math.isfinite(item) for item in dates)
    ):
        raise TokenRefused("its claims are not those of a token of k8e")
    owner, tenant, user_id, conversation_id, sandbox_id, audience, token_id = cast(
        "list[str]", texts
    )
    issued_at, expires_at = dates
    names = frozenset(cast("list[str]", operations))
    if not owner or not sandbox_id or not token_id or expires_at - issued_at > MAX_TTL + 1:
        raise TokenRefused("its claims are not those of a token of k8e")
    return Grant(
        owner, tenant, user_id, conversation_id, sandbox_id, audience, names,
        token_id, issued_at, expires_at,
    )  # fmt: skip


def parse_ttl(text: str) -> float:
    """Seconds of ``1h``, ``90m``, ``1h30m`` or ``3600``."""
    found = _TTL.fullmatch(text.strip())
    hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0)
    total = float(hours * 3600 + minutes * 60 + seconds)
    if not MIN_TTL <= total <= MAX_TTL:
        raise errors.InvalidRequest(
            f"TOKEN_TTL is {text[:40]!r}; a token can live {MIN_TTL:g} seconds to "
            f"{MAX_TTL / 3600:g} hours",
            hint="write it as 1h, 90m or 3600",
        )
    return total


def check_secret(secret: str) -> bytes:
    """``TOKEN_SIGNING_KEY``, if it is one that nobody can guess.

    Raises:
        InvalidRequest: it is short, or published somewhere, or one character again and again.
    """
    data = secret.encode("utf-8", "surrogateescape")
    plain = re.sub(r"[^a-z0-9]", "", secret.lower())
    known = {re.sub(r"[^a-z0-9]", "", word) for word in _WELL_KNOWN}
    repeated = any(plain == (word * len(plain))[: len(plain)] for word in known) if plain else True
    why = ""
    if plain in known or repeated:
        why = "is one that everybody knows"
    elif len(data) < MIN_SECRET:
        why = f"has {len(data)} bytes, and must have {MIN_SECRET}"
    elif len(set(data)) < 8:
        why = "is made of a few characters only, again and again"
    if why:
        raise errors.InvalidRequest(
            f"TOKEN_SIGNING_KEY {why}: anybody could make tokens",
            hint="make one: openssl rand -hex 32; or leave it unset for Ed25519 keys of k8e's own",
        )
    return data


class Signer(Protocol):
    """What signs tokens and checks signatures; one algorithm, and no other."""

    algorithm: str

    async def sign_with(self) -> tuple[Any, str]:
        """The key that signs now, and its id (empty if keys have none)."""
        ...

    async def verify_with(self, kid: object) -> Any:
        """The key with this id; TokenRefused if there is none."""
        ...

    async def published(self) -> list[dict[str, str]]:
        """The public keys, as JWKs."""
        ...


class SharedSecret:
    """Signs by HMAC; whoever can check a token can make one."""

    algorithm = "HS256"

    def __init__(self, secret: str) -> None:
        self._secret = check_secret(secret)

    async def sign_with(self) -> tuple[Any, str]:
        return self._secret, ""

    async def verify_with(self, kid: object) -> Any:
        if kid is not None:
            raise TokenRefused("it names a key, and there is one only")
        return self._secret

    async def published(self) -> list[dict[str, str]]:
        return []


class KeyRing:
    """Signs with Ed25519 keys, which follow each other with an overlap."""

    algorithm = "EdDSA"

    def __init__(
        self,
        store: SigningKeyStore,
        *,
        rotate: float = ROTATE_SECONDS,
        publish: float = PUBLISH_SECONDS,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._rotate = rotate
        self._publish = publish
        self._now = now
        self._keys: list[SigningKey] = []
        self._published: dict[str, dict[str, str]] = {}
        self._read_at = -math.inf
        self._lock = asyncio.Lock()

    async def _known(self, older_than: float = REMEMBER_SECONDS) -> list[SigningKey]:
        """All keys, read again if they were read longer ago than that."""
        async with self._lock:
            if time.monotonic() - self._read_at >= older_than:
                self._keys = await self._store.keys()
                self._read_at = time.monotonic()
            return self._keys

    async def sign_with(self) -> tuple[Any, str]:
        keys, now = await self._known(), self._now()
        newest = keys[-1] if keys else None
        if newest is None or now - newest.made_at >= self._rotate:
            keys = await self._follow(newest, now, self._publish if keys else 0)
        key = signing_key(keys, now)
        return _private(key), key.kid

    async def _follow(
        self, newest: SigningKey | None, now: float, publish: float
    ) -> list[SigningKey]:
        """Add the next key, unless another gateway just did; and remove those of no more use."""
        made = await asyncio.to_thread(_new_key, now, now + publish)
        await self._store.add(made, newest.kid if newest is not None else "")
        for kid in outlived(await self._store.keys(), now):
            await self._store.remove(kid)
        return await self._known(0)

    async def rotate(self, *, at_once: bool = False) -> str:
        """Have a new key; its id.

        With ``at_once`` it signs now and all others are gone, and every token that they signed with
        them: for keys that somebody has stolen.
        """
        before = await self._known(0)
        now = self._now()
        newest = before[-1] if before else None
        made = await self._follow(newest, now, 0 if at_once or not before else self._publish)
        if at_once:
            for key in before:
                await self._store.remove(key.kid)
            made = await self._known(0)
        return made[-1].kid

    async def verify_with(self, kid: object) -> Any:
        if not isinstance(kid, str) or not _KID.fullmatch(kid):
            raise TokenRefused("it names no key of ours")
        for older_than in (REMEMBER_SECONDS, LOOK_AGAIN_SECONDS):
            for key in await self._known(older_than):
                if secrets.compare_digest(key.kid, kid):
                    return _private(key).public_key()
        raise TokenRefused("it names no key of ours")

    async def published(self) -> list[dict[str, str]]:
        keys = await self._known()
        if not keys:
            await self.sign_with()
            keys = await self._known()
        made: dict[str, dict[str, str]] = {}
        for key in keys:  # each is described once: anybody may ask, however often
            known = self._published.get(key.kid)
            made[key.kid] = known or await asyncio.to_thread(_jwk, key)
        self._published = made
        return list(made.values())


def signing_key(keys: list[SigningKey], now: float) -> SigningKey:
    """The newest key that signs already; the first one, if clocks say that none does."""
    ready = [key for key in keys if key.signs_from <= now]
    return ready[-1] if ready else keys[0]


def outlived(keys: list[SigningKey], now: float) -> list[str]:
    """Ids of keys whose last token has expired."""
    gone: list[str] = []
    for key, successor in pairwise(keys):
        if successor.signs_from + MAX_TTL + LEEWAY < now:
            gone.append(key.kid)
    return gone


def _new_key(now: float, signs_from: float) -> SigningKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    secret = Ed25519PrivateKey.generate().private_bytes_raw()
    return SigningKey(secrets.token_urlsafe(12), secret, now, signs_from)


def _private(key: SigningKey) -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(key.secret)


def _jwk(key: SigningKey) -> dict[str, str]:
    public = _private(key).public_key().public_bytes_raw()
    x = base64.urlsafe_b64encode(public).rstrip(b"=").decode()
    return {"kty": "OKP", "crv": "Ed25519", "x": x, "kid": key.kid, "alg": "EdDSA", "use": "sig"}


class Issued(NamedTuple):
    """A new token, and what it says."""

    token: str
    grant: Grant


class Tokens:
    """Mints, verifies and revokes tokens."""

    def __init__(
        self,
        signer: Signer,
        revocations: RevocationStore,
        *,
        ttl: float = DEFAULT_TTL,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.signer = signer
        self.ttl = ttl
        self._revocations = revocations
        self._now = now
        self._forget_at = 0.0

    async def mint(self, grant: Grant, ttl: float = 0) -> Issued:
        """A token for ``grant``, good from now on; its id and dates are chosen here."""
        lifetime = ttl or self.ttl
        if not 0 < lifetime <= MAX_TTL:
            raise errors.InvalidRequest(
                f"a token can live at most {MAX_TTL / 3600:g} hours", hint="leave the ttl out"
            )
        now = self._now()
        grant = replace(
            grant, token_id=secrets.token_urlsafe(12), issued_at=now, expires_at=now + lifetime
        )
        jwt = await _load()
        key, kid = await self.signer.sign_with()
        headers = {"kid": kid} if kid else None
        token: str = jwt.encode(
            grant.claims(), key, algorithm=self.signer.algorithm, headers=headers
        )
        if len(token) > MAX_TOKEN:
            raise errors.InvalidRequest(f"the token would have more than {MAX_TOKEN} characters")
        return Issued(token, grant)

    async def verify(self, token: str, audience: str) -> Grant:
        """What a token says that is good here and now.

        Raises:
            TokenRefused: it is not, whatever the reason.
        """
        grant = await self._read(token, audience)
        if grant.issued_at <= await self._revocations.issued_before(grant.subjects()):
            raise TokenRefused("it was revoked")
        return grant

    async def _read(self, token: str, audience: str) -> Grant:
        if len(token) > MAX_TOKEN or not token.isascii():
            raise TokenRefused("it is no token of k8e")
        jwt = await _load()
        try:
            header = jwt.get_unverified_header(token)
            if header.get("alg") != self.signer.algorithm:
                raise TokenRefused(f"it is not signed by {self.signer.algorithm}")
            if "crit" in header:
                raise TokenRefused("it asks for an extension that k8e does not have")
            key = await self.signer.verify_with(header.get("kid"))
            claims = jwt.decode(
                token,
                key,
                algorithms=[self.signer.algorithm],
                audience=audience,
                issuer=ISSUER,
                # The dates are checked below, by the clock of this object and to the fraction.
                options={
                    "require": list(_REQUIRED),
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
        except jwt.InvalidAudienceError:
            raise TokenRefused("it is for another audience") from None
        except jwt.PyJWTError as error:
            raise TokenRefused(f"it is no good token: {error}") from None
        grant = read_claims(claims)
        self._check_dates(grant, claims)
        return grant

    def _check_dates(self, grant: Grant, claims: Mapping[str, Any]) -> None:
        now = self._now()
        not_before = claims["nbf"]
        if type(not_before) not in (int, float) or not math.isfinite(not_before):
            raise TokenRefused("its claims are not those of a token of k8e")
        if now >= grant.expires_at + LEEWAY:
            raise TokenRefused("it has expired")
        if max(grant.issued_at, not_before) > now + LEEWAY:
            raise TokenRefused("it is not valid yet; compare the clocks of the machines")

    async def revoke(self, name: str) -> float:
        """Refuse every token of a subject that was issued until now; until when that is known."""
        now = self._now()
        # A gateway whose clock is ahead may have dated a token a little later than now.
        until = now + MAX_TTL + 2 * LEEWAY
        await self._revocations.revoke(name, issued_before=now, until=until)
        if now >= self._forget_at:
            self._forget_at = now + 3600
            await self._revocations.forget(now)
        return until


async def _load() -> Any:
    """PyJWT. Importing it takes a tenth of a second, once."""
    if _loaded:
        return _loaded[0]
    import importlib

    _loaded.append(await asyncio.to_thread(importlib.import_module, "jwt"))
    return _loaded[0]


_loaded: list[Any] = []


def is_token(credential: str) -> bool:
    """Whether a credential looks like a JWT; keys never do."""
    return credential.count(".") == 2 and credential.startswith("ey")


def narrowed(allowed: frozenset[str], asked: Iterable[str] | None) -> frozenset[str]:
    """What was asked for, if it is no more than what is allowed; all of that, if nothing was."""
    if asked is None:
        return allowed
    wanted = frozenset(asked)
    if beyond := sorted(wanted - allowed):
        raise errors.InvalidRequest(
            f"a token cannot allow {beyond[0][:80]!r} here",
            hint=f"it can allow {', '.join(sorted(allowed))}",
        )
    return wanted
