"""Who a pod is: its token, verified with the cluster's keys.

The token is the service account's, for an audience of ours, and the API server bound it to the
pod's uid. Verifying takes no call: while the API server is away, gateways still find their pods.
The algorithm follows from the key, never from what the token says.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from k8e.kubernetes.api import Object, entries, section

AUDIENCE = "k8e-link"
_LEEWAY = 30.0
_REFETCH_SECONDS = 10.0
_LONGEST = 8 << 10
_ITS_END = "the time at which it ends"
_CURVES: Mapping[str, tuple[type[ec.EllipticCurve], str, hashes.HashAlgorithm]] = {
    "P-256": (ec.SECP256R1, "ES256", hashes.SHA256()),
    "P-384": (ec.SECP384R1, "ES384", hashes.SHA384()),
    "P-521": (ec.SECP521R1, "ES512", hashes.SHA512()),
}


class IdentityRefused(Exception):
    """What was shown is no token of the pod that was dialled."""


class TokenExpired(IdentityRefused):
    """A token of that pod whose time is over: a kubelet that was away will renew it."""


@dataclass(frozen=True)
class PodIdentity:
    """Which pod a token must be of."""

    namespace: str
    account: str
    name: str
    uid: str


Fetch = Callable[[], Awaitable[tuple[str, Object]]]
"""Asks the cluster for its issuer's name, and for its keys (RFC 7517)."""
_PublicKey = rsa.RSAPublicKey | ec.EllipticCurvePublicKey


class TokenVerifier:
    """Verifies tokens of pods; the cluster's keys are kept, and asked for again at a new one."""

    def __init__(self, fetch: Fetch, *, now: Callable[[], float] = time.time) -> None:
        self._fetch, self._now = fetch, now
        self._issuer = ""
        self._keys: dict[str, _PublicKey] = {}
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()

    async def verify(self, token: bytes, pod: PodIdentity) -> None:
        """Raise IdentityRefused unless the token is this pod's, and holds now."""
        signed, signature, header, claims = _parse(token)
        key = await self._key(str(header.get("kid") or ""))
        if key is None:
            raise IdentityRefused("its token is signed with a key that is not the cluster's")
        _check_signature(key, str(header.get("alg")), signed, signature)
        if wrong := self._faults(claims, pod):
            kind = TokenExpired if wrong == [_ITS_END] else IdentityRefused
            raise kind(f"its token does not fit: {', '.join(wrong)}")

    async def _key(self, name: str) -> _PublicKey | None:
        if name not in self._keys:
            async with self._asking:  # once for all pods that a new gateway dials
                # Anybody may send a name that is not known, so that is no reason to ask each time.
                now = time.monotonic()
                if name not in self._keys and now - self._asked_at >= _REFETCH_SECONDS:
                    issuer, listed = await self._fetch()
                    self._asked_at = now
                    self._issuer, self._keys = issuer, dict(_read_keys(listed))
        return self._keys.get(name)

    def _faults(self, claims: Object, pod: PodIdentity) -> list[str]:
        """What of the claims does not fit."""
        found, now = section(claims, "kubernetes.io"), self._now()
        audience = claims.get("aud")
        expires, begins = claims.get("exp"), claims.get("nbf", 0)
        checks: tuple[tuple[str, bool], ...] = (
            ("its issuer", claims.get("iss") == self._issuer),
            ("its audience", audience in (AUDIENCE, [AUDIENCE])),
            (_ITS_END, _number(expires) > now - _LEEWAY),
            ("the time at which it begins", 0 <= _number(begins) < now + _LEEWAY),
            ("its namespace", found.get("namespace") == pod.namespace),
            ("its service account", section(found, "serviceaccount").get("name") == pod.account),
            ("its pod", section(found, "pod") == {"name": pod.name, "uid": pod.uid}),
        )
        return [what for what, fits in checks if not fits]


def _number(value: Any) -> float:
    """A time of a token; less than every one where it is none."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number else float("-inf")


def _parse(token: bytes) -> tuple[bytes, bytes, Object, Object]:
    parts = token.split(b".")
    if len(parts) != 3 or len(token) > _LONGEST:
        raise IdentityRefused("what it showed is no token")
    try:
        header, claims = (json.loads(_decode(part)) for part in parts[:2])
        signature = _decode(parts[2])
    except (ValueError, RecursionError):
        raise IdentityRefused("what it showed is no token") from None
    if not isinstance(header, dict) or not isinstance(claims, dict):
        raise IdentityRefused("what it showed is no token")
    nested = cast("Object", claims).get("kubernetes.io")
    if not isinstance(nested, dict) or not all(
        isinstance(cast("Object", nested).get(name), dict) for name in ("pod", "serviceaccount")
    ):
        raise IdentityRefused("its token is not bound to a pod")
    return b".".join(parts[:2]), signature, cast("Object", header), cast("Object", claims)


def _decode(part: bytes | str) -> bytes:
    data = part.encode("ascii") if isinstance(part, str) else part
    return base64.b64decode(data + b"=" * (-len(data) % 4), altchars=b"-_", validate=True)


def _read_keys(listed: Object) -> list[tuple[str, _PublicKey]]:
    """The keys of a cluster that we can verify with, by their names."""
    found: list[tuple[str, _PublicKey]] = []
    for item in entries(listed, "keys"):
        if item.get("kty") == "RSA":
            modulus, exponent = (int.from_bytes(_decode(item[part])) for part in ("n", "e"))
            found.append((str(item["kid"]), rsa.RSAPublicNumbers(exponent, modulus).public_key()))
        elif item.get("kty") == "EC" and item.get("crv") in _CURVES:
            x, y = (int.from_bytes(_decode(item[part])) for part in ("x", "y"))
            curve = _CURVES[item["crv"]][0]()
            numbers = ec.EllipticCurvePublicNumbers(x, y, curve)
            found.append((str(item["kid"]), numbers.public_key()))
    return found


def _check_signature(key: _PublicKey, algorithm: str, signed: bytes, signature: bytes) -> None:
    try:
        if isinstance(key, rsa.RSAPublicKey):
            wanted = "RS256"
            if algorithm == wanted:
                key.verify(signature, signed, padding.PKCS1v15(), hashes.SHA256())
                return
        else:
            _, wanted, digest = next(
                item for item in _CURVES.values() if isinstance(key.curve, item[0])
            )
            half = (key.curve.key_size + 7) // 8
            if algorithm == wanted and len(signature) == 2 * half:
                r, s = (int.from_bytes(part) for part in (signature[:half], signature[half:]))
                key.verify(encode_dss_signature(r, s), signed, ec.ECDSA(digest))
                return
    except InvalidSignature:
        raise IdentityRefused("the signature of its token is wrong") from None
    raise IdentityRefused("its token is signed in a way that its key is not for")
