"""The router's table of an earlier release, rebuilt with the rules of this one.

The router outlives gateways, and so does its table. It is replaced in one transaction, with all
that it holds for sandboxes: there is no moment without rules, and since connections and their marks
are not part of the table, open connections continue.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from typing import Any, cast

from k8e.egress import networks, rules
from k8e.egress.nftables import Element, read_mark
from k8e.egress.pins import MAX_PINS, MAX_PORTS
from k8e.egress.policy import Network, Rule

_COPIED = (*rules.OF_INTERFACES, *rules.PINS, *rules.PAST, *rules.OF_HOST)
_INTERVALS = [
    f"{trust}{kind}{version}"
    for trust in ("", "trust")
    for kind in ("net", "port")
    for version in (4, 6)
]
"""The sets of releases in which the networks of a policy were intervals under its interface."""
_PINS_WITH_PORTS = ("host4", "host6", "any4", "any6")
"""The sets of releases in which a pin was one element for each of its ports; "any" means all."""


def rebuilt(listing: str, base: str) -> str:
    """The commands that replace a table, of which ``listing`` is nft's JSON, by ``base``."""
    found = json.loads(listing)["nftables"]
    sets = [item.get("set") or item.get("map") for item in found if "set" in item or "map" in item]
    held = {item["name"]: item.get("elem", []) for item in sets}
    lines = [f"delete table {rules.TABLE}", base]
    for name in _COPIED:
        lines += _adding(name, [_element(item) for item in held.get(name, [])])
    if networks.HERE in held:
        for name in networks.NAMES:
            lines += _adding(name, [_element(item) for item in held.get(name, [])])
    else:
        lines += _networks(held)
    if any(name in held for name in _PINS_WITH_PORTS):
        for name, elements in _regrouped(held).items():
            lines += _adding(name, elements)
    return "\n".join(lines)


def _adding(name: str, elements: list[str]) -> Iterator[str]:
    if elements:
        yield f"add element {rules.TABLE} {name} {{ {', '.join(elements)} }}"


def _element(item: Any) -> str:
    """An element in nft's language, from its JSON."""
    if isinstance(item, list):  # of a map: a key and its value
        key, value = cast("list[Any]", item)
        return f"{_element(key)} : {_word(value)}"
    if isinstance(item, dict) and "elem" in item:
        inner = cast("dict[str, dict[str, Any]]", item)["elem"]
        return f"{_word(inner['val'])}{_time(inner)}"
    return _word(item)


def _time(item: dict[str, Any]) -> str:
    if "timeout" not in item:
        return ""
    return f" timeout {item['timeout']}s expires {max(1, item.get('expires', 1))}s"


def _word(value: Any) -> str:
    if not isinstance(value, dict):
        return f'"{value}"' if isinstance(value, str) and value.startswith("sb") else str(value)
    parts = cast("dict[str, Any]", value)
    if "concat" in parts:
        return " . ".join(map(_word, parts["concat"]))
    if "prefix" in parts:
        return f"{parts['prefix']['addr']}/{parts['prefix']['len']}"
    return "-".join(map(_word, parts["range"]))


def _networks(held: dict[str, list[Any]]) -> Iterator[str]:
    """Networks that were intervals, each under its interface."""
    marks = dict(held.get("generation", []))
    here: set[str] = set()
    for old in _INTERVALS:
        for item in held.get(old, []):
            interface, network, *port = item["concat"]
            if interface not in marks:
                continue
            here.add(interface)
            trusted = old.startswith("trust")
            found = [
                Rule(network=part, port=port[0] if port else 0, trusted=trusted)
                for part in _parts(network)
            ]
            for made in networks.elements(marks[interface], found):
                yield from _adding(made.name, [_key(made)])
    yield from _adding(networks.HERE, sorted(f'"{name}"' for name in here))


def _parts(value: Any) -> list[Network]:
    """A network from nft's JSON: an address, a prefix or a range."""
    if isinstance(value, dict) and "range" in value:
        first, last = (
            ipaddress.ip_address(text) for text in cast("dict[str, Any]", value)["range"]
        )
        return list(ipaddress.summarize_address_range(first, last))
    return [ipaddress.ip_network(_word(value))]


def _key(element: Element) -> str:
    """A key of a network in nft's language."""
    size = 4 if element.name.endswith("4") else 16
    words = [str(read_mark(element.key)), str(ipaddress.ip_address(element.key[4 : 4 + size]))]
    if "port" in element.name:
        words.append(str(int.from_bytes(element.key[4 + size : 6 + size], "big")))
    return " . ".join(words)


def _regrouped(held: dict[str, list[Any]]) -> dict[str, list[str]]:
    """Pins with a group each, from pins that had one element for each port."""
    interfaces = {mark: name for name, mark in held.get("generation", [])}
    ports: dict[tuple[int, str], set[int]] = {}
    seconds: dict[tuple[int, str], int] = {}
    for name in _PINS_WITH_PORTS:
        for item in held.get(name, []):
            generation, address, *port = item["elem"]["val"]["concat"]
            key = generation, address
            ports.setdefault(key, set()).add(port[0] if port else 0)
            left = max(1, item["elem"].get("expires", 1))
            seconds[key] = max(seconds.get(key, 0), left)
    made: dict[str, list[str]] = {"pins4": [], "pins6": [], "ports": []}
    groups: dict[str, dict[frozenset[int], int]] = {}
    counts: dict[int, int] = {}
    for (generation, address), found in ports.items():
        interface = interfaces.get(generation)
        counts[generation] = counts.get(generation, 0) + 1
        if interface is None or counts[generation] > MAX_PINS:
            continue  # of a policy that has been replaced, or surplus
        group = _group(groups.setdefault(interface, {}), frozenset(found))
        if group:
            left = seconds[generation, address]
            name = f"pins{ipaddress.ip_address(address).version}"
            made[name].append(f"{generation} . {address} timeout {left}s : {group}")
    for interface, known in groups.items():
        for found, group in known.items():
            made["ports"] += [f'"{interface}" . {group} . {port}' for port in sorted(found)]
    return made


def _group(known: dict[frozenset[int], int], ports: frozenset[int]) -> int:
    """The number of a group; 0 where an interface has too many of them."""
    if 0 in ports:
        return rules.ALL_PORTS
    if ports not in known and sum(map(len, known)) + len(ports) > MAX_PORTS:
        return 0
    return known.setdefault(ports, rules.ALL_PORTS + 1 + len(known))
