"""How much a sandbox still works at that nobody waits for."""

from __future__ import annotations

import asyncio
from typing import Any

from k8e import errors, link
from k8e.runtimes.base import Guest

ANSWER_SECONDS = 15.0


async def count_background_runs(guest: Guest, seconds: float = ANSWER_SECONDS) -> int:
    """Ask the guest; one that does not answer, or answers nonsense, does nothing useful."""
    try:
        async with asyncio.timeout(seconds):
            connected = await guest.connect()
            told: Any = await link.request(connected, {"op": "execs"}, seconds=seconds)
        return sum(bool(item["background"] and item["code"] is None) for item in told["execs"])
    except (errors.K8eError, OSError, KeyError, TypeError):  # a time-out is an OSError
        return 0
