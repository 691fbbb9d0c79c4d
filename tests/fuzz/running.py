"""How much the fuzz tests try: a little and always the same in CI, more by ``make fuzz``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

SCALE = int(os.environ.get("K8E_FUZZ_SCALE", "0"))
"""How many times as much as in CI; 0 in CI itself."""
FOUND = Path(".hypothesis", "fuzz")
"""What made a test fail is kept here, and tried first by the next run."""

Test = Callable[..., Any]


def fuzz(examples: int) -> Callable[[Test], Test]:
    """Try so many inputs in CI; each run there tries the same ones."""
    return settings(
        max_examples=examples * max(1, SCALE),
        derandomize=not SCALE,
        database=DirectoryBasedExampleDatabase(FOUND) if SCALE else None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=bool(SCALE),
    )
