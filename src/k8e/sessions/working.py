"""Whether a sandbox still works at something that nobody waits for."""

from __future__ import annotations

from typing import Any

from k8e import errors, link
from k8e.runtimes.base import Guest

ANSWER_SECONDS = 15.0


async def has_background_run(guest: Guest) -> bool:
    """Ask the guest; one that does not answer, or answers nonsense, does nothing useful."""
    try:
        connected = await guest.connect()
        told: Any = await link.request(connected, {"op": "execs"}, seconds=ANSWER_SECONDS)
        return any(item["background"] and item["code"] is None for item in told["execs"])
    except (errors.K8eError, OSError, KeyError, TypeError):
        return False
