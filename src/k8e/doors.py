"""Who may talk to an HTTP server of ours: each request is judged by itself. Pure functions.

A page in the user's browser can reach every port of this machine, and so can a name that leads to
it. So a request must come from no foreign page, name us as we are called, and bring the token.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

Headers = Iterable[tuple[bytes, bytes]]
LOCAL = ("localhost", "127.0.0.1", "[::1]")
BEARER = "bearer "
_AUTHORITY = re.compile(r"([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?", re.ASCII)
_OWN_SITE = ("same-origin", "none")


@dataclass(frozen=True)
class Door:
    """What the server knows of itself."""

    token: str = field(repr=False)
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
        # As a Host header has them.
        names = {f"[{name}]" if ":" in name and name[0] != "[" else name for name in names}
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
    host = host_of(headers)
    if not _is_ours(door, host):
        return Refusal(421, f"This server is not called by that name; {door.hint}.")
    if is_foreign(headers, host):
        return Refusal(403, "Pages of other sites may not use this server.")
    return None


def host_of(headers: Headers) -> str:
    """The host, and mostly the port, that a request is for; empty if it does not name just one."""
    hosts = _values(headers, b"host")
    return hosts[0] if len(hosts) == 1 else ""


def is_foreign(headers: Headers, host: str, schemes: Iterable[str] = ("http", "https")) -> bool:
    """Whether a browser sent this for a page of another origin than ``host``.

    A page cannot forge these headers; programs other than browsers send none of them.
    """
    headers = list(headers)
    sites = _values(headers, b"sec-fetch-site")
    if any(site not in _OWN_SITE for site in sites):
        return True
    own = [f"{scheme}://{_plain(host)}" for scheme in schemes]
    if sites == ["same-origin"]:
        own.append("null")  # a form of a page that hides its address has no origin
    # One of another port is another: behind that may be the service of a sandbox.
    return any(_plain(origin) not in own for origin in _values(headers, b"origin"))


def credential(headers: Headers) -> str:
    """What a request shows as its bearer; empty if that is nothing, or more than one thing."""
    values = _values(headers, b"authorization")
    if len(values) != 1 or not values[0].lower().startswith(BEARER):
        return ""
    return values[0][len(BEARER) :].strip()


def _values(headers: Headers, name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for key, value in headers if key.lower() == name]


def _is_ours(door: Door, host: str) -> bool:
    found = _AUTHORITY.fullmatch(host.lower())
    name = _plain(found[1]) if found is not None else ""
    return bool(name) and (name in door.names or (door.any_address and _is_address(name)))


def is_loopback(host: str) -> bool:
    """Whether a host, without a port, is this machine and can only be reached from it."""
    name = host.lower().strip("[]")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _plain(name: str) -> str:
    return name.strip().lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
