"""Tokens of conversations over REST: what they allow, where they are found, and every attack."""

from __future__ import annotations

import base64
import contextlib
import json
import time
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import httpx2
import jwt
import pytest

from k8e.auth.token_store import SqliteTokenStore
from k8e.auth.tokens import LEEWAY, REST_AUDIENCE, Grant, KeyRing, Tokens, read_claims
from tests.rest import gateways
from tests.rest.gateways import Rest

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]


@contextlib.contextmanager
def keys_of(rest: Rest) -> Generator[SqliteTokenStore]:
    """The gateway's own signing keys, for tokens that nobody but it could sign."""
    store = SqliteTokenStore(rest.gateway.place.data / "tokens.db")
    try:
        yield store
    finally:
        store.close()


def grant_in(token: str) -> Grant:
    return read_claims(jwt.decode(token, options={"verify_signature": False}))


async def signed(rest: Rest, grant: Grant, *, shift: float = 0, ttl: float = 600) -> str:
    """A token with the gateway's key, by a clock that is so many seconds ahead of ours."""
    with keys_of(rest) as store:
        minting = Tokens(KeyRing(store), store, now=lambda: time.time() + shift)
        return (await minting.mint(grant, ttl)).token


async def test_a_token_is_good_for_its_own_sandbox_and_what_it_allows(rest: Rest) -> None:
    made, other = rest.open("own"), rest.open("other")
    mine = rest.with_token(made["token"])
    place = f"/sandbox/{made['sandbox_id']}"
    assert mine.told("GET", place)["conversation_id"] == "own"
    assert mine.run(made["sandbox_id"], "echo hello")["stdout"] == "hello\n"
    for method, path in (
        ("GET", f"/sandbox/{other['sandbox_id']}"),
        ("GET", "/sandbox"),
        ("DELETE", place),
        ("POST", f"{place}/pause"),
        ("DELETE", f"{place}/token"),
    ):
        told = mine.refused(401, method, path)
        assert told["code"] == "token_refused"
        [row] = gateways.rows(rest.gateway, told["request_id"])
        assert (row["action"], row["outcome"]) == ("call.refused", "denied")
        assert row["via"] == "conversation-token"
    exec_there = f"/sandbox/{other['sandbox_id']}/exec"
    assert mine.refused(401, "POST", exec_there, {"command": "true"})["code"] == "token_refused"
    body = {"user_id": "ada", "conversation_id": "third"}
    assert mine.refused(401, "POST", "/sandbox", body)["code"] == "token_refused"
    # Of the HTTP endpoint's other dialects, none takes it.
    bearer = {"authorization": f"Bearer {made['token']}"}
    for path in ("/mcp", "/metrics", "/a2a"):
        assert rest.http.post(path, json={}, headers=bearer).status_code == 401


async def test_a_token_is_renewed_and_narrowed_but_never_widened(rest: Rest) -> None:
    made = rest.open("narrow")
    place = f"/sandbox/{made['sandbox_id']}"
    mine = rest.with_token(made["token"])
    narrow = mine.told("POST", f"{place}/token", {"operations": ["get_session", "issue_token"]})
    less = rest.with_token(narrow["token"])
    less.told("GET", place)
    less.refused(401, "POST", f"{place}/exec", {"command": "true"})
    again = less.told("POST", f"{place}/token", {})
    assert again["operations"] == ["get_session", "issue_token"]
    assert less.refused(400, "POST", f"{place}/token", {"operations": ["exec"]})["hint"]
    assert rest.refused(400, "POST", f"{place}/token", {"operations": ["create_api_key"]})
    backend = mine.told("POST", f"{place}/token", {"audience": "my-backend"})["token"]
    assert "another audience" in rest.with_token(backend).refused(401, "GET", place)["detail"]
    keys = rest.http.get("/.well-known/jwks.json", headers={"authorization": "nothing"}).json()
    key = jwt.PyJWKSet.from_dict(keys)[jwt.get_unverified_header(backend)["kid"]]
    assert jwt.decode(backend, key.key, ["EdDSA"], audience="my-backend")["user_id"] == "ada"


