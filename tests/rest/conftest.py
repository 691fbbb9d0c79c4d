from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.rest import gateways
from tests.rest.gateways import Rest


@pytest.fixture(scope="module")
def rest() -> Generator[Rest]:
    """REST for the gateway's own user, without a credential."""
    with gateways.started() as found:
        yield found


@pytest.fixture(scope="module")
def sandbox(rest: Rest) -> str:
    """A sandbox that tests of this module share."""
    return str(rest.open("shared")["sandbox_id"])
