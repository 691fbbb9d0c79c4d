"""What the kernel holds for interfaces of which no record tells: found in nft's own words.

Nobody would ever change or remove it, and the next sandbox with that interface would have it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_SET = re.compile(r"\n\t(?:set|map) (\w+) \{\n(.*?)\n\t\}", re.DOTALL)
_ELEMENTS = re.compile(r"elements = \{(.*)\}", re.DOTALL)
_INTERFACE = re.compile(r'^"(sb\d+)"')


def deletions(table: str, listed: str, kept: Iterable[str]) -> str:
    """Commands that delete the elements of all sandboxes' interfaces but those that are ``kept``.

    ``listed`` is nft's listing of the table. Sets that only count are left: they forget.
    """
    known = set(kept)
    lines: list[str] = []
    for name, body in _SET.findall(listed):
        found = _ELEMENTS.search(body)
        if found is None or "dynamic" in body:
            continue
        for text in found[1].split(","):
            key = text.split(" : ")[0].strip()  # of a map, the value has no say
            interface = _INTERFACE.match(key)
            if interface is not None and interface[1] not in known:
                lines.append(f"delete element {table} {name} {{ {key} }}")
    return "\n".join(lines)
