"""Gateways are killed at random moments of everything; nothing is lost, and nothing is left.

The seed is printed: ``K8E_CHAOS_SEED`` has the same again. ``make chaos`` takes longer.
"""

from __future__ import annotations

import os
import secrets

import pytest

from tests.chaos import campaign

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="the local runtimes need root"),
    pytest.mark.timeout(240),
]
SECONDS = 12.0
ROUNDS = 12


@pytest.mark.parametrize("runtime", ["gvisor", "container"])
def test_nothing_is_lost_and_nothing_is_left_when_gateways_are_killed(runtime: str) -> None:
    seed = int(os.environ.get("K8E_CHAOS_SEED") or secrets.randbelow(1 << 32))
    assert campaign.run(runtime, seed, ROUNDS, seconds=SECONDS) > 0
