"""Who may talk to the HTTP server: each request is judged by itself. Pure functions.

A page in the user's browser can reach every port of this machine, and so can a name that leads to
it. So a request must come from no foreign page, name us as we are called, and bring the token.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

LOCAL = ("localhost", "127.0.0.1", "[::1]")
BEARER = "bearer "


@dataclass(frozen=True)
class Door:
    """What the server knows of itself."""

    token: str
    names: frozenset[str]
    """Host names and addresses, without ports, by which it may be called."""
    any_address: bool = False
    """It listens on all addresses: then any bare address may be ours, though no name."""

    @classmethod
    def of(cls, token: str, host: str, more: Iterable[str] = ()) -> Door:
        everywhere = host in ("0.0.0.0", "::", "[::]")  # noqa: S104 - compared, not bound
        names = {_plain(name) for name in (*LOCAL, *more)}
        names |= set() if everywhere else {_plain(host)}
        return cls(token, frozenset(names), everywhere)


@dataclass(frozen=True)
class Refusal:
    """Not let in, and why."""

    status: int
    text: str


def judge(door: Door, headers: Iterable[tuple[bytes, bytes]]) -> Refusal | None:
    """Why a request is refused; None if it may pass."""
    found: dict[str, list[str]] = {}
    for name, value in headers:
        found.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    hosts = found.get("host", [])
    if len(hosts) != 1 or not _is_ours(door, hosts[0]):
        return Refusal(
            421, "This server is not called by that name; --http-host NAME makes it known."
        )
    if any(not _is_own_page(door, origin) for origin in found.get("origin", [])):
        return Refusal(403, "Pages of other sites may not use this server.")
    if not _has_token(door, found.get("authorization", [])):
        return Refusal(
            401, "The token is missing or wrong; send it as: Authorization: Bearer TOKEN"
        )
    return None


def _is_ours(door: Door, host: str) -> bool:
    name = _plain(_without_port(host))
    return name in door.names or (door.any_address and _is_address(name))


def _is_own_page(door: Door, origin: str) -> bool:
    """A page that we or a local tool serve; anything else, and ``null``, is foreign."""
    scheme, found, rest = origin.partition("://")
    return bool(found) and scheme in ("http", "https") and _is_ours(door, rest)


def _has_token(door: Door, values: list[str]) -> bool:
    if len(values) != 1 or not values[0].lower().startswith(BEARER):
        return False
    shown = values[0][len(BEARER) :].strip()
    return hmac.compare_digest(shown.encode("latin-1"), door.token.encode("ascii"))


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.rpartition(":")[0] if ":" in host else host


def _plain(name: str) -> str:
    return name.strip().lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
