"""Sandboxes that could not be removed yet, because something of them resists.

A process that waits in the kernel does not end when it is killed, and as long as it is there its
control groups, its disk and its uids are in use. Such a sandbox keeps its folder, with a note of
what is left, and somebody tries again: this gateway, ever more seldom, or the next one.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from k8e import errors

NOTE = "left.json"
FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0  # seconds between two tries
_MOST_DOUBLINGS = 6
MOST_WORDS = 500  # characters of a note that are believed


@dataclass(frozen=True)
class Leftover:
    """One sandbox that is not yet gone."""

    sandbox_id: str
    what: str
    """What of it is left, in words."""
    since: float
    """When it was to be removed, in seconds since 1970."""
    tries: int = 1

    @property
    def delay(self) -> float:
        """Seconds from a try to the next one."""
        return min(LONGEST_DELAY, FIRST_DELAY * 2 ** min(self.tries - 1, _MOST_DOUBLINGS))


class Leftovers:
    """All of one host. Used on the event loop only."""

    def __init__(self, sandboxes: Path) -> None:
        self._sandboxes = sandboxes
        self._known: dict[str, Leftover] = {}
        self.on_note: list[Callable[[Leftover], None]] = []
        """Called when something could not be removed."""

    def __contains__(self, sandbox_id: str) -> bool:
        return sandbox_id in self._known

    def listing(self) -> list[Leftover]:
        """All that are left, the oldest first."""
        return sorted(self._known.values(), key=lambda item: (item.since, item.sandbox_id))

    def load(self) -> None:
        """Go on with what an earlier gateway could not remove."""
        for file in self._sandboxes.glob(f"sb-*/{NOTE}"):
            with contextlib.suppress(*errors.UNREADABLE):
                data: dict[str, Any] = json.loads(file.read_text("utf-8"))
                what = str(data["what"])[:MOST_WORDS]
                found = Leftover(file.parent.name, what, float(data["since"]))
                self._known[found.sandbox_id] = found

    def note(self, sandbox_id: str, what: str) -> None:
        """It could not be removed; ``what`` is left of it."""
        known = self._known.get(sandbox_id)
        since, tries = (known.since, known.tries + 1) if known else (time.time(), 1)
        found = self._known[sandbox_id] = Leftover(sandbox_id, what, since, tries)
        with contextlib.suppress(OSError):  # a full disk, or no folder: then by what else there is
            (self._sandboxes / sandbox_id / NOTE).write_text(json.dumps(asdict(found)), "utf-8")
        for tell in self.on_note:
            tell(found)

    def forget(self, sandbox_id: str) -> None:
        """Nothing is left of it."""
        self._known.pop(sandbox_id, None)
