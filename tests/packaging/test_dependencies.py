"""Every dependency has a line that says why, and a pinned version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))
BASE: list[str] = PROJECT["project"]["dependencies"]
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
GROUPS: dict[str, list[Any]] = PROJECT["dependency-groups"]


def names(requirements: list[Any]) -> set[str]:
    """The packages of a list, k8e's own extras and included groups left out."""
    texts = [item for item in requirements if isinstance(item, str)]
    return {re.split(r"[^\w.-]", text)[0] for text in texts} - {"k8e"}


def reasons() -> dict[str, tuple[str, str]]:
    """The tables of the page: a package, its extras and why it is there."""
    found: dict[str, tuple[str, str]] = {}
    for line in (REPO / "docs/dependencies.md").read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) > 1:
            found |= dict.fromkeys(cells[0].split(", "), (cells[1], cells[-1]))
    return found


def pinned(lock: str) -> set[str]:
    text = (REPO / "requirements" / lock).read_text("utf-8")
    return set(re.findall(r"^([\w.-]+)==", text, re.MULTILINE))


def test_every_package_has_a_reason() -> None:
    told = reasons()
    wanted = [item for items in (BASE, *EXTRAS.values(), *GROUPS.values()) for item in items]
    for package in names(wanted):
        assert package in told, f"docs/dependencies.md has no row for {package}"
        assert len(told[package][1]) > 10, package


def test_a_package_of_the_gateway_is_told_with_its_extra() -> None:
    for extra, requirements in EXTRAS.items():
        for package in names(requirements):
            assert f"`{extra}`" in reasons()[package][0]


def test_every_package_is_pinned() -> None:
    assert names(BASE) | names(EXTRAS["gateway"]) <= pinned("gateway.txt")
    assert names(GROUPS["build"]) <= pinned("build.txt")
    assert pinned("gateway.txt") | names(GROUPS["dev"]) <= pinned("dev.txt")
