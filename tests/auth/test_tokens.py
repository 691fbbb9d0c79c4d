"""Tokens of sandboxes: every attack that is known on JWTs ends in a refusal."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jwt
import pytest

from k8e import errors
from k8e.auth import tokens
from k8e.auth.token_store import SqliteTokenStore
from k8e.auth.tokens import (
    LEEWAY,
    MAX_TTL,
    PUBLISH_SECONDS,
    ROTATE_SECONDS,
    Grant,
    KeyRing,
    SharedSecret,
    Tokens,
)
from k8e.errors import TokenRefused

SECRET = "0123456789abcdef-FEDCBA9876543210-zyx"
GRANT = Grant(
    "key:me:id-1", "acme", "ada", "c-1", "sess-1", "k8e-rest", frozenset({"exec", "read"})
)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.25

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteTokenStore]:
    found = SqliteTokenStore(tmp_path / "tokens.db")
    yield found
    found.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ring(store: SqliteTokenStore, clock: Clock) -> Tokens:
    return Tokens(KeyRing(store, now=clock), store, now=clock)


def part(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def forged(token: str, header: dict[str, Any], claims: dict[str, Any] | None = None) -> str:
    """A token with another header and other claims, and the signature that it had."""
    old_header, old_claims, signature = token.split(".")
    known = json.loads(base64.urlsafe_b64decode(old_header + "=="))
    payload = old_claims if claims is None else part(claims)
    return f"{part({**known, **header})}.{payload}.{signature}"


async def refusal(checked: Tokens, token: str, audience: str = "k8e-rest") -> str:
    with pytest.raises(TokenRefused) as caught:
        await checked.verify(token, audience)
    return str(caught.value)


async def test_a_token_says_what_it_was_minted_for(ring: Tokens, clock: Clock) -> None:
    token, grant = await ring.mint(GRANT)
    assert await ring.verify(token, "k8e-rest") == replace(
        grant, expires_at=grant.expires_at + 0.75
    )
    assert grant.expires_at == clock.now + 3600
    assert jwt.get_unverified_header(token)["alg"] == "EdDSA"
    assert tokens.is_token(token)
    assert not tokens.is_token("k8e-" + "0" * 64)


async def test_a_published_key_is_enough_to_check_a_token(ring: Tokens) -> None:
    token, _ = await ring.mint(GRANT)
    keys = jwt.PyJWKSet(await ring.signer.published())
    kid = jwt.get_unverified_header(token)["kid"]
    undated: Any = {"verify_iat": False, "verify_nbf": False, "verify_exp": False}
    found = jwt.decode(token, keys[kid].key, ["EdDSA"], audience="k8e-rest", options=undated)
    assert (found["sub"], found["sandbox_id"]) == ("ada", "sess-1")


async def test_a_published_key_is_described_once_however_often_it_is_asked_for(
    ring: Tokens, clock: Clock
) -> None:
    [first] = await ring.signer.published()
    [again] = await ring.signer.published()
    assert first is again
    assert isinstance(ring.signer, KeyRing)
    kid = await ring.signer.rotate(at_once=True)
    assert [key["kid"] for key in await ring.signer.published()] == [kid]


async def test_a_token_is_good_between_its_dates_only(ring: Tokens, clock: Clock) -> None:
    token, grant = await ring.mint(GRANT, 60)
    began = clock.now
    clock.now = began - LEEWAY
    await ring.verify(token, "k8e-rest")  # a clock that is a little behind
    clock.now = began - LEEWAY - 1
    assert "not valid yet" in await refusal(ring, token)
    clock.now = grant.expires_at + LEEWAY - 1
    await ring.verify(token, "k8e-rest")
    clock.now = grant.expires_at + LEEWAY + 1
    assert "expired" in await refusal(ring, token)


async def test_a_token_for_another_audience_is_refused(ring: Tokens) -> None:
    token, _ = await ring.mint(replace(GRANT, audience="backend"))
    await ring.verify(token, "backend")
    assert "another audience" in await refusal(ring, token)


@pytest.mark.parametrize("algorithm", ["none", "None", "NONE", "HS256", "RS256", "ES256", "", 7])
async def test_the_header_cannot_choose_the_algorithm(ring: Tokens, algorithm: Any) -> None:
    token, _ = await ring.mint(GRANT)
    assert await refusal(ring, forged(token, {"alg": algorithm}))
    head, payload, _ = forged(token, {"alg": algorithm}).split(".")
    assert await refusal(ring, f"{head}.{payload}.")


async def test_the_public_key_is_no_secret_for_hmac(ring: Tokens) -> None:
    token, grant = await ring.mint(GRANT)
    kid = jwt.get_unverified_header(token)["kid"]
    [known] = await ring.signer.published()
    raw = base64.urlsafe_b64decode(known["x"] + "=")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    pem = Ed25519PublicKey.from_public_bytes(raw).public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    import hashlib
    import hmac

    for secret in (raw, pem, pem.strip(), known["x"].encode()):
        unsigned = f"{part({'alg': 'HS256', 'kid': kid, 'typ': 'JWT'})}.{part(grant.claims())}"
        digest = hmac.digest(secret, unsigned.encode(), hashlib.sha256)
        shown = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        assert "EdDSA" in await refusal(ring, f"{unsigned}.{shown}")


@pytest.mark.parametrize(
    "kid",
    ["", "../../../dev/null", "x' UNION SELECT 'k", "a" * 65, "unknownkey", None, 7, ["a"], {}],
)
async def test_a_key_id_only_ever_finds_a_key_of_ours(ring: Tokens, kid: Any) -> None:
    token, _ = await ring.mint(GRANT)
    assert await refusal(ring, forged(token, {"kid": kid}))


@pytest.mark.parametrize("name", ["jwk", "jku", "x5u", "x5c"])
async def test_a_key_that_a_token_brings_along_is_not_used(
    ring: Tokens, store: SqliteTokenStore, tmp_path: Path, clock: Clock, name: str
) -> None:
    theirs = SqliteTokenStore(tmp_path / "theirs.db")
    try:
        other = Tokens(KeyRing(theirs, now=clock), theirs, now=clock)
        token, grant = await other.mint(GRANT)
        await ring.mint(GRANT)
        [ours] = await store.keys()
        [key] = await other.signer.published()
        brought = {"jwk": key, "jku": "https://evil.example/jwks.json", "x5u": "x", "x5c": ["x"]}
        private, _ = await other.signer.sign_with()
        mixed = jwt.encode(grant.claims(), private, "EdDSA", {"kid": ours.kid, name: brought[name]})
        assert "ignature" in await refusal(ring, mixed)
        assert "no key of ours" in await refusal(ring, token)
    finally:
        theirs.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sandbox_id", "sess-2"),
        ("user_id", "eve"),
        ("operations", ["destroy_session"]),
        ("exp", 9e9),
    ],
)
async def test_changed_claims_have_no_good_signature(ring: Tokens, name: str, value: Any) -> None:
    token, grant = await ring.mint(GRANT)
    assert "ignature" in await refusal(ring, forged(token, {}, grant.claims() | {name: value}))


@pytest.mark.parametrize(
    "change",
    [
        {"operations": "exec"},
        {"operations": [1]},
        {"sandbox_id": ""},
        {"sandbox_id": 7},
        {"exp": 1_800_000_000 + 10 * MAX_TTL},
        {"exp": True},
        {"exp": float("inf")},
        {"iat": "now"},
        {"nbf": None},
        {"iss": "somebody"},
        {"aud": ["k8e-rest", "other"]},
        {"jti": ""},
    ],
    ids=str,
)
async def test_signed_claims_are_checked_all_the_same(ring: Tokens, change: dict[str, Any]) -> None:
    _, grant = await ring.mint(GRANT)
    key, kid = await ring.signer.sign_with()
    token = jwt.encode(grant.claims() | change, key, "EdDSA", {"kid": kid})
    assert await refusal(ring, token)


@pytest.mark.parametrize("claim", ["iss", "aud", "sub", "iat", "nbf", "exp", "jti", "sandbox_id"])
async def test_no_claim_may_be_missing(ring: Tokens, claim: str) -> None:
    _, grant = await ring.mint(GRANT)
    key, kid = await ring.signer.sign_with()
    claims = grant.claims()
    del claims[claim]
    assert await refusal(ring, jwt.encode(claims, key, "EdDSA", {"kid": kid}))


@pytest.mark.parametrize(
    "text", ["", "a.b.c", "ey.ey.ey", "é.é.é", "ey" + "a" * 5000 + ".b.c", "..."]
)
async def test_what_is_no_token_is_refused(ring: Tokens, text: str) -> None:
    assert await refusal(ring, text)


@pytest.mark.parametrize(
    ("name", "others_too"),
    [
        (tokens.subject("sandbox", GRANT.owner, "sess-1"), False),
        (tokens.subject("conversation", GRANT.owner, "acme", "c-1"), False),
        (tokens.subject("user", GRANT.owner, "acme", "ada"), True),
        (tokens.subject("owner", GRANT.owner), True),
        (tokens.EVERYTHING, True),
    ],
)
async def test_revoked_tokens_are_refused_and_later_ones_are_good(
    ring: Tokens, clock: Clock, name: str, others_too: bool
) -> None:
    token, _ = await ring.mint(GRANT)
    neighbour, _ = await ring.mint(replace(GRANT, conversation_id="c-2", sandbox_id="sess-2"))
    clock.now += 1
    await ring.revoke(name)
    assert "revoked" in await refusal(ring, token)
    if others_too:
        assert "revoked" in await refusal(ring, neighbour)
    else:
        await ring.verify(neighbour, "k8e-rest")
    clock.now += 1
    later, _ = await ring.mint(GRANT)
    await ring.verify(later, "k8e-rest")


async def test_one_token_can_be_revoked(ring: Tokens, clock: Clock) -> None:
    (token, grant), (other, _) = await ring.mint(GRANT), await ring.mint(GRANT)
    await ring.revoke(tokens.subject("token", grant.token_id))
    assert "revoked" in await refusal(ring, token)
    await ring.verify(other, "k8e-rest")


def test_names_in_subjects_cannot_be_moved_from_one_to_the_next() -> None:
    assert tokens.subject("user", "a/1:b", "c") != tokens.subject("user", "a", "b/1:c")
    assert tokens.subject("user", "ab", "c") != tokens.subject("user", "a", "bc")


# Keys that follow each other.


async def test_a_new_key_is_published_before_it_signs(
    ring: Tokens, store: SqliteTokenStore, clock: Clock
) -> None:
    old, _ = await ring.mint(GRANT, MAX_TTL)
    clock.now += ROTATE_SECONDS
    before, _ = await ring.mint(GRANT)
    first, second = await store.keys()
    assert [key["kid"] for key in await ring.signer.published()] == [first.kid, second.kid]
    assert jwt.get_unverified_header(before)["kid"] == first.kid
    clock.now += PUBLISH_SECONDS
    after, _ = await ring.mint(GRANT)
    assert jwt.get_unverified_header(after)["kid"] == second.kid
    await ring.verify(before, "k8e-rest")
    assert "expired" in await refusal(ring, old)
    clock.now += ROTATE_SECONDS
    await ring.mint(GRANT)
    assert (await store.keys())[0].kid == second.kid  # the first is of no more use


async def test_gateways_of_one_store_make_one_key(store: SqliteTokenStore, clock: Clock) -> None:
    rings = [Tokens(KeyRing(store, now=clock), store, now=clock) for _ in range(3)]
    minted = [await ring.mint(GRANT) for ring in rings]
    assert len(await store.keys()) == 1
    for ring in rings:
        for token, _ in minted:
            await ring.verify(token, "k8e-rest")


async def test_a_stolen_key_can_be_replaced_at_once(
    ring: Tokens, store: SqliteTokenStore, clock: Clock
) -> None:
    token, _ = await ring.mint(GRANT)
    assert isinstance(ring.signer, KeyRing)
    kid = await ring.signer.rotate(at_once=True)
    assert "no key of ours" in await refusal(ring, token)
    later, _ = await ring.mint(GRANT)
    assert jwt.get_unverified_header(later)["kid"] == kid
    assert [key.kid for key in await store.keys()] == [kid]


# By a shared secret.


async def test_with_a_shared_secret_tokens_are_hs256_and_no_key_is_published(
    store: SqliteTokenStore, clock: Clock
) -> None:
    made = Tokens(SharedSecret(SECRET), store, now=clock)
    token, _ = await made.mint(GRANT)
    assert jwt.get_unverified_header(token)["alg"] == "HS256"
    assert (await made.verify(token, "k8e-rest")).sandbox_id == "sess-1"
    assert await made.signer.published() == []
    assert await refusal(made, forged(token, {"kid": "/dev/null"}))
    assert await refusal(made, jwt.encode(GRANT.claims(), "x" * 40, "HS256"))
    assert await refusal(Tokens(KeyRing(store, now=clock), store, now=clock), token)
    ours, _ = await Tokens(KeyRing(store, now=clock), store, now=clock).mint(GRANT)
    assert await refusal(made, ours)


@pytest.mark.parametrize(
    "secret",
    ["", "short", "change-me-in-production", "CHANGE_ME_IN_PRODUCTION", "a" * 64, "ab" * 32,
     "secret" * 8, "change-me-in-production" * 2, "x" * 31],
)  # fmt: skip
def test_a_signing_key_that_can_be_guessed_is_refused(secret: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="anybody could make tokens"):
        tokens.check_secret(secret)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1h", 3600), ("90m", 5400), ("1h30m", 5400), ("3600", 3600), ("120s", 120), ("24h", 86400)],
)
def test_a_ttl_is_written_as_the_kit_does(text: str, seconds: float) -> None:
    assert tokens.parse_ttl(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "1", "25h", "1d", "-1h", "h", "1h 30m", "٣h"])
def test_other_ttls_are_refused(text: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="TOKEN_TTL"):
        tokens.parse_ttl(text)


async def test_a_token_never_lives_longer_than_revocations_are_kept(ring: Tokens) -> None:
    for ttl in (MAX_TTL + 1, -1, float("nan")):
        with pytest.raises(errors.InvalidRequest, match="at most 24 hours"):
            await ring.mint(GRANT, ttl)


def test_a_narrower_token_allows_no_more_than_the_one_before() -> None:
    allowed = frozenset({"exec", "read"})
    assert tokens.narrowed(allowed, None) == allowed
    assert tokens.narrowed(allowed, ["read"]) == {"read"}
    with pytest.raises(errors.InvalidRequest, match="cannot allow 'write'"):
        tokens.narrowed(allowed, ["read", "write"])
