"""The unmodified asynchronous client against a gateway on one machine."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

from tests.agent_sandbox import upstream
from tests.agent_sandbox.upstream import Upstream
from tests.gateway import http_gateways

pytestmark = pytest.mark.timeout(300)
CODE = """
import asyncio, io
from kubernetes_asyncio import client as kubernetes
from k8s_agent_sandbox import AsyncSandboxClient
from k8s_agent_sandbox.exceptions import *
from k8s_agent_sandbox.models import SandboxDirectConnectionConfig

async def main():
    shown = kubernetes.Configuration(host=server)
    shown.api_key = {"BearerToken": f"Bearer {token}"}
    direct = SandboxDirectConnectionConfig(
        api_url=server + "/router", extra_headers={"Authorization": f"Bearer {token}"})
    api = kubernetes.ApiClient(shown)
    async with AsyncSandboxClient(connection_config=direct, cleanup=False, api_client=api) as boxes:
        told = {}
        one, two = await asyncio.gather(*(boxes.create_sandbox("default") for _ in range(2)))
        runs = await asyncio.gather(*(
            box.commands.run(f"echo {number}; exit {number}")
            for number, box in enumerate((one, two, one, two))))
        told["runs"] = [[run.stdout, run.exit_code] for run in runs]
        data = bytes(range(256)) * 5000
        await one.files.write("a/data.bin", data)
        await one.files.write("streamed.bin", io.BytesIO(data))
        told["same"] = [await one.files.read(p) == data for p in ("a/data.bin", "streamed.bin")]
        told["apart"] = await two.files.exists("a/data.bin")
        told["listed"] = [entry.name for entry in await one.files.list("a")]
        slow = await one.commands.run("sleep 600", command_timeout=0.5)
        told["slow"] = slow.timed_out
        told["claims"] = len(await boxes.list_all_sandboxes())
        try:
            await boxes.create_sandbox("no-such-pool")
        except SandboxWarmPoolNotFoundError:
            told["pool"] = "missing"
    return told

result = asyncio.run(main())
"""


@pytest.fixture(scope="module")
def client() -> Generator[Upstream]:
    if os.geteuid() != 0:
        pytest.skip("the local runtimes need root")
    with http_gateways.started(K8E_RUNTIME="container") as gateway:
        token = gateway.key("somebody").headers["authorization"].removeprefix("Bearer ")
        names = {"server": f"{gateway.root}/agent-sandbox", "token": token}
        with upstream.started(None, **names) as running:
            yield running


def test_the_asynchronous_client_works_with_two_sandboxes_at_once(client: Upstream) -> None:
    told = client.run(CODE)
    assert told["runs"] == [["0\n", 0], ["1\n", 1], ["2\n", 2], ["3\n", 3]]
    assert told["same"] == [True, True]
    assert told["apart"] is False
    assert told["listed"] == ["data.bin"]
    assert told["slow"] is True
    assert told["claims"] == 2
    assert told["pool"] == "missing"
