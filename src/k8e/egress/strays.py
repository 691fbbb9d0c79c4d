"""What the kernel holds for interfaces and generations of which no record tells.

Nobody would ever change or remove it, and the next sandbox with that interface would have it.
"""

from __future__ import annotations

from collections.abc import Iterable

from k8e.egress.elements import Element


def of_other_interfaces(elements: Iterable[Element], kept: Iterable[str]) -> list[Element]:
    """Elements of sandboxes' interfaces, but for those that are ``kept``."""
    known = {name.encode() for name in kept}
    names = ((item, item.key[:16].rstrip(b"\0")) for item in elements)
    return [item for item, name in names if name.startswith(b"sb") and name not in known]
