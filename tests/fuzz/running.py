"""How much the fuzz tests try: a little and always the same in CI, more by ``make fuzz``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from k8e.errors import K8eError

SCALE = int(os.environ.get("K8E_FUZZ_SCALE", "0"))
"""How many times as much as in CI; 0 in CI itself."""
FOUND = Path(".hypothesis", "fuzz")
"""What made a test fail is kept here, and tried first by the next run."""

Test = Callable[..., Any]


def helpful(error: K8eError, *words: str) -> None:
    """An error that tells what is wrong, and what to do about it."""
    assert error.hint
    assert all(word in error.message for word in words)


def fuzz(examples: int) -> Callable[[Test], Test]:
    """Try so many inputs in CI; each run there tries the same ones."""
    return settings(
        max_examples=examples * max(1, SCALE),
        derandomize=not SCALE,
        database=DirectoryBasedExampleDatabase(FOUND) if SCALE else None,
        deadline=None,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
            HealthCheck.function_scoped_fixture,
            HealthCheck.large_base_example,
        ],
        print_blob=bool(SCALE),
    )
