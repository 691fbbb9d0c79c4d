"""Sessions on a runtime without sandboxes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from k8e.sessions.service import Sessions
from tests.sessions.fakes import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
async def sessions(world: World) -> AsyncGenerator[Sessions]:
    async with world.running() as sessions:
        yield sessions
