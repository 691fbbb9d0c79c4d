"""Failed attempts to be somebody, counted by address: a flood of them fills no log and no memory.

A key has 256 random bits, so nobody guesses one; and many people may share an address. So a flood
from an address is told to stop, and costs next to nothing, while a good key from there goes on
working.
"""

from __future__ import annotations

import time
from collections import OrderedDict

from k8e import addresses

BURST = 20.0  # failures that an address may have at once …
REFILL = 0.5  # … and how many more each second
MAX_ADDRESSES = 4096


class Attempts:
    """A token bucket per address; the address that was quiet for longest is forgotten first."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def failed(self, address: str, now: float | None = None) -> bool:
        """Count a failure; whether the address is still within its limit."""
        now = time.monotonic() if now is None else now
        key = addresses.group(address)
        left, at = self._buckets.pop(key, (BURST, now))
        left = min(BURST, left + (now - at) * REFILL)
        allowed = left >= 1
        self._buckets[key] = (left - 1 if allowed else left, now)
        while len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        return allowed

    def __len__(self) -> int:
        return len(self._buckets)
