"""Real clusters, on machines of their own. One file of tests shares one cluster."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

from k8e.distro import components
from k8e.distro.component_store import ComponentStore, State
from tests.cluster import traces
from tests.cluster.machine import COMPONENTS


@pytest.fixture(scope="module", autouse=True)
def _components_are_there(request: pytest.FixtureRequest) -> None:
    if os.geteuid() != 0:
        pytest.skip("clusters need root")
    store = ComponentStore(COMPONENTS)
    cni = str(getattr(request.module, "CNI", "basic"))  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    for component in components.needed(cni):
        found = store.look(component)
        if found.state is not State.PRESENT:
            pytest.fail(f"{component.name} is {found.state} ({found.detail}): make components")


@pytest.fixture(scope="module", autouse=True)
def _computer_stays_as_it_was(_components_are_there: None) -> Generator[None]:
    """Nothing that a cluster changes may be the computer's own."""
    before = traces.of_computer()
    yield
    left = traces.left(before, traces.of_computer())
    assert not left, "\n".join(left)
