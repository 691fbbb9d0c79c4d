"""The policy language, the same on every runtime: pure data and pure matching.

A rule is a host name (``example.org``), a wildcard for the names below one (``*.example.org``), or a
network (``192.0.2.0/24``), each with an optional port (``example.org:443``). The presets are
``none`` (no network, no DNS), ``default`` (the package indexes of this host, and GitHub) and
``open`` (every public address).
"""

from __future__ import annotations

import enum
import ipaddress
from dataclasses import dataclass

from k8e import errors

MAX_RULES = 256
MAX_NAME = 253
_LABEL = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Preset(enum.StrEnum):
    """Where a policy starts from."""

    NONE = "none"
    DEFAULT = "default"
    OPEN = "open"


@dataclass(frozen=True)
class Rule:
    """One thing that may be reached."""

    name: str = ""
    """A host name in lower-case ASCII; for a wildcard, the name that it stands below."""
    below: bool = False
    network: Network | None = None
    port: int = 0
    """0 means every port."""
    trusted: bool = False
    """The operator's own: such a name may resolve to a private address."""

    def __str__(self) -> str:
        if self.network is not None:
            text = str(self.network)
            if self.port and self.network.version == 6:
                text = f"[{text}]"
        else:
            text = ("*." if self.below else "") + self.name
        return f"{text}:{self.port}" if self.port else text

    def matches_name(self, name: str) -> bool:
        """Whether ``name`` (normalised) is meant; a wildcard does not mean its own base."""
        if not self.name:
            return False
        return name.endswith("." + self.name) if self.below else name == self.name


def normalise(name: str) -> str:
    """A host name as policies and DNS questions are compared: ASCII, lower case, no final dot."""
    text = name.strip().removesuffix(".")
    try:
        ascii_name = text.encode("ascii").decode() if text.isascii() else _to_ascii(text)
    except UnicodeError:
        raise errors.InvalidRequest(f"{name[:80]!r} is not a host name") from None
    ascii_name = ascii_name.lower()
    labels = ascii_name.split(".")
    for label in labels:
        if not 0 < len(label) <= 63 or not set(label) <= _LABEL:
            raise errors.InvalidRequest(f"{name[:80]!r} is not a host name")
        if label.startswith("-") or label.endswith("-"):
            raise errors.InvalidRequest(f"{name[:80]!r} is not a host name")
    if len(ascii_name) > MAX_NAME:
        raise errors.InvalidRequest(f"host name {name[:80]!r} is longer than {MAX_NAME} bytes")
    return ascii_name


def _to_ascii(text: str) -> str:
    return text.encode("idna").decode("ascii")


def parse_rule(text: str, *, trusted: bool = False) -> Rule:
    """A rule from its text form; InvalidRequest says what is wrong."""
    target, port = _split_port(text.strip())
    network = _network(target)
    if network is not None:
        return Rule(network=network, port=port, trusted=trusted)
    below = target.startswith("*.")
    name = normalise(target[2:] if below else target)
    if "*" in name:
        raise errors.InvalidRequest(
            f"{text[:80]!r}: a wildcard is only allowed as the whole first label",
            hint="write *.example.org",
        )
    if all(label.isdigit() or label.startswith("0x") for label in name.split(".")):
        # 127.1, 2130706433 and 0x7f000001 are addresses to a C library.
        raise errors.InvalidRequest(
            f"{text[:80]!r} is not a host name", hint="write an address in its usual form"
        )
    if below and "." not in name:
        raise errors.InvalidRequest(f"{text[:80]!r} would allow a whole top-level domain")
    return Rule(name=name, below=below, port=port, trusted=trusted)


def _split_port(text: str) -> tuple[str, int]:
    if text.startswith("["):  # [2001:db8::]:443 or [2001:db8::/32]:443
        target, _, rest = text[1:].partition("]")
        return target, _port(rest.removeprefix(":"), text) if rest else 0
    if text.count(":") == 1:
        target, _, port = text.partition(":")
        return target, _port(port, text)
    return text, 0


def _port(text: str, whole: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 65536:
        raise errors.InvalidRequest(f"{whole[:80]!r} has no valid port")
    return int(text)


def _network(text: str) -> Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


@dataclass(frozen=True)
class Policy:
    """What one session may reach."""

    preset: Preset = Preset.NONE
    rules: tuple[Rule, ...] = ()

    @property
    def silent(self) -> bool:
        """Whether nothing at all may be reached, so that there is no DNS either."""
        return self.preset is not Preset.OPEN and not self.rules

    def rules_for(self, name: str) -> list[Rule]:
        """The rules that allow a (normalised) name."""
        if self.preset is Preset.OPEN:
            return [Rule(name=name)]
        return [rule for rule in self.rules if rule.matches_name(name)]

    def to_json(self) -> dict[str, object]:
        return {"preset": str(self.preset), "allow": [str(rule) for rule in self.rules]}


def make(preset: str, allow: list[str], defaults: tuple[Rule, ...] = ()) -> Policy:
    """A policy from what a client asks for; ``defaults`` are the operator's own rules."""
    try:
        chosen = Preset(preset)
    except ValueError:
        known = ", ".join(Preset)
        raise errors.InvalidRequest(f"unknown egress preset {preset!r}", hint=f"known: {known}") from None
    if len(allow) > MAX_RULES:
        raise errors.LimitExceeded(f"more than {MAX_RULES} egress rules")
    rules = tuple(dict.fromkeys(parse_rule(text) for text in allow))
    if chosen is Preset.DEFAULT:
        rules = tuple(dict.fromkeys((*defaults, *rules)))
    return Policy(chosen, rules)


# What no client may reach by a name, and `open` may not reach at all: this host, its neighbours,
# and the metadata services of clouds. ipaddress knows the registries; these are the gaps.
_ALSO_PRIVATE = tuple(
    ipaddress.ip_network(text)
    for text in (
        "100.64.0.0/10",  # carrier-grade NAT, and Alibaba's metadata service in it
        "168.63.129.16/32",  # Azure's platform address, in public space
        "192.0.0.0/24",
        "64:ff9b::/96",  # NAT64: an IPv4 address in disguise
        "64:ff9b:1::/48",
        "2002::/16",  # 6to4, the same
        "2001::/32",  # Teredo, the same
        "fec0::/10",
    )
)


def is_public(address: Address) -> bool:
    """Whether an address is somebody's on the internet, and nobody's around here."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return is_public(address.ipv4_mapped)
    if not address.is_global or address.is_multicast or address.is_unspecified:
        return False
    return not any(address.version == net.version and address in net for net in _ALSO_PRIVATE)
