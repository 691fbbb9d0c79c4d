"""Every behaviour, on every runtime of this host. The behaviours themselves are in the package."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest

from k8e import conformance, settings
from k8e.conformance import traces
from k8e.model import Limits, Rootfs, SandboxSpec
from k8e.runtimes.base import Guest, Runtime, Support
from k8e.runtimes.host import Host
from k8e.runtimes.registry import Runtimes

RUNTIMES = ("gvisor", "container")
GAPS = {
    ("gvisor", "limits.memory-alone"): "gVisor has no limit on one process's memory and no killer "
    "of its own: the sandbox ends as a whole, and says why"
}
"""Promises that a runtime is known not to keep. Each must really fail, or it leaves this list."""


class Recorded:
    """A runtime that remembers what it launched."""

    def __init__(self, runtime: Runtime) -> None:
        self.name = runtime.name
        self.networked = runtime.networked
        self.launched: list[str] = []
        self._runtime = runtime

    async def probe(self) -> Support:
        return await self._runtime.probe()

    def can_change(self, launched: Limits, asked: Limits) -> bool:
        return self._runtime.can_change(launched, asked)

    async def fetch(self, rootfs: Rootfs) -> None:
        await self._runtime.fetch(rootfs)

    async def launch(self, spec: SandboxSpec) -> Guest:
        self.launched.append(spec.sandbox_id)
        return await self._runtime.launch(spec)

    async def adopt(self) -> list[Guest]:
        return await self._runtime.adopt()

    async def purge(self, sandbox_id: str) -> None:
        await self._runtime.purge(sandbox_id)


@pytest.fixture(scope="module")
def host() -> Generator[Host]:
    """A data and a run folder of our own; nothing may stay mounted in them."""
    if os.geteuid() != 0:
        pytest.skip("the local runtimes need root")
    with tempfile.TemporaryDirectory(prefix="k8e-", dir="/tmp") as folder:
        place = Path(folder)
        place.chmod(0o711)
        config = settings.load({"K8E_DATA_DIR": str(place / "d"), "K8E_RUN_DIR": str(place / "r")})
        for part in (config.data_dir, config.run_dir):
            part.mkdir(mode=0o711)
        host = Host(config)
        host.prepare()
        yield host
        assert list(host.sandboxes.glob("*")) == []
        assert host.workspaces.names() == []
        host.close()
        assert traces.mounts(folder) == []
        assert traces.loop_devices(folder) == []
        assert traces.processes(folder) == []


@pytest.fixture(scope="module", params=RUNTIMES)
async def stage(host: Host, request: pytest.FixtureRequest) -> AsyncGenerator[conformance.Stage]:
    """One shared sandbox per runtime; of this and all others nothing may be left in the end."""
    runtime = Recorded(Runtimes(host).all[request.param])
    if not (support := await runtime.probe()).usable:
        pytest.skip(f"{runtime.name} does not work here: {support.detail}")
    folders = (host.settings.data_dir, host.settings.run_dir)
    async with conformance.staged(runtime, folders=folders) as stage:
        yield stage
    assert runtime.launched
    assert [left for name in runtime.launched for left in traces.traces(name, folders)] == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", conformance.ALL)
async def test_a_sandbox_keeps_its_promise(stage: conformance.Stage, name: str) -> None:
    gap = GAPS.get((stage.runtime.name, name))
    result = await conformance.check(conformance.ALL[name], stage)
    if gap:
        assert result.verdict is conformance.Verdict.FAIL, f"{name} is kept now: remove the gap"
        pytest.xfail(gap)
    if result.verdict is conformance.Verdict.NOT_APPLICABLE:
        pytest.skip(result.reason)
    assert result.verdict is conformance.Verdict.PASS, f"{result.behaviour.promise} {result.reason}"


@pytest.mark.parametrize(("runtime", "name"), GAPS)
def test_every_gap_is_of_a_behaviour_that_exists(runtime: str, name: str) -> None:
    assert runtime in RUNTIMES
    assert name in conformance.ALL
