"""Which tests of the SDK run where."""

from __future__ import annotations

from pathlib import Path

import pytest

PAIRS = (("unix", "container"), ("grpc", "gvisor"))
"""Ways to the gateway, and the runtime that goes with each: no transport knows what is behind the
gateway, and no runtime what is before it, so four pairs would show nothing that two do not."""
HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    twice = [item for item in items if HERE in item.path.parents and not _is_wanted(item)]
    if twice:
        config.hook.pytest_deselected(items=twice)
        items[:] = [item for item in items if item not in set(twice)]


def _is_wanted(item: pytest.Item) -> bool:
    params: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
    pair = (params.get("endpoint"), params.get("runtime"))
    return None in pair or pair in PAIRS
