"""Rates of calls and of failed logins: buckets that fill as time passes.

The operator sets a caller's rate (``K8E_CALL_RATE``, or the key's own); no header of the caller
chooses the bucket. The local user has none, because it would only slow itself down.

A key has 256 random bits, so it cannot be guessed; and many people may share an address. So a flood
from an address is refused, and costs next to nothing, while a good key from there goes on working.
"""

from __future__ import annotations

import time
from collections import OrderedDict

from k8e import access, errors
from k8e.model import Principal

BURST_SECONDS = 2.0  # of calls that a caller who was quiet may make at once
MAX_CALLERS = 4096
UNLIMITED = frozenset({"local", "anybody"})
"""Callers without a bucket: the gateway's own user, and unknown callers, counted by address."""


class Rates:
    """The buckets of all callers; the caller that was quiet for longest is forgotten first."""

    def __init__(self, usual: float, times: float = 1) -> None:
        """``usual`` calls per second for callers without a rate of their own; 0 means no limit.

        Cheaper actions are allowed so many ``times`` as often.
        """
        self._usual = usual
        self._times = times
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, principal: Principal, now: float | None = None) -> None:
        """Count one call; LimitExceeded if the caller makes too many."""
        if principal.name in UNLIMITED:
            return
        rate = (principal.rate or self._usual) * self._times
        if not rate:
            return
        now = time.monotonic() if now is None else now
        full = max(1.0, rate * BURST_SECONDS)
        left, at = self._buckets.pop(principal.name, (full, now))
        left = min(full, left + (now - at) * rate)
        self._buckets[principal.name] = (max(0.0, left - 1) if left >= 1 else left, now)
        if len(self._buckets) > MAX_CALLERS:
            self._buckets.popitem(last=False)
        if left < 1:
            raise errors.LimitExceeded(
                f"{principal.shown} makes more than {rate:g} calls a second "
                f"({'the limit of this key' if principal.rate else 'K8E_CALL_RATE'})",
                hint="wait a little, and call less often",
            )

    def __len__(self) -> int:
        return len(self._buckets)


BURST = 20.0  # failures that an address may have at once …
REFILL = 0.5  # … and how many more each second
MAX_ADDRESSES = 4096


class FailureRates:
    """A token bucket per address; the address that was quiet for longest is forgotten first."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def failed(self, address: str, now: float | None = None) -> bool:
        """Count a failure; return whether the address is still within its limit."""
        now = time.monotonic() if now is None else now
        key = access.group(address)
        left, at = self._buckets.pop(key, (BURST, now))
        left = min(BURST, left + (now - at) * REFILL)
        allowed = left >= 1
        self._buckets[key] = (left - 1 if allowed else left, now)
        while len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        return allowed

    def __len__(self) -> int:
        return len(self._buckets)
