"""The clock of deadlines: what sets a machine's date does not change it.

It counts from the start of the machine, also while that sleeps. Sandboxes never outlive a machine's
run, so a deadline by this clock means the same to every gateway that they ever have.
"""

from __future__ import annotations

import time

LONGEST_NAP = 60.0
"""Seconds: timers of the event loop stand still while a machine sleeps, so none is set for long."""
DRIFT = 2.0
"""Seconds that a date which was written down may be off before it is told anew."""


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def offset() -> float:
    """What makes a deadline of a date (Unix time), as the machine's date is now."""
    return now() - time.time()


def date_of(deadline: float, told: float = 0) -> float:
    """The date of a deadline; what was ``told`` before, unless somebody has set the machine's."""
    date = deadline - offset()
    return told if abs(date - told) < DRIFT else date
