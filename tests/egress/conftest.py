"""Hosts for the tests of the uplink, and sandboxes with an internet of their own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest

from tests.egress import places, stages
from tests.egress.hosts import Host, start_docker
from tests.egress.places import Room, Scene
from tests.egress.stages import Stage


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


@pytest.fixture
async def stage() -> AsyncGenerator[Stage]:
    async with stages.opened() as made:
        yield made


@pytest.fixture(scope="module")
def scene() -> Generator[Scene]:
    with places.opened() as made:
        yield made


@pytest.fixture(scope="module", params=places.RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def kept(scene: Scene, runtime: str) -> Generator[Room]:
    """A session that all tests of a runtime share."""
    room = Room(scene, runtime)
    yield room
    room.close()


@pytest.fixture
def room(kept: Room) -> Generator[Room]:
    with places.reset(kept) as made:
        yield made
