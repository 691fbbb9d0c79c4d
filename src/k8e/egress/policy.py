"""The policy language, the same on every runtime: pure data and pure matching.

A policy is a list of words. A word is a host name (``example.org``), a wildcard for the names below
one (``*.example.org``) or a network (``192.0.2.0/24``), each with an optional port or several
(``example.org:443``, ``example.org:443,80``); or one of ``default`` (the package indexes of this
host, and GitHub), ``open`` (every public address), ``none`` (nothing, no DNS either) and ``strict``
(connections by name must also say that name: in TLS, or as HTTP's Host).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from k8e import errors

MAX_RULES = 256
MAX_NAME = 253
_LABEL = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


NONE, DEFAULT, OPEN, STRICT = _PRESETS = "none", "default", "open", "strict"
PRIVATE: tuple[Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 "
        "192.0.2.0/24 192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 "
        "224.0.0.0/3 "
        "168.63.129.16/32 "  # Azure's platform, at an address that looks public
        # Of IPv6 only 2000::/3 is in use, which in part hides addresses of IPv4.
        "::/3 2001::/32 2001:db8::/32 2002::/16 4000::/2 8000::/1"
    ).split()
)
"""What no client may reach: this host, its neighbours, and the metadata services of clouds."""


@dataclass(frozen=True)
class Rule:
    """One destination that may be reached."""

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
        """Whether ``name`` (normalised) is covered; a wildcard does not cover its own base."""
        if not self.name:
            return False
        return name.endswith("." + self.name) if self.below else name == self.name

    def contains(self, other: Rule) -> bool:
        """Whether this rule allows all that ``other`` does."""
        if self.port not in (0, other.port):
            return False
        if self.network is not None or other.network is not None:
            inside, around = other.network, self.network
            return inside is not None and around is not None and _lies_in(inside, around)
        return self.matches_name(other.name) if not other.below else self._contains_below(other)

    def _contains_below(self, other: Rule) -> bool:
        return self.below and (other.name == self.name or self.matches_name(other.name))

    def same_target(self, other: Rule) -> bool:
        """Whether both mean the same name, wildcard or network, on whatever port."""
        return (self.name, self.below, self.network) == (other.name, other.below, other.network)


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
        target, closed, rest = text[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise errors.InvalidRequest(f"{text[:80]!r} has brackets that make no sense")
        return target, _port(rest[1:], text) if rest else 0
    if text.count(":") == 1:
        target, _, port = text.partition(":")
        return target, _port(port, text)
    return text, 0


def _port(text: str, whole: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65536):
        raise errors.InvalidRequest(f"{whole[:80]!r} has no valid port")
    return int(text)


def _network(text: str) -> Network | None:
    if "%" in text:  # a zone, in which any character may stand
        return None
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


@dataclass(frozen=True)
class Policy:
    """What one session may reach; by default nothing."""

    rules: tuple[Rule, ...] = ()
    open: bool = False
    """Every public address, by whatever name."""
    strict: bool = False
    """Connections that a name allows must say that name."""

    @property
    def silent(self) -> bool:
        """Whether nothing at all may be reached, DNS included."""
        return not self.open and not self.rules

    @cached_property
    def _by_name(self) -> dict[tuple[str, bool], list[Rule]]:
        """The rules of names, by the name and whether it is a wildcard's base."""
        found: dict[tuple[str, bool], list[Rule]] = {}
        for rule in self.rules:
            if rule.name:
                found.setdefault((rule.name, rule.below), []).append(rule)
        return found

    def rules_for(self, name: str) -> list[Rule]:
        """The rules that allow a (normalised) name: its own, then those of wildcards."""
        rules = self._by_name
        found = list(rules.get((name, False), ()))
        base = name
        while base:
            _, _, base = base.partition(".")
            found += rules.get((base, True), ())
        return [*found, Rule(name=name)] if self.open else found

    def ports_for(self, name: str, address: Address) -> set[int]:
        """The ports of an address to which ``name`` led; 0 alone means all of them.

        Private addresses are open as far as the operator's rules say, whatever clients add to them.
        """
        rules = self.rules_for(name)
        ports = {rule.port for rule in rules if rule.trusted or is_public(address)}
        return {0} if 0 in ports else ports

    def words(self) -> list[str]:
        """The policy in its own language, with ``default`` spelled out."""
        words = [OPEN] if self.open else []
        words += [STRICT] if self.strict else []
        return [*words, *dict.fromkeys(str(rule) for rule in self.rules)] or [NONE]


