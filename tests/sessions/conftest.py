"""Sessions on a runtime without sandboxes, and gateways that are killed and started again."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest

from k8e.sessions.service import Sessions
from tests.sessions.fakes import World
from tests.sessions.gateways import Client, Gateways


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
async def sessions(world: World) -> AsyncGenerator[Sessions]:
    async with world.running() as sessions:
        yield sessions


@pytest.fixture(scope="module")
def gateways() -> Generator[Gateways]:
    gateways = Gateways()
    client = gateways.start()
    if not gateways.data.joinpath("probe.json").exists():
        client.call("doctor")  # so that every later start finds the runtimes probed
    yield gateways
    gateways.close()


@pytest.fixture
def client(gateways: Gateways) -> Client:
    return gateways.connect()


@pytest.fixture(params=["gvisor", "container"])
def runtime(request: pytest.FixtureRequest) -> str:
    return request.param
