"""Tasks run in gVisor as they do in containers."""

from __future__ import annotations

import pytest

from tests.a2a.servers import code, finished, message, running, text

pytestmark = pytest.mark.anyio


async def test_code_runs_in_gvisor() -> None:
    with running("gvisor") as server:
        async with server.client("1.0") as client:
            task = await finished(
                client, message(code("dmesg | head -1 || true; echo ran", "bash"))
            )
    assert "ran" in text(task)
