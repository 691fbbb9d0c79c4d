"""Beginning and end of sandboxes, pauses, and what outlives a gateway."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import secrets
import time
import warnings
from collections.abc import Generator
from functools import partial
from pathlib import Path

from k8e import errors
from k8e.client.results import Stdout
from k8e.conformance.behaviour import (
    BrokenPromise,
    NotApplicable,
    behaviour,
    equal,
    expect,
    in_a_room,
)
from k8e.conformance.lab.far import CALLING_PORT, OTHER, WEB
from k8e.conformance.lab.gateways import eventually
from k8e.conformance.lab.rooms import Room
from k8e.conformance.sandbox import PATIENCE, Sandbox
from k8e.conformance.stage import Stage
from k8e.conformance.traces import kill_all, loop_devices, processes, traces
from k8e.model import Limits, SandboxSpec, new_id
from k8e.runtimes.base import NotRemoved

FREEZE, THAW = 0xC0045877, 0xC0045878  # of a file system: FIFREEZE and FITHAW
# What the kernel's threads wait in until a file system is thawed; some kernels do not say it.
FROZEN_WAITS = ("percpu_rwsem_wait", "percpu_down_read", "__percpu_down_read", "0", "")

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
    equal([item for item in left if not item.startswith("device ")], [], "left on the host")
    # Any program that makes a mount namespace, as each sandbox does that is started at this moment,
    # has a copy of all mounts until it lets go of them; the kernel frees the device after the last.
    deadline = time.monotonic() + PATIENCE
    while devices := await asyncio.to_thread(loop_devices, sandbox_id):
        expect(time.monotonic() < deadline, f"left on the host: {devices}")
        await asyncio.sleep(0.05)


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
    """Ending a sandbox twice, or purging one that is gone or never was, is no error."""
    sandbox = await stage.launch()
    await sandbox.guest.kill()
    await sandbox.guest.kill()
    await stage.runtime.purge(sandbox.guest.sandbox_id)
    await stage.runtime.purge("sb-neverwas")


@contextlib.contextmanager
def frozen(folder: Path) -> Generator[None]:
    """A frozen file system: until the block ends, its writers wait; not even SIGKILL ends them."""
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
    """The host's mount point of a sandbox's workspace."""
    lines = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines()
    points = [line.split(" ")[4] for line in lines if sandbox_id in line and " - ext4 " in line]
    if not points:
        raise NotApplicable("the workspaces of this runtime are no file systems of this host")
    return Path(points[-1])


@behaviour("life.resists")
async def resists(stage: Stage) -> None:
    """A sandbox whose process cannot be killed is reported, and nothing of it is forgotten."""
    sandbox = await stage.launch()
    sandbox_id = sandbox.guest.sandbox_id
    try:
        with frozen(_workspace(sandbox_id)):
            program = await sandbox.start(["/bin/sh", "-c", "echo go; echo > /workspace/file"])
            await program.until(b"go\n")
            async with asyncio.timeout(PATIENCE):
                # There is no notification that a process has begun to wait for the kernel.
                while not await asyncio.to_thread(waits_for_kernel, sandbox_id):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            try:
                await sandbox.guest.kill()
            except NotRemoved as error:
                expect("1 process" in error.message, f"what is left: {error.message}")
            else:
                raise BrokenPromise("a process that could not end is said to be gone")
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
    """Whether a thread of the sandbox waits for a frozen file system, where no signal reaches it.

    On a busy machine others are in the same state, for a page from the disk.
    """
    for pid in processes(sandbox_id):
        for task in Path(f"/proc/{pid}/task").glob("*"):
            with contextlib.suppress(OSError):
                stat = (task / "stat").read_text("utf-8", "replace")
                waits = stat.rpartition(")")[2].split()[0] == "D"
                if waits and (task / "wchan").read_text("ascii") in FROZEN_WAITS:
                    return True
    return False


@behaviour("life.death-noticed")
async def death_noticed(stage: Stage) -> None:
    """The death of a sandbox is noticed and reported to every call that waits for it or uses it."""
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
    raise BrokenPromise("a dead sandbox could be connected to")


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


PAUSES = 10
SNAPSHOTS = 30
CALL = f"{OTHER}:{CALLING_PORT}"  # a way out for puppets that no name leads to


@in_a_room("keep.pauses")
def pauses(room: Room) -> None:
    """Ten pauses in a row lose neither a file, a running program nor its output."""
    client = room.scene.client
    script = (
        "import time\nfor number in range(100000):\n"
        "    open('/workspace/log', 'a').write(f'{number}\\n'); time.sleep(0.01)"
    )
    with room.beside() as kept:
        run = client.start(kept.session_id, ["python3", "-c", script])
        seen = 0
        for number in range(PAUSES):
            client.write_file(kept.session_id, f"file{number}", str(number) * 1000)
            client.pause_session(kept.session_id)
            client.resume_session(kept.session_id)
            for older in range(number + 1):
                text = client.read_file(kept.session_id, f"file{older}")
                equal(text, str(older) * 1000, f"a file after {number + 1} pauses")
            # It goes on, and wrote every number once and in order.
            seen = eventually(partial(_longer, room, kept.session_id, seen))
        run.kill()
        log = client.read_file(kept.session_id, "log").split()
        equal(log, [str(number) for number in range(len(log))], "what the program wrote")


def _longer(room: Room, session_id: str, before: int) -> int:
    try:
        count = room.scene.client.read_file(session_id, "log").count("\n")
    except FileNotFoundError:  # the program has not begun to write yet
        return 0
    return count if count > before else 0


@in_a_room("keep.nothing-of-others")
def nothing_of_others(room: Room) -> None:
    """A session that comes after another finds nothing of it: files, variables, programs, names."""
    client, word = room.scene.client, f"word-{secrets.token_hex(8)}"
    leave = (
        f"for d in /workspace /tmp /var/tmp /dev/shm /home/user; do echo {word} > $d/{word}; done; "
        f"(exec -a {word} sleep 600) >/dev/null 2>&1 & disown; echo {word} > /home/user/.bashrc"
    )
    found = (
        f"grep -rl {word} /workspace /tmp /var/tmp /dev/shm /home 2>/dev/null; "
        f"grep -al {word} /proc/[0-9]*/environ 2>/dev/null | grep -v /$$/; "
        f"for p in /proc/[0-9]*; do test $p != /proc/$$ && grep -aq '{word[:-1]}[{word[-1]}]' "
        "$p/cmdline 2>/dev/null && cat $p/comm | grep sleep; done; true"
    )
    for _ in range(2):
        with room.beside(tenant="one") as before:
            room.scene.client.exec(before.session_id, ["bash", "-c", leave], env={"WORD": word})
            seen = client.exec(before.session_id, ["bash", "-c", found]).stdout
            expect(word in seen, f"the probe is blind: {seen}")
        with room.beside(tenant="two") as after:
            seen = client.exec(after.session_id, ["bash", "-c", found]).stdout
            equal(seen, "", "what is found of another session")


@in_a_room("keep.network-of-others")
def network_of_others(room: Room) -> None:
    """A session that comes after another has none of its connections, lookups and permissions."""
    before = Room(room.scene, room.runtime, "web.test", CALL, tenant="one")
    with contextlib.ExitStack() as stack:
        equal(before.ask("tcp", "web.test", 8080).said, WEB, "what is allowed")
        puppet = stack.enter_context(before.puppet(OTHER, CALLING_PORT))
        expect(not puppet.attempt("address").error, "the probe is blind")
        before.close()
        expect(puppet.is_cut(), "a connection outlived its session")
        room.scene.forget()
        with room.beside("other.test", tenant="two") as after:
            after.refused(["tcp", WEB, 8080], ["tcp", OTHER, CALLING_PORT], ["lookup", "web.test"])
            equal(room.scene.internet.asked, [], "names that were asked for again")
            equal(after.ask("tcp", "other.test", 8080).said, OTHER, "its own name")


_WRITER = """
import itertools, os
for number in itertools.count():
    with open('/workspace/new', 'w') as file: file.write(f'{number} ' * 20000)
    os.rename('/workspace/new', '/workspace/whole')
    with open('/workspace/log', 'a') as file: file.write(f'{number}\\n')
    if number == 5: print('ready', flush=True)
