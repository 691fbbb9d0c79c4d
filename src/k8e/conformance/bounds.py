"""Bounds of everything that a sandbox can fill, and that whoever meets one is told which it was."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

from k8e import errors
from k8e.conformance.behaviours import Broken, behaviour, equal, expect
from k8e.conformance.confinement import ask
from k8e.conformance.limits import BOMB, HOG
from k8e.conformance.sandbox import PATIENCE, PYTHON, Outcome, Sandbox
from k8e.conformance.stage import Stage
from k8e.guest import wire
from k8e.model import MIB, Limits
from k8e.sessions.limiting import Watch

_WRITABLE = """
import os
mounts = [line.split()[1:4:2] for line in open('/proc/mounts')]
rw = [point for point, options in mounts if 'rw' in options.split(',')]
sealed = {point for point, options in mounts if point != '/' and point not in rw
          and not any(other.startswith(point + '/') for other in rw)}
places = {}
for folder, below, _ in os.walk('/'):
    if folder == '/proc' or folder in sealed: below.clear()
    if os.access(folder, os.W_OK):
        told = os.statvfs(folder)
        places[folder] = told.f_blocks * told.f_frsize, told.f_files
print(places)
"""
_MANY = """
import os, sys
made, number = 0, 0
try:
    for made in range(300000): os.close(os.open(f'{sys.argv[1]}/m{made}', os.O_CREAT | os.O_WRONLY))
