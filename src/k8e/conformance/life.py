"""Beginning and end of sandboxes: nothing is left, nothing is lost."""

from __future__ import annotations

import asyncio

from k8e import errors
from k8e.conformance.behaviours import Broken, NotApplicable, behaviour, equal, expect
from k8e.conformance.sandbox import PATIENCE, Sandbox
from k8e.conformance.stage import Stage
from k8e.conformance.traces import kill_all, processes, traces
from k8e.model import Limits, SandboxSpec, new_id

_BUSY = (
    "for i in 1 2 3; do setsid sleep 1000 & done; echo data > /workspace/file; echo up; sleep 1000"
)


async def _busy(stage: Stage) -> Sandbox:
    """A sandbox with programs, daemons and files in it."""
    sandbox = await stage.launch()
    program = await sandbox.start(["/bin/bash", "-c", _BUSY])
    await program.until(b"up")
    return sandbox


async def _gone(stage: Stage, sandbox_id: str) -> None:
    left = await asyncio.to_thread(traces, sandbox_id, stage.folders)
    equal(left, [], "left on the host")


@behaviour("life.destroy")
async def destroy(stage: Stage) -> None:
    """Ending a busy sandbox leaves no process, mount, cgroup, device or file."""
    sandbox = await _busy(stage)
    sandbox_id = sandbox.guest.sandbox_id
    if not processes(sandbox_id):
        raise NotApplicable("the sandboxes of this runtime are not on this host")
    await sandbox.guest.kill()
    await _gone(stage, sandbox_id)
    async with asyncio.timeout(PATIENCE):
        expect(await sandbox.guest.wait(), "no reason was given")


@behaviour("life.destroy-twice")
async def destroy_twice(stage: Stage) -> None:
    """Ending a sandbox twice, or purging what is gone or never was, is no error."""
    sandbox = await stage.launch()
    await sandbox.guest.kill()
    await sandbox.guest.kill()
    await stage.runtime.purge(sandbox.guest.sandbox_id)
    await stage.runtime.purge("sb-neverwas")


@behaviour("life.death-noticed")
async def death_noticed(stage: Stage) -> None:
    """The death of a sandbox is noticed and told to whoever waits for it or uses it."""
    sandbox = await _busy(stage)
    if not kill_all(sandbox.guest.sandbox_id):
        raise NotApplicable("the sandboxes of this runtime are not on this host")
    async with asyncio.timeout(PATIENCE):
        expect(await sandbox.guest.wait(), "no reason was given")
    try:
        await sandbox.guest.connect()
    except errors.SandboxDied as error:
        expect(error.message, "no reason was given")
        return
    raise Broken("a dead sandbox could be connected to")


@behaviour("life.purge")
async def purge(stage: Stage) -> None:
    """Purging works with no live process, removes every trace, and can be repeated."""
    sandbox = await _busy(stage)
    sandbox_id = sandbox.guest.sandbox_id
    if not kill_all(sandbox_id):
        raise NotApplicable("the sandboxes of this runtime are not on this host")
    async with asyncio.timeout(PATIENCE):
        await sandbox.guest.wait()
    for _ in range(2):
        await stage.runtime.purge(sandbox_id)
        await _gone(stage, sandbox_id)


@behaviour("life.adopt")
async def adopt(stage: Stage) -> None:
    """After a restart the sandbox is found, with its programs, their output and its workspace."""
    sandbox = await stage.launch()
    script = "echo before; until test -e go; do sleep 0.02; done; echo after; exit 5"
    program = await sandbox.start(["/bin/bash", "-c", script])
    await program.until(b"before\n")
    await sandbox.write("kept", b"through the restart")
    old = sandbox.guest
    await stage.restart()
    expect(sandbox.guest is not old, "the sandbox was not found again")
    again = await sandbox.attach(program.id)
    equal(await sandbox.read("kept"), b"through the restart", "the workspace")
    await sandbox.write("go", b"")
    done = await again.finish()
    equal((done.stdout, done.code), (b"before\nafter\n", 5), "output and exit code")
    sandbox_id = sandbox.guest.sandbox_id
    await sandbox.guest.kill()
    await _gone(stage, sandbox_id)


@behaviour("life.workspace-empty")
async def workspace_empty(stage: Stage) -> None:
    """A new sandbox has an empty workspace that belongs to its user."""
    sandbox = await stage.launch()
    equal(await sandbox.list("/workspace"), [], "files in a new workspace")
    done = await sandbox.run(["stat", "-c", "%u %g", "/workspace"])
    equal(done.text, "1000 1000\n", "owner of the workspace")


@behaviour("life.launch-given-up")
async def launch_given_up(stage: Stage) -> None:
    """A launch that is given up half-way, at whatever point, leaves nothing behind."""
    for patience in (0.0, 0.005, 0.02, 0.05, 0.1, 0.15, 0.2):
        spec = SandboxSpec(sandbox_id=new_id("sb"), limits=Limits(), runtime=stage.runtime.name)
        try:
            async with asyncio.timeout(patience):
                guest = await stage.runtime.launch(spec)
            await guest.kill()
        except TimeoutError:
            pass
        await _gone(stage, spec.sandbox_id)
