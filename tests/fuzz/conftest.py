"""One gateway for all tests of a file that send it nonsense: none of them may hurt it."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

from tests.fuzz import gateways
from tests.fuzz.gateways import Gateway


@pytest.fixture(scope="module")
def gateway() -> Generator[Gateway]:
    if os.geteuid() != 0:
        pytest.skip("the local runtimes need root")
    with gateways.gateway(K8E_MAX_SESSIONS="12") as gateway:
        yield gateway


@pytest.fixture(scope="module")
def neighbour(gateway: Gateway) -> str:
    """A session of somebody who does nothing wrong, and who must not notice anything."""
    return gateway.create(tenant="neighbour")
