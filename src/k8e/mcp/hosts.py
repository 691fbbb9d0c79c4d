"""Which hosts need a person's word, and which are free. Pure.

Words are those of a session's policy: names, ``*.wildcards``, networks, each with an optional port
or several. What counts is what they allow, not how they are written. Whatever is not surely covered
counts as new: asking once too often does no harm.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import NamedTuple

NONE, STRICT = HARMLESS = ("none", "strict")
"""Words that only take something away."""
OPEN, DEFAULT = "open", "default"
OWN_WORDS = (*HARMLESS, OPEN, DEFAULT)
ANY = ""
"""Stands for every port."""


class _Place(NamedTuple):
    """What one word lets be reached."""

    name: str
    below: bool
    """Whether it is the names below that are meant."""
    network: ipaddress.IPv4Network | ipaddress.IPv6Network | None
    port: str

    def holds(self, other: _Place) -> bool:
        """Whether all of ``other`` is in here."""
        return self.port in (ANY, other.port) and self._holds_target(other)

    def _holds_target(self, other: _Place) -> bool:
        if self.network is not None or other.network is not None:
            around, inside = self.network, other.network
            if around is None or inside is None or around.version != inside.version:
                return False
            return inside.network_address in around and inside.prefixlen >= around.prefixlen
        is_below = self.below and other.name.endswith("." + self.name)
        return is_below or (other.name == self.name and other.below == self.below)

    def word(self) -> str:
        target = ("*." if self.below else "") + self.name
        if self.network is not None:
            is_six = self.port and self.network.version == 6
            target = f"[{self.network}]" if is_six else str(self.network)
        if self.port:
            return f"{target}:{self.port}"
        return f"{target}." if target in OWN_WORDS else target  # a host of that name


def split(asked: Sequence[str], free: Iterable[str]) -> tuple[list[str], list[str]]:
    """Words for what is free, and those that somebody must allow.

    A host without a port, of which some ports are free, stands for these: who wants another one
    has to say so.
    """
    words = {_tidy(word) for word in free} | set(HARMLESS)
    known = [place for word in words for place in _places(word)]
    now: list[str] = []
    later: list[str] = []
    for word in asked:
        places = _places(word)
        for place in places:
            found = _free(place, known, is_open=OPEN in words)
            now += found
            later += [] if found else [place.word()]
        if not places:  # a word of its own, or one that the gateway will refuse
            (now if _tidy(word) in words & set(OWN_WORDS) else later).append(word)
    return list(dict.fromkeys(now)), list(dict.fromkeys(later))


def _free(place: _Place, known: list[_Place], *, is_open: bool) -> list[str]:
    """What of a place is free: all of it, those of its ports that are, or nothing."""
    if any(one.holds(place) for one in known) or (is_open and place.network is None):
        return [place.word()]
    if place.port:
        return []
    ports = [one.port for one in known if one.holds(place._replace(port=one.port))]
    return [place._replace(port=port).word() for port in sorted(set(ports), key=int)]


def kept_strict(words: Sequence[str], before: Iterable[str]) -> list[str]:
    """The words, and ``strict`` if it was said before: to drop it is to allow more."""
    strict = any(_tidy(word) == STRICT for word in before)
    return [*words, STRICT] if strict and STRICT not in map(_tidy, words) else list(words)


def loosening(remove: Iterable[str]) -> list[str]:
    """Words whose loss would let more be reached."""
    return [word for word in remove if _tidy(word) in HARMLESS]


def _places(word: str) -> list[_Place]:
    """What a word means, port by port; nothing if it is no name and no network."""
    text = _tidy(word)
    if text in OWN_WORDS:
        return []
    target, ports = _ports(text)
    if not ports or not all(port == ANY or port.isdecimal() for port in ports):
        return []
    try:
        network = ipaddress.ip_network(target, strict=False)
        return [_Place("", False, network, port) for port in ports]
    except ValueError:
        pass
    try:
        name = target.removeprefix("*.").removesuffix(".")
        name = name if name.isascii() else name.encode("idna").decode("ascii")
    except UnicodeError:
        return []
    if not name or set(name) & set("*:/[]@%, "):
        return []
    below = target.startswith("*.")
    return [_Place(name, below, None, port) for port in ports]


def _ports(text: str) -> tuple[str, list[str]]:
    """The target of a word, and its ports without zeros that lead."""
    if text.startswith("["):
        target, _, rest = text[1:].partition("]")
        if rest and not rest.startswith(":"):
            return target, []
        target, ports = target, rest[1:] if rest else None
    elif text.count(":") == 1:
        target, _, ports = text.partition(":")
    else:
        target, ports = text, None
    if ports is None:
        return target, [ANY]
    return target, [port.strip().lstrip("0") or "0" for port in ports.split(",")]


def _tidy(word: str) -> str:
    return word.strip().lower()
