"""The TypeScript SDK: its own tests, by vitest, against real gateways and sandboxes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sdk.conftest import SDK

pytestmark = pytest.mark.timeout(800)


def test_all_its_tests_pass(
    packages: Path, gateways: dict[str, str], run: Callable[..., str]
) -> None:
    told = run(
        [packages / ".bin/vitest", "run", "--reporter=dot"], cwd=SDK, environ=gateways, seconds=780
    )
    assert " passed" in told
    assert "skipped" not in told
