"""Egress through the SDK that is awaited."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator

import pytest

from k8e import AsyncSandboxClient, errors
from tests.client.refusals import check_policies, check_refusal
from tests.gateway import worlds
from tests.gateway.worlds import CONNECT
from tests.places import Place

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", autouse=True)
async def one_loop() -> AsyncIterator[None]:
    """One event loop for all tests: gRPC's events may arrive after a loop was closed."""
    yield  # noqa: PT022 - the loop lives as long as this fixture


@pytest.fixture(scope="module")
def place() -> Generator[Place]:
    with worlds.networked() as place:
        yield place


async def test_the_awaited_client_says_the_same(endpoint: str) -> None:
    async with AsyncSandboxClient(endpoint) as client:
        session_id = await client.create_session("container", ["A.example", "*.b.example:443"])
        check_policies(await client.egress(session_id), session_id)
        assert await client.update_allowed_hosts(session_id, []) == ["none"]
        found = await client.run(CONNECT, "python", session_id=session_id)
        check_refusal(found.denials)
        assert (await client.egress(session_id)).denied == 1
        with pytest.raises(errors.InvalidRequest, match="'b d' is not a host name"):
            await client.update_allowed_hosts(session_id, ["b d"])
        await client.destroy_session(session_id)
