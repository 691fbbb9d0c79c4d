"""Which hosts need a person's word, and which are free. Pure.

Words are those of a session's policy: names, ``*.wildcards``, networks, each with an optional port.
Whatever is not surely covered counts as new: asking once too often does no harm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NONE, STRICT = HARMLESS = ("none", "strict")
"""Words that only take something away."""


def split(asked: Sequence[str], free: Iterable[str]) -> tuple[list[str], list[str]]:
    """Those that are free, and those that somebody must allow."""
    known = {_plain(word) for word in free} | set(HARMLESS)
    now = [word for word in asked if covered(_plain(word), known)]
    return now, [word for word in asked if word not in now]


def kept_strict(words: Sequence[str], before: Iterable[str]) -> list[str]:
    """The words, and ``strict`` if it was said before: to drop it is to allow more."""
    strict = any(_plain(word) == STRICT for word in before)
    return [*words, STRICT] if strict and STRICT not in map(_plain, words) else list(words)


def loosening(remove: Iterable[str]) -> list[str]:
    """Words whose loss would let more be reached."""
    return [word for word in remove if _plain(word) in HARMLESS]


def covered(word: str, known: set[str]) -> bool:
    """Whether a word lets nothing be reached that others do not let already."""
    if word in known:
        return True
    name, colon, port = word.rpartition(":")
    if not colon or not port.isdigit():
        name, port = word, ""
    if not name or "/" in name or name.startswith(("*", "[")) or ":" in name:
        return bool(port) and name in known
    above = name.split(".")
    wild = [f"*.{'.'.join(above[at:])}" for at in range(1, len(above))]
    names = [name, *wild]
    return any(one in known or (port and f"{one}:{port}" in known) for one in names)


def _plain(word: str) -> str:
    return word.strip().lower().removesuffix(".")
