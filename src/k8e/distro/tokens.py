"""Tokens with which machines join: they pin the cluster's authority and live as long as asked.

The text is ``K10`` + SHA-256 of the authority's certificate + ``::`` + a bootstrap token of
Kubernetes, which is a Secret in ``kube-system`` and removed by the cluster when it has expired.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import re
import secrets
import string
from dataclasses import dataclass

from k8e import errors
from k8e.distro import certificates
from k8e.distro.layout import Layout, write_private
from k8e.kubernetes.api import Api, ApiError, Object, section

PREFIX = "K10"
NODE_TOKEN = "the token in server/node-token"  # noqa: S105 - a description
GROUP = "system:bootstrappers:k8e:node"
_BARE = re.compile(r"([a-z0-9]{6})\.([a-z0-9]{16})")
_FULL = re.compile(r"K10([0-9a-f]{64})::([a-z0-9]{6}\.[a-z0-9]{16})")
_ALPHABET = string.ascii_lowercase + string.digits
_SECRETS = "/api/v1/namespaces/kube-system/secrets"
_LIFETIME = re.compile(r"(\d+)([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class Token:
    """A token in its parts."""

    authority: str
    """Fingerprint of the cluster's server authority."""
    bare: str
    """The bootstrap token, ``id.secret``."""

    @property
    def id(self) -> str:
        return self.bare.partition(".")[0]

    def __str__(self) -> str:
        return f"{PREFIX}{self.authority}::{self.bare}"


def parse(text: str) -> Token:
    """A token as users give it; an error that does not repeat the secret."""
    found = _FULL.fullmatch(text.strip())
    if found is None:
        what = "no token was given" if not text.strip() else "the token is malformed"
        raise errors.InvalidRequest(
            f"{what}: it is {PREFIX}, 64 hexadecimal digits, '::', and ID.SECRET",
            hint="copy all of /var/lib/k8e/server/node-token, or use k8e token create",
        )
    return Token(found[1], found[2])


def bare(text: str) -> str:
    """The bootstrap token that a server was told to use, with or without a fingerprint."""
    found = _FULL.fullmatch(text) or _BARE.fullmatch(text)
    if found is None:
        raise errors.InvalidRequest(
            "the server's token is malformed: it is ID.SECRET, 6 and 16 small letters and digits",
            hint="leave --token and K8E_TOKEN away, and the server makes one",
        )
    return found[2] if found.re is _FULL else text


def new_bare() -> str:
    return ".".join("".join(secrets.choice(_ALPHABET) for _ in range(size)) for size in (6, 16))


def parse_lifetime(text: str) -> int:
    """Seconds of ``30m``, ``24h``, ``7d``; 0 for a token that does not expire."""
    found = _LIFETIME.fullmatch(text)
    if text == "0":
        return 0
    if found is None or not int(found[1]):
        raise errors.InvalidRequest(
            f"{text!r} is no lifetime", hint="use 30m, 24h or 7d, or 0 for one that never ends"
        )
    return int(found[1]) * _UNITS[found[2]]


def secret(token: str, *, lifetime: int = 0, description: str = "") -> Object:
    """The Secret of a bootstrap token."""
    token_id, _, value = token.partition(".")
    data = {
        "token-id": token_id,
        "token-secret": value,
        "description": description,
        "usage-bootstrap-authentication": "true",
        "auth-extra-groups": GROUP,
    }
    if lifetime:
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=lifetime)
        data["expiration"] = end.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"bootstrap-token-{token_id}", "namespace": "kube-system"},
        "type": "bootstrap.kubernetes.io/token",
        "stringData": data,
    }


async def create(api: Api, authority: str, *, lifetime: int, description: str = "") -> Token:
    made = new_bare()
    await api.call("POST", _SECRETS, secret(made, lifetime=lifetime, description=description))
    return Token(authority, made)


async def listing(api: Api) -> list[dict[str, str]]:
    """All tokens without their secrets: id, description, when they expire."""
    query = "?fieldSelector=type%3Dbootstrap.kubernetes.io%2Ftoken"
    found: list[dict[str, str]] = []
    for item in await api.list(_SECRETS + query):
        data = {  # whoever may write Secrets may have written nonsense
            name: base64.b64decode(value).decode("utf-8", "replace")
            for name, value in section(item, "data").items()
        }
        found.append(
            {
                "id": data.get("token-id", ""),
                "description": data.get("description", ""),
                "expires": data.get("expiration", "never"),
            }
        )
    return found


async def delete(api: Api, token_id: str) -> None:
    """Remove a token; who has joined with it stays."""
    wanted = token_id.partition(".")[0]
    if not re.fullmatch(r"[a-z0-9]{6}", wanted):
        raise errors.InvalidRequest(
            "that is no id of a token", hint="k8e token list shows the ids, of six characters"
        )
    try:
        await api.call("DELETE", f"{_SECRETS}/bootstrap-token-{wanted}")
    except ApiError as error:
        if error.status != 404:
            raise
        raise errors.InvalidRequest(
            f"there is no token {wanted}", hint="k8e token list shows those that there are"
        ) from None


def own_authority(layout: Layout) -> str:
    """The fingerprint that tokens of this server pin."""
    return certificates.fingerprint(certificates.read(layout.tls / "server-ca.crt"))


async def rotate(api: Api, layout: Layout) -> Token:
    """Replace the server's own token; whoever has joined stays."""
    made = Token(own_authority(layout), new_bare())
    await api.apply(secret(made.bare, description=NODE_TOKEN))
    write_private(layout.node_token, f"{made}\n")
    await retire_others(api, made.id)
    return made


async def retire_others(api: Api, own: str) -> None:
    """Delete what was the server's own token before, also if a rotation was interrupted."""
    for found in await listing(api):
        if found["description"] == NODE_TOKEN and found["id"] not in ("", own):
            with contextlib.suppress(errors.InvalidRequest):  # it is gone, or is none
                await delete(api, found["id"])
