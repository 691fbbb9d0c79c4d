"""Tasks run in gVisor as they do in containers."""

from __future__ import annotations

import pytest

from tests.a2a.servers import code, finished, message, running, text
from tests.places import Place

pytestmark = pytest.mark.anyio


async def test_code_runs_in_gvisor(place: Place) -> None:
    with running(place, runtime="gvisor") as server:
        async with server.client("1.0") as client:
            task = await finished(
                client, message(code("dmesg | head -1 || true; echo ran", "bash"))
            )
    assert "ran" in text(task)
