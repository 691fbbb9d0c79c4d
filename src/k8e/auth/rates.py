"""How often one caller may call: a bucket of calls for each principal, filled as time passes.

A caller's rate is the operator's word (``K8E_CALL_RATE``, or the key's own), never the caller's: no
header chooses the bucket. The local user has none; it would only be in its own way.
"""

from __future__ import annotations

import time
from collections import OrderedDict

from k8e import errors
from k8e.model import Principal

BURST_SECONDS = 2.0  # of calls that a caller who was quiet may make at once
MAX_CALLERS = 4096
UNLIMITED = frozenset({"local", "anybody"})
"""Who has no bucket: the gateway's own user; and who is nobody yet, and counted by address."""


class Rates:
    """The buckets of all callers; who was quiet for longest is forgotten first, with a full one."""

    def __init__(self, usual: float, times: float = 1) -> None:
        """``usual`` calls per second for whoever has no rate of its own; 0 means no limit.

        What costs less than a call may be done so many ``times`` as often.
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
