"""Every promise of the threat model names something that shows it, and that exists."""

from __future__ import annotations

import re

import pytest

from k8e import conformance
from tests.docs.documents import ROOT

PAGE = (ROOT / "docs" / "explanation" / "threat-model.md").read_text("utf-8")
PROMISES = PAGE[PAGE.index("## Promises") : PAGE.index("## What is left")]
TESTS = sorted(set(re.findall(r"`(test_\w+)`", PAGE)))
IDS = sorted(set(re.findall(r"`([a-z]+\.[a-z-]+)`", PROMISES)))


@pytest.fixture(scope="module")
def source() -> str:
    return "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))


@pytest.mark.parametrize("name", TESTS)
def test_the_named_test_exists(name: str, source: str) -> None:
    assert re.search(rf"def {name}\(", source)


@pytest.mark.parametrize("name", IDS)
def test_the_named_behaviour_exists(name: str) -> None:
    assert name in conformance.ALL


def test_every_promise_is_shown_by_something() -> None:
    rows = [line for line in PROMISES.splitlines() if line.startswith("| ")]
    promises = [line for line in rows if not line.startswith("| promise")]
    assert len(promises) > 20
    assert [line for line in promises if "`" not in line.rpartition(" | ")[2]] == []