def tidy(word: str) -> str:
    """A word in the form in which words are compared."""
    return word.strip().lower()


def same_words(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two lists have the same meaning, as far as that is known without a look-up."""
    return set(map(tidy, one)) - {NONE} == set(map(tidy, other)) - {NONE}


def narrows(before: Sequence[str], after: Sequence[str]) -> bool:
    """Whether a change only removes permissions, as far as the words show it."""
    old, new = set(map(tidy, before)), set(map(tidy, after)) - {NONE}
    return not new or (new <= old and (STRICT in new or STRICT not in old))


def changed(before: Sequence[str], *, add: Sequence[str], remove: Sequence[str]) -> list[str]:
    """The words of a policy after a change; equivalent words are recognised by their spelling."""
    if max(len(add), len(remove)) > MAX_RULES:
        raise errors.LimitExceeded(
            f"a change of more than {MAX_RULES} egress rules",
            hint=f"a policy has {MAX_RULES} at most; name networks or wildcards",
        )
    words = {tidy(word): word for word in before if tidy(word) != NONE}
    for word in remove:
        if tidy(word) not in words:
            raise errors.InvalidRequest(
                f"{word[:80]!r} is none of the words of this policy: {' '.join(before)[:400]}",
                hint="what 'default' or a wildcard allows cannot be taken out of it: "
                "replace that word by the hosts that are needed",
            )
        del words[tidy(word)]
    words |= {tidy(word): word for word in add if tidy(word) not in words}
    return list(words.values())


def _granted(rule: Rule, defaults: Sequence[Rule]) -> list[Rule]:
    """A client's rule as it is granted: private addresses only where the operator's rules do.

    A client that names a host of ``default`` gets the rules of ``default`` for it, and no more: of
    a package index with a private address the index's own ports. In a larger network, the kernel
    refuses what is private.
    """
    trusted = [one for one in defaults if one.trusted]
    if any(one.contains(rule) for one in trusted):
        return [replace(rule, trusted=True)]
    same = [one for one in trusted if one.same_target(rule) and rule.contains(one)]
    network = rule.network
    if network is None or not any(_lies_in(network, private) for private in PRIVATE):
        return [rule, *same]
    if not same:
        raise errors.InvalidRequest(
            f"{str(rule)!r} is private: only the operator can allow it",
            hint="K8E_TRUSTED_HOSTS of the gateway names hosts and networks of the operator's",
        )
    return same


def _lies_in(inner: Network, outer: Network) -> bool:
    return inner.network_address in outer and inner.prefixlen >= outer.prefixlen


def _each_port(word: str) -> list[str]:
    """``a.example:443`` and ``a.example:80`` for ``a.example:443,80``."""
    target, _, ports = word.rpartition(":")
    if not target or "," not in ports:
        return [word]
    return [f"{target}:{port.strip()}" for port in ports.split(",", MAX_RULES)]


def split_words(text: str) -> tuple[str, ...]:
    """The words of a list with commas or spaces; a number belongs to the word before it."""
    words: list[str] = []
    for word in text.replace(",", " ").split():
        target, colon, _ = words[-1].rpartition(":") if words else ("", "", "")
        words.append(f"{target}:{word}" if word.isdigit() and colon else word)
    return tuple(words)


def parse_policy(words: Sequence[str], defaults: tuple[Rule, ...] = ()) -> Policy:
    """A policy from a client's words; ``defaults`` are the operator's rules, for ``default``."""
    words = [part for word in words[: MAX_RULES + 1] for part in _each_port(tidy(word))]
    if len(words) > MAX_RULES:
        raise errors.LimitExceeded(
            f"more than {MAX_RULES} egress rules", hint="name networks or wildcards instead"
        )
    asked = set(words)
    if NONE in asked and len(asked) > 1:
        raise errors.InvalidRequest("'none' allows nothing, so it must stand alone")
    if {OPEN, STRICT} <= asked:
        raise errors.InvalidRequest(
            "'strict' compares names with an allow-list, and 'open' has none"
        )
    rules: list[Rule] = list(defaults) if DEFAULT in asked else []
    for word in words:
        rules += _granted(parse_rule(word), defaults) if word not in _PRESETS else ()
    return Policy(tuple(dict.fromkeys(rules)), OPEN in asked, STRICT in asked)


@lru_cache(4096)
def is_public(address: Address) -> bool:
    """Whether an address is a public one, and not in a private or reserved network."""
    return not any(address in network for network in PRIVATE)