except OSError as error: number = error.errno
print((made, number))
for at in range(made): os.unlink(f'{sys.argv[1]}/m{at}')
"""
_OPEN = "import os\nfiles = []\nwhile True: files.append(os.open('/dev/null', os.O_RDONLY))"


@behaviour("bounds.places")
async def places(stage: Stage) -> None:
    """Every folder that programs can write to has a bounded size and a bounded number of files."""
    limits = Limits(memory=96 * MIB, disk=16 * MIB)
    sandbox = await stage.launch(memory=limits.memory, disk=limits.disk)
    found = await ask(sandbox, _WRITABLE)
    expect({"/workspace", "/tmp", "/var/tmp"} <= set(found), f"writable are only {found}")  # noqa: S108 - paths in the sandbox
    for place, (size, files) in found.items():
        expect(0 < size <= limits.memory, f"{place} has room for {size} bytes")
        expect(0 < files <= 100_000, f"{place} has room for {files} files")


@behaviour("bounds.files-in-memory")
async def files_in_memory(stage: Stage) -> None:
    """Empty files cannot use up the memory: their number is bounded, and the sandbox goes on."""
    sandbox = await stage.launch(memory=96 * MIB)
    for place in ("/tmp", "/home/user", "/var/tmp", "/dev/shm"):  # noqa: S108 - paths in the sandbox
        made, number = await ask(sandbox, _MANY, place)
        equal(number, errno.ENOSPC, f"error in {place} after {made} files")
        expect(100 <= made <= 10_000, f"{made} files went into {place}")
    equal((await sandbox.run(["echo", "alive"])).stdout, b"alive\n", "the next program")


@behaviour("bounds.inodes")
async def inodes(stage: Stage) -> None:
    """The workspace holds as many files as its limit says, and the failure names that limit."""
    sandbox = await stage.launch(disk=32 * MIB, inodes=600)
    made, number = await ask(sandbox, _MANY, "/workspace")
    equal(number, errno.ENOSPC, f"error after {made} files")
    expect(400 <= made <= 640, f"{made} files went into a workspace for 600")
    done = await sandbox.shell("for n in {1..999}; do : > m$n || exit 1; done")
    await _told(sandbox, done, "inodes", inodes=600)


@behaviour("bounds.open-files")
async def open_files(stage: Stage) -> None:
    """A process opens as many files as the limit says, and the failure names that limit."""
    sandbox = await stage.launch(open_files=1024)
    done = await sandbox.python(_OPEN)
    expect(b"Too many open files" in done.stderr, f"an endless opener: {done.story()}")
    await _told(sandbox, done, "open_files", open_files=1024)
    equal((await sandbox.run(["echo", "alive"])).stdout, b"alive\n", "the next program")


@behaviour("bounds.output")
async def output(stage: Stage) -> None:
    """A run that prints more than its limit is stopped and says so, read or not; others go on."""
    sandbox = await stage.launch(output=2 * MIB)
    other = await sandbox.start(["cat"], stdin=True)
    done = await sandbox.run(["yes"], timeout=PATIENCE)
    equal(done.status, "killed", "status of a flood")
    expect(done.exit["truncated"], "a flood was cut off in silence")
    equal(len(done.stdout), 2 * MIB, "what was kept of it")
    await _told(sandbox, done, "output", output=2 * MIB)
    left = await sandbox.start(["yes"], output="ring", background=True, window=1)
    left.cancel()
    ended = await (await sandbox.attach(left.id, seq=1 << 60)).finish()
    await _told(sandbox, ended, "output", output=2 * MIB)
    equal((await sandbox.run(["echo", "x" * 99])).code, 0, "exit code of one that prints little")
    await other.type(b"still here")
    other.end_input()
    equal((await other.finish()).stdout, b"still here", "another program")


@behaviour("bounds.disk-told")
async def disk_told(stage: Stage) -> None:
    """A program that fails on a full disk names the limit; so does a file that does not fit."""
    sandbox = await stage.launch(disk=8 * MIB, memory=96 * MIB)
    done = await sandbox.shell("head -c 20M /dev/zero > full")
    await _told(sandbox, done, "disk", disk=8 * MIB)
    try:
        await sandbox.write("more", b"x" * MIB)
    except OSError as error:
        equal(error.errno, errno.ENOSPC, "error of a file that does not fit")
        expect("limit disk of /workspace is 8 MiB" in str(error), f"it says {error}")
    else:
        raise Broken("a file went into a full workspace")
    await sandbox.shell("rm -f full more")
    done = await sandbox.shell("head -c 90M /dev/zero > /tmp/full")
    await _told(sandbox, done, "memory", memory=96 * MIB)
    await sandbox.shell("rm /tmp/full")
    equal((await sandbox.shell("exit 3")).exit.get("limits"), None, "limits of an ordinary failure")


@behaviour("bounds.pids-told")
async def pids_told(stage: Stage) -> None:
    """A program that cannot fork names the limit; so does a start that is refused for it."""
    sandbox = await stage.launch(pids=40)
    script = BOMB.replace("os._exit(0)", "os._exit(5)")
    done = await sandbox.python(script, "fork")
    equal(done.code, 5, "exit code of a fork bomb")
    await _told(sandbox, done, "pids", pids=40)
    try:
        for _ in range(40):
            await sandbox.start(["sleep", "1000"])
    except BlockingIOError as error:
        expect("limit pids of the session is 40" in str(error), f"it says {error}")
    else:
        raise Broken("programs could be started after a fork bomb")


@behaviour("bounds.memory-told")
async def memory_told(stage: Stage) -> None:
    """A program that wants too much memory names the limit, or its sandbox does as it ends."""
    sandbox = await stage.launch(memory=64 * MIB)
    try:
        done = await sandbox.run([PYTHON, "-c", HOG.format(mib=200)])
    except errors.GuestFailed:
        async with asyncio.timeout(PATIENCE):
            reason = await sandbox.guest.wait()
        expect("64 MiB" in reason and "memory" in reason, f"the sandbox ended: {reason}")
        return
    await _told(sandbox, done, "memory", memory=64 * MIB)


async def _told(sandbox: Sandbox, done: Outcome, name: str, **limits: int) -> None:
    """The end of a program, as a gateway tells it, names a limit with its value."""
    watch = Watch(sandbox.guest.sandbox_id, Limits(**limits))
    told = wire.unpack_dict(watch.amend(wire.pack(done.exit)))
    met: list[dict[str, Any]] = told.get("limits") or []
    found = {str(item["limit"]): item for item in met}
    expect(name in found, f"{name} is not among the limits {list(found)} of: {done.story()}")
    equal(found[name]["value"], limits[name], f"the limit {name}")
    expect("create a session with more" in found[name]["message"], f"{found[name]}")
