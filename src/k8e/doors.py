"""Who may talk to an HTTP server of ours: each request is judged by itself. Pure functions.

A page in the user's browser can reach every port of this machine, and so can a name that leads to
it. So a request must come from no foreign page, name us as we are called, and bring the token.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

Headers = Iterable[tuple[bytes, bytes]]
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
    hint: str = "--http-host NAME makes it known"
    """How to make another name ours."""

    @classmethod
    def of(cls, token: str, host: str, more: Iterable[str] = ()) -> Door:
        everywhere = host in ("0.0.0.0", "::", "[::]")  # noqa: S104 - compared, not bound
        names = {_plain(name) for name in (*LOCAL, *more)}
        names |= set() if everywhere else {_plain(host)}
        return cls(token, frozenset(names), everywhere)

    def opens(self, shown: str) -> bool:
        """Whether this is the token; the time that it takes tells nothing about it."""
        return hmac.compare_digest(shown.encode("utf-8"), self.token.encode("ascii"))


@dataclass(frozen=True)
class Refusal:
    """Not let in, and why."""

    status: int
    text: str


UNKNOWN = Refusal(401, "The token is missing or wrong; send it as: Authorization: Bearer TOKEN")


def judge(door: Door, headers: Headers) -> Refusal | None:
    """Why a request is refused; None if it may pass."""
    headers = list(headers)
    if (refusal := judge_place(door, headers)) is not None:
        return refusal
    return None if door.opens(credential(headers)) else UNKNOWN


def judge_place(door: Door, headers: Headers) -> Refusal | None:
    """The same without the token: whom a request is for, and whose page sends it."""
    headers = list(headers)
    hosts = _values(headers, b"host")
    if len(hosts) != 1 or not _is_ours(door, hosts[0]):
        return Refusal(421, f"This server is not called by that name; {door.hint}.")
    if any(not _is_own_page(hosts[0], origin) for origin in _values(headers, b"origin")):
        return Refusal(403, "Pages of other sites may not use this server.")
    return None


def credential(headers: Headers) -> str:
    """What a request shows as its bearer; empty if that is nothing, or more than one thing."""
    values = _values(headers, b"authorization")
    if len(values) != 1 or not values[0].lower().startswith(BEARER):
        return ""
    return values[0][len(BEARER) :].strip()


def _values(headers: Headers, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key.lower() == name]


def _is_ours(door: Door, host: str) -> bool:
    name = _plain(_without_port(host))
    return name in door.names or (door.any_address and _is_address(name))


def _is_own_page(host: str, origin: str) -> bool:
    """A page of the very server that is asked.

    One of another port is not: behind that may be the service of a sandbox.
    """
    scheme, found, rest = origin.partition("://")
    return bool(found) and scheme in ("http", "https") and _plain(rest) == _plain(host)


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
