"""What a runtime takes: one file and its registration, shown with one that isolates nothing."""

from __future__ import annotations

import os
import tomllib
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest

from k8e import conformance, errors
from k8e.conformance import host as conformance_host
from k8e.runtimes import registry
from k8e.runtimes.host import Host
from k8e.runtimes.registry import Runtimes
from tests.runtimes.plain import Plain

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="it makes namespaces")

GROUPS = ("exec", "output", "languages", "code", "files", "context", "tty", "ports", "life")
"""Promises that need no isolation, limits or network."""
NOT_HERE = {"files.anywhere": "what of a root file system can be written is isolation"}
"""Promises of these groups that need isolation after all, with the reason."""
SLOW = (
    "context.timeouts",
    "exec.parallel",
    "exec.timeout-stubborn",
    "files.large",
    "life.launch-given-up",
    "output.block",
)
"""Take seconds with any runtime, and say nothing of the contract that the others do not."""
ASKED = [
    name
    for name in conformance.ALL
    if name.partition(".")[0] in GROUPS and name not in (*NOT_HERE, *SLOW)
]


@pytest.fixture(scope="module")
def registered() -> Generator[None]:
    forget = registry.register(Plain.name, Plain)
    yield
    forget()


@pytest.fixture(scope="module")
async def host(registered: None) -> AsyncGenerator[Host]:
    async with conformance_host.own_host() as host:
        yield host


@pytest.fixture(scope="module")
async def stage(host: Host) -> AsyncGenerator[conformance.Stage]:
    runtime = conformance_host.Recorded(await Runtimes(host).choose("process"))
    folders = (host.settings.data_dir, host.settings.run_dir)
    async with conformance.staged(runtime, folders=folders) as stage:
        yield stage
    assert runtime.left(folders) == []


def test_all_of_the_runtimes_but_contract_and_registry_is_forbidden_above_them() -> None:
    package = Path(registry.__file__).parent
    parts = {path.stem for path in package.iterdir() if not path.name.startswith("__")}
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    forbidden = next(item["forbidden_modules"] for item in contracts if item["id"] == "waist")
    assert set(forbidden) == {f"k8e.runtimes.{part}" for part in parts - {"base", "registry"}}


async def test_a_registered_runtime_is_found_by_its_names_and_comes_after_the_stronger(
    host: Host,
) -> None:
    runtimes = Runtimes(host)
    assert list(runtimes.all) == ["gvisor", "container", "plain"]
    assert runtimes.resolve("process") == runtimes.resolve("plain") == "plain"
    with pytest.raises(errors.InvalidRequest) as caught:
        runtimes.resolve("docker")
    assert caught.value.hint == "known are gvisor, container and plain"


@pytest.mark.parametrize("name", ASKED)
async def test_a_runtime_without_isolation_keeps_the_promises_that_need_none(
    stage: conformance.Stage, name: str
) -> None:
    behaviour = conformance.ALL[name]
    result = await conformance.check(behaviour, stage)
    if result.verdict is conformance.Verdict.NOT_APPLICABLE:
        pytest.skip(result.reason)
    assert result.verdict is conformance.Verdict.PASS, f"{behaviour.promise} {result.reason}"
