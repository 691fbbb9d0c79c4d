"""The suite on this machine's runtimes, in folders of its own, beside whatever runs there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Iterable, Sequence
from pathlib import Path

from k8e import errors, settings
from k8e.conformance import runner, traces
from k8e.conformance.outcomes import BrokenPromise
from k8e.model import Limits, Rootfs, SandboxSpec
from k8e.runtimes.base import Guest, Runtime, Support
from k8e.runtimes.host import Host, kill_mentioning
from k8e.runtimes.registry import Runtimes

PATIENCE = 30.0
CLUSTER = (
    "K8E_KUBECONFIG",
    "K8E_SANDBOX_NAMESPACE",
    "K8E_SANDBOX_IMAGE",
    "K8E_GUEST_IMAGE",
    "K8E_RUNTIME_CLASSES",
)
IN_PODS = "kubernetes"
"""How promises call any runtime whose sandboxes are pods."""
OPEN_FOLDER = 0o711  # sandboxes have uids of their own and pass through it


@contextlib.asynccontextmanager
async def own_host() -> AsyncGenerator[Host]:
    """A data folder and a run folder of our own; anything that is left in them is an error."""
    folder = _make_folder()  # not in a thread: a cancelled caller would not know what it made
    places = {"K8E_DATA_DIR": str(folder / "d"), "K8E_RUN_DIR": str(folder / "r")}
    host = Host(settings.load({**_home(), **places}))
    whole = False
    try:
        await asyncio.to_thread(host.prepare)
        yield host
        whole = True
    finally:
        if not whole:  # a signal came
            await _others_end()
            kill_mentioning(str(folder))
        host.close()
        left = [*traces.mounts(str(folder)), *map(str, traces.processes(str(folder)))]
        if not left:
            shutil.rmtree(folder, ignore_errors=True)
    if left:
        raise BrokenPromise(f"left on this machine: {', '.join(left)}")


async def _others_end() -> None:
    """Wait for work that its caller has left behind: a probe's sandbox, threads."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=PATIENCE)
    await asyncio.get_running_loop().shutdown_default_executor()


def _make_folder() -> Path:
    # A short path: unix sockets allow 108 bytes.
    folder = Path(tempfile.mkdtemp(prefix=f"k8e-{os.getpid()}-", dir="/tmp"))
    for part in (folder, folder / "d", folder / "r"):
        part.mkdir(exist_ok=True)
        part.chmod(OPEN_FOLDER)
    return folder


def _home() -> dict[str, str]:
    """Of the environment, what says where tools are, and which cluster has the sandboxes."""
    names = ("K8E_HOME", "PATH", *CLUSTER)
    return {name: os.environ[name] for name in names if name in os.environ}


async def runtimes(host: Host, asked: Sequence[str] | None) -> list[Runtime]:
    """The runtimes that were asked for, which must work; otherwise all that work."""
    known = Runtimes(host)
    if asked:
        return [await known.choose(name) for name in dict.fromkeys(map(known.resolve, asked))]
    support = await known.support()
    usable: list[Runtime] = [known.all[item.runtime] for item in support if item.usable]
    if not usable:
        raise errors.RuntimeUnusable(
            "no runtime works on this machine: "
            + "; ".join(f"{item.runtime}: {item.detail}" for item in support),
            hint="k8e doctor shows the details",
        )
    return usable


async def results(
    host: Host, runtime: Runtime, ids: Iterable[str]
) -> AsyncGenerator[runner.BehaviourResult]:
    """The results of the behaviours; afterwards nothing of their sandboxes may be left."""
    folders = (host.settings.data_dir, host.settings.run_dir)
    recorded = Recorded(runtime, IN_PODS if host.settings.kubeconfig else "")
    async with contextlib.aclosing(runner.results(recorded, ids, folders=folders)) as found:
        async for result in found:
            yield result
    left = await asyncio.to_thread(recorded.left, folders)
    if left:
        raise BrokenPromise(f"left of the sandboxes: {', '.join(left[:20])}")


class Recorded:
    """A runtime that remembers what it launched."""

    def __init__(self, runtime: Runtime, name: str = "") -> None:
        self.name = name or runtime.name
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

    def left(self, folders: Sequence[Path]) -> list[str]:
        """The traces of the sandboxes that are still on this host."""
        return [item for name in self.launched for item in traces.traces(name, folders)]
