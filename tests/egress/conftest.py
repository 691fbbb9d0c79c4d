"""Hosts for the tests of the uplink."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.egress.hosts import Host, start_docker


@pytest.fixture
def folder() -> Generator[Path]:
    made = Path(tempfile.mkdtemp(prefix="k8e-host-"))
    yield made
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        left = [line for line in file if str(made) in line]
    shutil.rmtree(made)
    assert not left


@pytest.fixture
def host(folder: Path) -> Generator[Host]:
    """A host that is no router, and must be as it was after the uplink is gone."""
    made = Host(folder)
    yield made
    made.close()


@pytest.fixture
def docker(folder: Path) -> Generator[Host]:
    """A host with Docker and a container that publishes a port."""
    made = Host(folder, container=True)
    start_docker(made)
    yield made
    made.close()