def _part(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


async def _attacks(rest: Rest, token: str) -> dict[str, str]:
    """Tokens that are not good, by what is wrong with them."""
    grant = grant_in(token)
    header = jwt.get_unverified_header(token)
    head, claims, signature = token.split(".")
    public = rest.http.get("/.well-known/jwks.json").json()["keys"][0]["x"]
    with keys_of(rest) as store:
        private, kid = await KeyRing(store).sign_with()
    moved = grant.claims() | {"sandbox_id": "x"}
    foreign = await signed(rest, replace(grant, owner="key:somebody:id-x"))
    return {
        "expired": await signed(rest, grant, shift=-600 - LEEWAY - 5),
        "not valid yet": await signed(rest, grant, shift=3600),
        "of a clock that is ahead": await signed(rest, grant, shift=LEEWAY + 30),
        "for another audience": await signed(rest, replace(grant, audience="backend")),
        "for nobody": await signed(rest, replace(grant, audience="")),
        "alg none": f"{_part({**header, 'alg': 'none'})}.{claims}.",
        "alg NONE with a signature": f"{_part({**header, 'alg': 'NONE'})}.{claims}.{signature}",
        "alg RS256": f"{_part({**header, 'alg': 'RS256'})}.{claims}.{signature}",
        "HS256 with the public key": jwt.encode(grant.claims(), public, "HS256", {"kid": kid}),
        "HS256 without a key id": jwt.encode(grant.claims(), public, "HS256"),
        "kid of a file": f"{_part({**header, 'kid': '../../../../dev/null'})}.{claims}.{signature}",
        "kid of SQL": f"{_part({**header, 'kid': chr(39) + ' OR 1=1 --'})}.{claims}.{signature}",
        "no kid": f"{_part({'alg': 'EdDSA', 'typ': 'JWT'})}.{claims}.{signature}",
        "crit": jwt.encode(
            grant.claims(), private, "EdDSA", {"kid": kid, "crit": ["x"], "x": 1}
        ),
        "another sandbox's claims": f"{head}.{_part(moved)}.{signature}",
        "another owner's sandbox": foreign,
        "no signature": f"{head}.{claims}.",
        "half of it": token[: len(token) // 2] + ".." if token.count(".") else token,
    }  # fmt: skip


async def test_no_attack_on_a_token_gets_in_and_each_is_audited(rest: Rest) -> None:
    made = rest.open("attacked")
    place = f"/sandbox/{made['sandbox_id']}"
    # Of our own user: only what shows no credential at all is trusted without one.
    for name, token in (await _attacks(rest, made["token"])).items():
        headers = {"authorization": f"Bearer {token}"}
        answer = rest.http.get(place, headers=headers)
        told = gateways.problem(answer, 401)
        [row] = gateways.rows(rest.gateway, told["request_id"])
        assert (row["action"], row["outcome"]) == ("call.refused", "denied"), name
    assert rest.with_token(made["token"]).told("GET", place)["status"] == "running"


async def test_a_token_ends_with_its_sandbox(rest: Rest) -> None:
    made = rest.open("ends")
    place = f"/sandbox/{made['sandbox_id']}"
    rest.told("DELETE", place)
    told = rest.with_token(made["token"]).refused(401, "GET", place)
    assert told["detail"] in ("it was revoked", "its sandbox has ended")
    with keys_of(rest) as store:
        revoked = await store.issued_before(grant_in(made["token"]).subjects())
    assert revoked > 0  # for gateways that do not know of the end yet


async def test_an_owner_revokes_tokens_and_an_admin_everybodys(rest: Rest) -> None:
    made = rest.open("revoked")
    place = f"/sandbox/{made['sandbox_id']}"
    told = rest.told("DELETE", f"{place}/token")
    assert told["revoked_at"] > 0
    assert rest.with_token(made["token"]).refused(401, "GET", place)["detail"] == "it was revoked"
    later = rest.open("revoked")["token"]
    assert rest.with_token(later).told("GET", place)


def _token_in(rest: Rest, sandbox_id: str) -> str:
    found = rest.run(sandbox_id, "cat /run/k8e/token; echo; printenv SANDBOX_TOKEN")
    assert found["exit_code"] == 0, found
    one, two = found["stdout"].split()
    assert one == two
    return one


async def test_a_sandbox_finds_its_own_token_which_can_do_little(rest: Rest) -> None:
    made = rest.open("inside")
    token = _token_in(rest, made["sandbox_id"])
    grant = grant_in(token)
    assert (grant.sandbox_id, grant.conversation_id) == (made["sandbox_id"], "inside")
    own = rest.with_token(token)
    place = f"/sandbox/{made['sandbox_id']}"
    assert own.told("GET", f"{place}/events")["events"]
    for method, path, body in (
        ("POST", "exec", {"command": "true"}),
        ("POST", "token", {}),
        ("PUT", "egress", {"allowed_hosts": ["open"]}),
    ):
        assert own.refused(401, method, f"{place}/{path}", body)["code"] == "token_refused"
    found = rest.run(
        made["sandbox_id"], "echo x > /run/k8e/token; rm -f /run/k8e/token; ls -l /dev/k8e-token"
    )
    assert "denied" in found["stderr"]
    assert found["stdout"].startswith("-r--------")
    code = {"code": "import os; print(os.environ['SANDBOX_TOKEN'])"}  # an interpreter that waited
    assert rest.told("POST", f"{place}/exec", code)["stdout"].strip() == token


async def test_a_new_token_takes_the_place_of_the_old_one_in_the_sandbox(rest: Rest) -> None:
    made = rest.open("renews")
    before = _token_in(rest, made["sandbox_id"])
    rest.told("DELETE", f"/sandbox/{made['sandbox_id']}/token")
    deadline = time.monotonic() + gateways.PATIENCE
    while (after := _token_in(rest, made["sandbox_id"])) == before:
        assert time.monotonic() < deadline
    place = f"/sandbox/{made['sandbox_id']}"
    assert rest.with_token(after).told("GET", place)
    rest.with_token(before).refused(401, "GET", place)


async def test_nothing_else_has_the_token_of_a_sandbox(rest: Rest) -> None:
    """No sub-agent, no snapshot, no session without a conversation, and no row of ours."""
    place = rest.gateway.place
    made = rest.open("alone")
    sandbox_id = made["sandbox_id"]
    token = _token_in(rest, sandbox_id)
    child = place.json("sandbox", "subagent", sandbox_id)["session_id"]
    plain = place.json("sandbox", "create")["session_id"]
    for session_id in (child, plain):
        found = rest.run(session_id, "printenv SANDBOX_TOKEN; cat /run/k8e/token; env; ls /dev")
        assert "eyJ" not in found["stdout"]
        assert "k8e-token" not in found["stdout"]
    assert rest.told("GET", f"/sandbox/{child}")["conversation_id"] is None
    place.json("sandbox", "snapshot", "save", sandbox_id, "kept")
    for path in place.data.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert token.encode() not in path.read_bytes(), path


async def test_a_weak_signing_key_keeps_a_gateway_from_starting(rest: Rest) -> None:
    for secret in ("change-me-in-production", "short"):
        folder = rest.gateway.place.folder
        done = rest.gateway.place.cli(
            "gateway", "--http", "none", "--data-dir", str(folder / "weak"),
            TOKEN_SIGNING_KEY=secret, K8E_RUN_DIR=str(folder / "weak-r"),
        )  # fmt: skip
        assert done.returncode == 1
        told = done.stderr.decode()
        assert "TOKEN_SIGNING_KEY" in told


async def test_with_a_shared_secret_the_users_backend_can_check_tokens() -> None:
    secret = "between-us-and-nobody-else-0123456789"
    with gateways.started(K8E_TOKEN_SIGNING_KEY=secret, K8E_TOKEN_TTL="90m") as rest:
        made = rest.open("hmac")
        claims = jwt.decode(made["token"], secret, ["HS256"], audience=REST_AUDIENCE)
        assert claims["exp"] - claims["iat"] == pytest.approx(5400, abs=2)
        place = f"/sandbox/{made['sandbox_id']}"
        assert rest.with_token(made["token"]).told("GET", place)
        assert rest.http.get("/.well-known/jwks.json").json() == {"keys": []}
        forged = jwt.encode(claims, "x" * 40, "HS256")
        rest.with_token(forged).refused(401, "GET", place)
        assert isinstance(rest.http, httpx2.Client)


async def test_a_token_ends_with_the_secret_that_the_api_key_had(rest: Rest) -> None:
    made = rest.key("replaced").open("mine")
    mine, place = rest.with_token(made["token"]), f"/sandbox/{made['sandbox_id']}"
    assert mine.told("GET", place)["status"] == "running"
    key = rest.gateway.place.json("sandbox", "api-key", "rotate", "replaced")["key"]
    assert "was replaced" in mine.refused(401, "GET", place)["detail"]
    again = rest.with_token(key).open("mine")
    assert again["sandbox_id"] == made["sandbox_id"]
    assert rest.with_token(again["token"]).told("GET", place)["status"] == "running"
