"""Networks of policies in the kernel: parts of the router's rules, and elements of its sets.

A set with intervals would do it in one look-up, but the kernel takes time in proportion to all of
such a set to remove one element from it: seconds for one policy, where others have many networks.
So each network is a key of a hash table. Its length is cut to a multiple of four by splitting it
into up to eight parts, and rules look an address up with each of those lengths. A prefix is
written with a one behind its last bit, so that 10.0.0.0/8 and 10.0.0.0/12 are different keys.

Keys begin with the generation of a policy, so that its networks can be added a few at a time before
it is bound, and removed after it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator

from k8e.egress.nftables import Element, of_mark, of_port
from k8e.egress.policy import Network, Rule

STEP = 4  # bits by which the lengths of prefixes differ
_BITS = {4: 32, 6: 128}
_KINDS = ("net", "port", "addr", "addrport")
"""Prefixes with all of their ports or with one, and single addresses likewise."""
NAMES = tuple(
    f"{trust}{kind}{version}" for trust in ("", "trust") for kind in _KINDS for version in _BITS
)
HERE = "networked"
"""The set of interfaces whose policies name any network; others skip all of these rules."""


def _types(name: str) -> str:
    address = f"ipv{name[-1]}_addr"
    return f"mark . {address} . inet_service" if "port" in name else f"mark . {address}"


SETS = "\n    ".join(
    [f"set {HERE} {{ type ifname; }}", *(f"set {n} {{ type {_types(n)}; }}" for n in NAMES)]
)


def chain(name: str, addresses: tuple[str, str], port: str, *, trust: str, then: str) -> str:
    """A chain that goes to ``then`` if an address lies in a network of the generation in the mark.

    ``addresses`` and ``port`` are nft's words for where a packet goes to, or comes from.
    """
    lines: list[str] = []
    for (version, bits), address in zip(_BITS.items(), addresses, strict=True):
        keys = [("addr", address)]
        for length in range(0, bits, STEP):
            mask, one = (_address(version, number) for number in _mask(bits, length))
            keys.append(("net", f"({address} & {mask} | {one})"))
        for kind, key in keys:
            ported = {"addr": "addrport", "net": "port"}[kind]
            lines.append(f"meta mark . {key} @{trust}{kind}{version} goto {then}")
            lines.append(f"meta mark . {key} . {port} @{trust}{ported}{version} goto {then}")
    body = "\n        ".join(lines)
    return f"chain {name} {{\n        {body}\n    }}"


def _mask(bits: int, length: int) -> tuple[int, int]:
    """The bits of a prefix, and the one behind them."""
    return ((1 << length) - 1) << (bits - length), 1 << (bits - length - 1)


def _address(version: int, number: int) -> str:
    kind = ipaddress.IPv4Address if version == 4 else ipaddress.IPv6Address
    return str(kind(number))


def elements(generation: int, rules: Iterable[Rule]) -> list[Element]:
    """The kernel's elements for the networks among some rules."""
    mark = of_mark(generation)
    found: dict[Element, None] = {}
    for rule in rules:
        if rule.network is None:
            continue
        trust = "trust" if rule.trusted else ""
        port = of_port(rule.port) if rule.port else b""
        for is_address, key in _keys(rule.network):
            kind = ("addrport" if port else "addr") if is_address else "port" if port else "net"
            found[Element(f"{trust}{kind}{rule.network.version}", mark + key + port)] = None
    return list(found)


def _keys(network: Network) -> Iterator[tuple[bool, bytes]]:
    """The parts of a network, and whether they are single addresses."""
    bits = network.max_prefixlen
    length = -(-network.prefixlen // STEP) * STEP
    for number in range(1 << (length - network.prefixlen)):
        start = int(network.network_address) + (number << (bits - length))
        if length < bits:
            start |= _mask(bits, length)[1]
        yield length == bits, start.to_bytes(bits // 8, "big")
