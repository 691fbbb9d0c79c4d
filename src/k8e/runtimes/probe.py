"""Probes: a real sandbox with every limit, started in bounded time to see what works here."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from k8e import errors, link, rootless
from k8e.guest import wire
from k8e.model import MIB, Limits, SandboxSpec, new_id
from k8e.runtimes import cgroups
from k8e.runtimes.base import Binding, Feature, Guest, Support

PROBE_SECONDS = 30.0
_LIMITS = Limits(cpus=1, memory=128 * MIB, pids=64, disk=8 * MIB)


class ProbeLauncher(Protocol):
    """The functions of a runtime that a probe uses."""

    name: str

    async def launch(self, spec: SandboxSpec) -> Guest: ...
    async def try_features(self, guest: Guest) -> list[Feature]: ...


async def version_of(program: str) -> str:
    """The first line that a program says of its version."""
    process = await asyncio.create_subprocess_exec(
        program,
        "--version",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(5):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        return "unknown version"
    return (
        output.decode("utf-8", "replace").splitlines()[0].strip() if output else "unknown version"
    )


async def try_launch(runtime: ProbeLauncher, network: str = "") -> Support:
    """Start a sandbox, bind it, run a program in it, and check each promise."""
    began = time.monotonic()
    spec = SandboxSpec(
        sandbox_id=new_id("sb"), limits=_LIMITS, runtime=runtime.name, network=network
    )
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            guest = await runtime.launch(spec)
            try:
                features = [*await _features(guest), *await runtime.try_features(guest)]
            finally:
                await asyncio.shield(guest.kill())
    except TimeoutError:
        return Support(runtime.name, False, f"no sandbox started within {PROBE_SECONDS:g} s")
    except (errors.K8eError, OSError) as error:
        return Support(runtime.name, False, str(error))
    took = (time.monotonic() - began) * 1000
    return Support(
        runtime.name, True, f"a sandbox ran and was removed in {took:.0f} ms", "", features
    )


async def _features(guest: Guest) -> list[Feature]:
    await guest.bind(Binding(env={}))
    code = await _run(guest, ["/bin/sh", "-c", "id -u && test -w /workspace"])
    if code:
        raise errors.RuntimeUnusable(f"a program in the sandbox failed with exit code {code}")
    return [_limit(name, guest.sandbox_id) for name in ("cpu", "memory", "pids")]


def _limit(controller: str, sandbox_id: str) -> Feature:
    """Check that the kernel enforces a limit of the sandbox."""
    name = f"{controller} limit"
    value = cgroups.limit_of(sandbox_id, controller)
    if value:
        kind = "cgroup v2" if cgroups.is_unified() else "cgroup v1"
        return Feature(name, True, f"{kind}: {value}")
    fix = f"enable the {controller} cgroup controller on this host"
    if rootless.inside():
        fix = "run k8e as root, or give it a control group: docs/howto/rootless.md"
    return Feature(name, False, f"no {controller} cgroup holds the limit of a sandbox", fix)


async def _run(guest: Guest, argv: list[str]) -> int:
    """The exit code of a program in the sandbox."""
    done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def on_frame(kind: int, body: bytes) -> None:
        if done.done():
            return
        if kind == wire.EXIT:
            done.set_result(int(wire.unpack_dict(body)["code"]))
        elif kind == wire.ERROR:
            done.set_exception(errors.from_wire(wire.unpack_dict(body)))

    def on_lost() -> None:
        if not done.done():
            done.set_exception(errors.GuestFailed("the link to the guest was lost"))

    call = {"op": "exec", "argv": argv, "timeout": 10.0}
    channel: link.Channel = (await guest.connect()).open(call, on_frame, on_lost)
    try:
        return await done
    finally:
        channel.close()