"""


def _saved(room: Room, session_id: str, name: str) -> list[str]:
    """Save a snapshot; return its warnings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        room.scene.client.save_snapshot(session_id, name)
    return [str(item.message) for item in told]


@in_a_room("keep.snapshot-while-writing")
def snapshot_while_writing(room: Room) -> None:
    """A snapshot taken while programs write restores files that were there, and says it is torn."""
    client, name = room.scene.client, f"s-{secrets.token_hex(6)}"
    with room.beside(tenant="") as busy:
        client.write_file(busy.session_id, "still", "still")
        client.write_file(busy.session_id, "writer.py", _WRITER)
        run = client.start(busy.session_id, ["python3", "-S", "writer.py"])
        for event in run.output():
            if isinstance(event, Stdout) and b"ready" in event.data:
                break
        told: list[str] = []
        for _ in range(SNAPSHOTS):  # on a busy machine, the writer may have no turn meanwhile
            told = _saved(room, busy.session_id, name)
            if told:
                break
            client.delete_snapshot(name)
        expect("changed while they were read" in str(told), f"{told}")
        run.kill()
        eventually(lambda: run.poll().status != "running")
        told = _saved(room, busy.session_id, f"{name}-still")
        equal(told, [], "what is said where nothing writes")
        whole = client.read_file(busy.session_id, "whole")
    for saved in (name, f"{name}-still"):
        session_id = client.create_session(room.runtime, (), snapshot=saved)
        try:
            equal(client.read_file(session_id, "still"), "still", "a file that nobody wrote")
            # What is replaced by a rename is whole, and what is appended to has no gap.
            words = client.read_file(session_id, "whole").split()
            equal((len(words), len(set(words))), (20000, 1), "words of a file, and different ones")
            log = client.read_file(session_id, "log").split("\n")[:-1]
            equal(log, [str(at) for at in range(len(log))], "what was added to a file")
        finally:
            client.destroy_session(session_id)
            client.delete_snapshot(saved)
    equal(words, whole.split(), "the file in the snapshot of a session at rest")
