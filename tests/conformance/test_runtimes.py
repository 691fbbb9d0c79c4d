"""Every behaviour, on every runtime of this host. The behaviours themselves are in the package."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator

import pytest

from k8e import conformance
from k8e.conformance import host as conformance_host
from k8e.runtimes.host import Host
from k8e.runtimes.registry import Runtimes

RUNTIMES = ("gvisor", "container")


@pytest.fixture(scope="module")
async def host() -> AsyncGenerator[Host]:
    """A data and a run folder of our own; nothing may stay mounted in them."""
    if os.geteuid() != 0:
        pytest.skip("the local runtimes need root")
    async with conformance_host.own_host() as host:
        yield host
        assert list(host.sandboxes.glob("*")) == []
        assert host.workspaces.names() == []


@pytest.fixture(scope="module", params=RUNTIMES)
async def stage(host: Host, request: pytest.FixtureRequest) -> AsyncGenerator[conformance.Stage]:
    """One shared sandbox per runtime; of this and all others nothing may be left in the end."""
    known = Runtimes(host)
    found = {item.runtime: item for item in await known.support()}[request.param]
    if not found.usable:
        pytest.skip(f"{found.runtime} does not work here: {found.detail}")
    runtime = conformance_host.Recorded(known.all[request.param])
    folders = (host.settings.data_dir, host.settings.run_dir)
    async with conformance.staged(runtime, folders=folders) as stage:
        yield stage
    assert runtime.left(folders) == []


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", conformance.ALL)
async def test_a_sandbox_keeps_its_promise(stage: conformance.Stage, name: str) -> None:
    behaviour = conformance.ALL[name]
    result = await conformance.check(behaviour, stage)
    if gap := conformance.known_gap(behaviour, stage.runtime):
        assert result.verdict is conformance.Verdict.FAIL, f"{name} is kept now: remove the gap"
        pytest.xfail(gap.reason)
    if result.verdict is conformance.Verdict.NOT_APPLICABLE:
        pytest.skip(result.reason)
    assert result.verdict is conformance.Verdict.PASS, f"{behaviour.promise} {result.reason}"
