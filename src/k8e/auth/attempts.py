"""Failed attempts to be somebody, counted by address: a flood of them fills no log and no memory.

A key has 256 random bits, so nobody guesses one; and many people may share an address. So a flood
from an address is told to stop, and costs next to nothing, while a good key from there goes on
working.
"""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict

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
        key = _group(address)
        left, at = self._buckets.pop(key, (BURST, now))
        left = min(BURST, left + (now - at) * REFILL)
        allowed = left >= 1
        self._buckets[key] = (left - 1 if allowed else left, now)
        while len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        return allowed

    def __len__(self) -> int:
        return len(self._buckets)


def _group(address: str) -> str:
    """An IPv6 host has a whole /64 to choose its addresses from."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address[:64]
    if parsed.version == 4:
        return str(parsed)
    return str(ipaddress.ip_network((parsed.packed[:8] + bytes(8), 64)))
