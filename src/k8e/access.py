"""Access to HTTP servers of ours: allowed hosts and origins, tokens, addresses of clients.

A page in the user's browser can reach every port of this machine, and so can a name that leads to
it. So a request must come from no foreign page, name us as we are called, and bring the token.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from k8e import errors, system

Headers = Iterable[tuple[bytes, bytes]]
LOCAL = ("localhost", "127.0.0.1", "[::1]")
BEARER = "bearer "
_AUTHORITY = re.compile(r"([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?", re.ASCII)
_OWN_SITE = ("same-origin", "none")


@dataclass(frozen=True)
class HostPolicy:
    """The names and addresses by which a server may be called."""

    token: str = field(repr=False)
    names: frozenset[str]
    """Host names and addresses, without ports, by which it may be called."""
    any_address: bool = False
    """It listens on all addresses: then any bare address may be ours, though no name."""
    hint: str = "--http-host NAME makes it known"
    """How to make another name ours."""

    @classmethod
    def of(cls, token: str, host: str, more: Iterable[str] = ()) -> HostPolicy:
        everywhere = host in ("0.0.0.0", "::", "[::]")  # noqa: S104 - compared, not bound
        names = {_plain(name) for name in (*LOCAL, *more)}
        names |= set() if everywhere else {_plain(host)}
        # As a Host header has them.
        names = {f"[{name}]" if ":" in name and name[0] != "[" else name for name in names}
        return cls(token, frozenset(names), everywhere)

    def opens(self, shown: str) -> bool:
        """Whether this is the token; the time of the comparison reveals nothing about it."""
        return hmac.compare_digest(shown.encode("utf-8"), self.token.encode("ascii"))


@dataclass(frozen=True)
class HostRefusal:
    """Not let in, and why."""

    status: int
    text: str


UNKNOWN = HostRefusal(401, "The token is missing or wrong; send it as: Authorization: Bearer TOKEN")


def judge(door: HostPolicy, headers: Headers) -> HostRefusal | None:
    """Why a request is refused; None if it may pass."""
    headers = list(headers)
    if (refusal := judge_place(door, headers)) is not None:
        return refusal
    return None if door.opens(credential(headers)) else UNKNOWN


def judge_place(door: HostPolicy, headers: Headers) -> HostRefusal | None:
    """The same without the token: checks the host, and the page that sends the request."""
    headers = list(headers)
    host = host_of(headers)
    if not _is_ours(door, host):
        return HostRefusal(421, f"This server is not called by that name; {door.hint}.")
    if is_foreign(headers, host):
        return HostRefusal(403, "Pages of other sites may not use this server.")
    return None


def host_of(headers: Headers) -> str:
    """The host, usually with a port, that a request names; empty if it is not exactly one."""
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
    # Another port is another origin: behind it may be the service of a sandbox.
    return any(_plain(origin) not in own for origin in _values(headers, b"origin"))


def credential(headers: Headers) -> str:
    """The bearer credential of a request; empty if there is none, or more than one."""
    values = _values(headers, b"authorization")
    if len(values) != 1 or not values[0].lower().startswith(BEARER):
        return ""
    return values[0][len(BEARER) :].strip()


def content_type(headers: Headers) -> str:
    """The type of a request's body, without parameters; empty if it names none."""
    found = _values(headers, b"content-type")
    return found[0].partition(";")[0].strip().lower() if found else ""


def _values(headers: Headers, name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for key, value in headers if key.lower() == name]


def _is_ours(door: HostPolicy, host: str) -> bool:
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


VARIABLE = "K8E_SANDBOX_MCP_TOKEN"
FILE_VARIABLE = "K8E_SANDBOX_MCP_TOKEN_FILE"
MIN_LENGTH = 16
MAX_LENGTH = 4096


def default_file() -> Path:
    given = os.environ.get(FILE_VARIABLE)
    try:
        return Path(given) if given else Path.home() / ".k8e" / "sandbox" / "mcp-token"
    except RuntimeError:
        raise errors.InvalidRequest(
            "there is no home folder for the token", hint=f"name a file with {FILE_VARIABLE}"
        ) from None


def token(file: Path | None = None) -> str:
    """The token of the environment, or of the file, which is made if it is missing."""
    given = os.environ.get(VARIABLE)
    if given and file is None:
        return _checked(given, f"the variable {VARIABLE}")
    path = file or default_file()
    try:
        return _read(path)
    except FileNotFoundError:
        return _make(path)
    except OSError as error:
        raise errors.InvalidRequest(
            f"the token in {path} cannot be read: {error.strerror}",
            hint=f"remove it, or name another file with {FILE_VARIABLE}",
        ) from None


def _read(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "r", encoding="ascii", errors="replace") as opened:
        info = os.fstat(descriptor)
        others = stat.S_IMODE(info.st_mode) & 0o077
        if info.st_uid != os.geteuid() or others:
            raise errors.Denied(
                f"other users can read the token in {path}, or it is not yours",
                hint=f"remove it, or make it yours alone: chmod 600 {path}",
            )
        return _checked(opened.read(MAX_LENGTH).strip(), str(path))


def _make(path: Path) -> str:
    """Make a token; of two that start at once, both have the one that came first."""
    made = secrets.token_urlsafe(32)
    try:
        if not system.add_file(path, f"{made}\n".encode()):
            return _read(path)
    except OSError as error:
        raise errors.InvalidRequest(
            f"the token cannot be kept in {path}: {error.strerror}",
            hint=f"name another file with {FILE_VARIABLE}",
        ) from None
    return made


def _checked(found: str, where: str) -> str:
    if len(found) < MIN_LENGTH or not found.isascii() or not found.isprintable() or " " in found:
        raise errors.InvalidRequest(
            f"{where} holds no token of at least {MIN_LENGTH} plain characters",
            hint="remove it; a new token is made at the next start",
        )
    return found


Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_HOST_BITS = {4: 32, 6: 64}  # of a prefix that belongs to one host
_RANGE_BITS = {4: 24, 6: 48}  # … and of one that belongs to one network


def group(address: str) -> str:
    """The group of one host. With IPv6 a host has a whole /64 to choose its addresses from."""
    return _network(address, _HOST_BITS)


def span(address: str) -> str:
    """The group of one network: the addresses of one attacker are mostly in a few networks."""
    return _network(address, _RANGE_BITS)


def is_local_address(address: str) -> bool:
    """Whether an address belongs to this machine."""
    parsed = _parse(address)
    return parsed is not None and parsed.is_loopback


def _parse(address: str) -> Address | None:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    # A listener for both kinds writes IPv4 addresses in the form of IPv6.
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return mapped or parsed


def _network(address: str, bits: dict[int, int]) -> str:
    parsed = _parse(address)
    if parsed is None:
        return address[:64]
    network = ipaddress.ip_network((parsed, bits[parsed.version]), strict=False)
    return str(parsed) if network.num_addresses == 1 else str(network)
