"""Beginning and end of sandboxes: nothing is left, nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
from collections.abc import Generator
from pathlib import Path

from k8e import errors
from k8e.conformance.behaviours import Broken, NotApplicable, behaviour, equal, expect
from k8e.conformance.sandbox import PATIENCE, Sandbox
from k8e.conformance.stage import Stage
from k8e.conformance.traces import kill_all, processes, traces
from k8e.model import Limits, SandboxSpec, new_id
from k8e.runtimes.base import NotRemoved

FREEZE, THAW = 0xC0045877, 0xC0045878  # of a file system: FIFREEZE and FITHAW

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


@contextlib.contextmanager
def frozen(folder: Path) -> Generator[None]:
    """A file system on which writers wait, so that not even SIGKILL ends them, until this does."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, FREEZE, 0)
        try:
            yield
        finally:
            fcntl.ioctl(fd, THAW, 0)
    finally:
        os.close(fd)


def _workspace(sandbox_id: str) -> Path:
    """Where the host has the workspace of a sandbox mounted."""
    lines = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines()
    points = [line.split(" ")[4] for line in lines if sandbox_id in line and " - ext4 " in line]
    if not points:
        raise NotApplicable("the workspaces of this runtime are no file systems of this host")
    return Path(points[-1])


@behaviour("life.resists")
async def resists(stage: Stage) -> None:
    """A sandbox whose process cannot be killed is told, and nothing of it is lost from sight."""
    sandbox = await stage.launch()
    sandbox_id = sandbox.guest.sandbox_id
    try:
        with frozen(_workspace(sandbox_id)):
            program = await sandbox.start(["/bin/sh", "-c", "echo go; echo > /workspace/file"])
            await program.until(b"go\n")
            async with asyncio.timeout(PATIENCE):
                # Nobody reports that a process has begun to wait for the kernel.
                while not await asyncio.to_thread(waits_for_kernel, sandbox_id):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            try:
                await sandbox.guest.kill()
            except NotRemoved as error:
                expect("1 process" in error.message, f"what is left: {error.message}")
            else:
                raise Broken("a process that could not end is said to be gone")
            left = await asyncio.to_thread(traces, sandbox_id, stage.folders)
            for kind in ("cgroup", "file", "device"):
                expect(any(item.startswith(kind) for item in left), f"no {kind} is left: {left}")
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EPERM, errno.ENOTTY):
            raise NotApplicable("the workspaces here cannot be frozen") from None
        raise
    async with asyncio.timeout(PATIENCE):
        await _purge_at_last(stage, sandbox_id)
    await _gone(stage, sandbox_id)


async def _purge_at_last(stage: Stage, sandbox_id: str) -> None:
    while True:
        with contextlib.suppress(NotRemoved):
            await stage.runtime.purge(sandbox_id)
            return
        await asyncio.sleep(0.05)


def waits_for_kernel(sandbox_id: str) -> bool:
    """Whether a thread of the sandbox is in a state in which no signal reaches it."""
    for pid in processes(sandbox_id):
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):
                if stat.read_text("utf-8", "replace").rpartition(")")[2].split()[0] == "D":
                    return True
    return False


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
