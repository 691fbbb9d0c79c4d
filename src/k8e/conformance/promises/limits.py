"""Limits, proved from inside: each holds, and the result of the run names the one that was met."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from typing import Any

from k8e import errors
from k8e.conformance.behaviour import BrokenPromise, NotApplicable, behaviour, equal, expect
from k8e.conformance.promises.confinement import ask
from k8e.conformance.sandbox import PATIENCE, PYTHON, Outcome, Program, Sandbox
from k8e.conformance.stage import Stage
from k8e.guest import wire
from k8e.model import MIB, Limits
from k8e.runtimes import cgroups
from k8e.sessions.limits import LimitWatch

_SPIN = """
import os, resource, time
pipes, began = [], time.monotonic()
for _ in range(2):
    out, into = os.pipe()
    if not os.fork():
        turns = 0
        while time.monotonic() < began + 1:
            for _ in range(2000): turns += 1
        os.write(into, str(turns).encode()); os._exit(0)
    pipes.append(out)
turns = sum(int(os.read(out, 99)) for out in pipes)
for _ in pipes: os.wait()
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print((turns, (used.ru_utime + used.ru_stime) / (time.monotonic() - began)))
"""
BOMB = """
import os, sys, threading, time
made, refused = 0, ''
try:
    while made < 5000:
        if sys.argv[1] == 'fork':
            if not os.fork(): time.sleep(1000)
        else:
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        made += 1
except (OSError, RuntimeError) as error: refused = str(error)
print((made, bool(refused)), flush=True)
os._exit(0)
"""
HOG = """
import time
data = bytearray({mib} << 20)
for at in range(0, len(data), 4096): data[at] = 1
print('got it', flush=True)
time.sleep(1000)
"""
FILL = """
import os, sys
size, number = 0, ''
try:
    fd = os.open(sys.argv[1] + '/filler', os.O_WRONLY | os.O_CREAT, 0o600)
    while size < 1 << 31: size += os.write(fd, bytes(1 << 20))
except OSError as error: number = error.errno
print((size, number))
os.unlink(sys.argv[1] + '/filler')
"""


@behaviour("limits.cpu")
async def cpu(stage: Stage) -> None:
    """Spinning processes together get about the CPU time of their limit, not more."""
    await check_quarter(await stage.launch(cpus=0.25), await stage.launch(cpus=2.0))


async def check_quarter(tight: Sandbox, free: Sandbox) -> None:
    """Check that one has about a quarter of a CPU where the other has as much as it wants."""
    seen: list[str] = []
    for _ in range(3):  # a busy host can spoil a measurement, hardly all of them
        used, began = cgroups.cpu_seconds(tight.guest.sandbox_id), time.monotonic()
        slow, share = await ask(tight, _SPIN)
        after = cgroups.cpu_seconds(tight.guest.sandbox_id)
        if used is not None and after is not None:  # the host knows best
            share = (after - used) / (time.monotonic() - began)
        if 0.05 < share < 0.35:
            return
        # gVisor counts the time for which it was held up; then the work done is what tells.
        fast, _ = await ask(free, _SPIN)
        if 0.01 < slow / fast < 0.5:
            return
        seen.append(f"{share:.2f} CPUs, {slow / fast:.2f} of the work")
    raise BrokenPromise(f"a limit of 0.25 CPUs, against one of 2.0: {seen}")


@behaviour("limits.cpu-weight")
async def cpu_weight(stage: Stage) -> None:
    """Where CPUs are busy, the gateway and the host come before all sandboxes together."""
    await stage.launch()
    weight = cgroups.relative_weight()
    if weight is None:
        raise NotApplicable("sandboxes have no control groups here")
    expect(weight < 0.5, f"all sandboxes weigh {weight:g} times of another group")


@behaviour("limits.memory")
async def memory(stage: Stage) -> None:
    """A program gets no more memory than the limit; an end of the sandbox is explained."""
    sandbox = await stage.launch(memory=64 * MIB)
    try:
        done = await sandbox.run([PYTHON, "-c", HOG.format(mib=200)])
    except errors.GuestFailed:
        await _explained(sandbox)
        return
    expect(done.code in (1, 137), f"a program that wanted too much: {done.story()}")
    equal(done.stdout, b"", "its output")


@behaviour(
    "limits.memory-alone",
    gvisor="gVisor has no limit on one process's memory and no killer of its own: the sandbox ends "
    "as a whole, and says why",
    kubernetes="the limit is the pod's: the sandbox ends as a whole, and says why",
)
async def memory_alone(stage: Stage) -> None:
    """A program that wants more memory than the limit fails alone; the guest and others go on."""
    sandbox = await stage.launch(memory=64 * MIB)
    other = await sandbox.start(["cat"], stdin=True)
    for _ in range(2):
        done = await sandbox.run([PYTHON, "-c", HOG.format(mib=200)])
        expect(done.code in (1, 137), f"a program that wanted too much: {done.story()}")
    await other.type(b"still here")
    other.end_input()
    equal((await other.finish()).stdout, b"still here", "another program")
    equal((await sandbox.run(["echo", "alive"])).stdout, b"alive\n", "the next program")


@behaviour("limits.memory-together")
async def memory_together(stage: Stage) -> None:
    """Programs that exceed the limit together do not get it; an end of the sandbox is explained."""
    sandbox = await stage.launch(memory=128 * MIB)
    programs: list[Program] = []
    with contextlib.suppress(errors.GuestFailed):  # it may be over before all have started
        while len(programs) < 8:
            programs.append(await sandbox.start([PYTHON, "-c", HOG.format(mib=48)]))
    # One that got its share may be the one that ends for want of memory when the next asks.
    ends = [asyncio.create_task(program.finish()) for program in programs]
    ended, running = await asyncio.wait(ends, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
    for task in running:
        task.cancel()
    await asyncio.gather(*ends, return_exceptions=True)
    expect(ended, "eight times 48 MiB fit into 128 MiB")
    if len(programs) < 8 or any(program.lost.is_set() for program in programs):
        await _explained(sandbox)
    else:
        equal((await sandbox.run(["echo", "alive"])).stdout, b"alive\n", "the next program")


async def _explained(sandbox: Sandbox) -> None:
    """Expect that the sandbox ended for want of memory, and that calls fail with that reason."""
    async with asyncio.timeout(PATIENCE):
        reason = await sandbox.guest.wait()
    expect("out of memory" in reason, f"the sandbox ended without an explanation: {reason}")
    try:
        await sandbox.guest.connect()
    except errors.SandboxDied as error:
        expect("out of memory" in error.message, f"the error says {error.message}")


@behaviour(
    "limits.memory-files",
    kubernetes="the limit is the pod's: a sandbox whose files need more memory ends as a whole",
)
async def memory_files(stage: Stage) -> None:
    """Files in /tmp, /home, /var/tmp and /dev/shm are bounded by the memory limit."""
    sandbox = await stage.launch(memory=96 * MIB)
    for place in ("/tmp", "/home/user", "/var/tmp", "/dev/shm"):  # noqa: S108 - paths in the sandbox
        size, number = await ask(sandbox, FILL, place)
        equal(number, errno.ENOSPC, f"error in {place} after {size} bytes")
        expect(8 * MIB <= size <= 96 * MIB, f"{size} bytes went into {place}")
    equal((await sandbox.run(["echo", "alive"])).stdout, b"alive\n", "the next program")


async def _bomb(sandbox: Sandbox, kind: str) -> None:
    made, refused = await ask(sandbox, BOMB, kind)
    expect(refused, f"{made} of kind {kind} could be made")
    expect(10 <= made <= 64, f"{made} of kind {kind} were made before the limit of 64")


@behaviour("limits.pids")
async def pids(stage: Stage) -> None:
    """A fork bomb meets the limit, the guest still answers, and its end gives everything back."""
    sandbox = await stage.launch(pids=64)
    await _bomb(sandbox, "fork")  # its children live on
    equal(await sandbox.call("ping"), {}, "the guest's answer during a fork bomb")
    await sandbox.write("during", b"works")
    equal(await sandbox.read("during"), b"works", "files during a fork bomb")
    for item in (await sandbox.call("execs"))["execs"]:
        expect(item["status"] == "completed", f"{item}")
    try:
        await _start_until_refused(sandbox)
    finally:
        done = await _free(sandbox)
    equal(done.stdout, b"alive\n", "a program after the bomb")


async def _start_until_refused(sandbox: Sandbox) -> None:
    """With no process left, starting one is a clear error."""
    try:
        for _ in range(64):
            await sandbox.start(["sleep", "1000"])
    except BlockingIOError:
        return
    raise BrokenPromise("64 more programs could be started after a fork bomb")


async def _free(sandbox: Sandbox) -> Outcome:
    """End all processes that programs left behind, then run one more."""
    for item in (await sandbox.call("execs"))["execs"]:
        await sandbox.call("signal", id=item["id"], terminate=True)
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                await sandbox.shell("kill -9 -1")
                return await sandbox.run(["echo", "alive"])
            except BlockingIOError:
                continue


@behaviour("limits.threads")
async def threads(stage: Stage) -> None:
    """Threads count as processes do."""
    sandbox = await stage.launch(pids=64)
    await _bomb(sandbox, "thread")
    equal((await sandbox.run(["echo", "alive"])).stdout, b"alive\n", "a program after the bomb")


@behaviour(
    "limits.disk",
    kubernetes="the kubelet looks now and then how large an emptyDir is, and then ends the pod",
)
async def disk(stage: Stage) -> None:
    """The workspace holds about as many bytes as its limit, also through a sparse file."""
    sandbox = await stage.launch(disk=16 * MIB)
    size, number = await ask(sandbox, FILL, "/workspace")
    equal(number, errno.ENOSPC, f"error after {size} bytes")
    expect(12 * MIB <= size <= 16 * MIB, f"{size} bytes went into 16 MiB")
    done = await sandbox.shell(
        "truncate -s 1G sparse && dd if=/dev/zero of=sparse bs=1M seek=500 count=64 conv=notrunc; "
        "df -B1 --output=used . | tail -1"
    )
    expect(int(done.text.split()[-1]) <= 16 * MIB, f"a sparse file took {done.text} bytes")
    equal(
        (await sandbox.shell("rm sparse; echo x > small; cat small")).stdout, b"x\n", "a small file"
    )


@behaviour("limits.inodes", kubernetes="Kubernetes has no limit on the files of an emptyDir")
async def inodes(stage: Stage) -> None:
    """The workspace holds a bounded number of files, however small."""
    sandbox = await stage.launch(disk=8 * MIB)
    script = (
        "made, number = 0, 0\n"
        "try:\n"
        "    for made in range(200000): open(f'/workspace/{made}', 'w').close()\n"
        "except OSError as error: number = error.errno\n"
        "print((made, number))"
    )
    made, number = await ask(sandbox, script)
    equal(number, errno.ENOSPC, f"error after {made} files")


@behaviour("limits.open-files")
async def open_files(stage: Stage) -> None:
    """A program that opens files without end meets a limit of its own, and the guest does not."""
    sandbox = await stage.shared()
    script = (
        "import os; files = []\n"
        "try:\n"
        "    while len(files) < 1000000: files.append(os.open('/dev/null', os.O_RDONLY))\n"
        "except OSError as error: print((len(files), error.errno))"
    )
    opened, number = await ask(sandbox, script)
    expect(number in (errno.EMFILE, errno.ENFILE), f"error {number} after {opened} files")
    equal((await sandbox.run(["echo", "alive"])).stdout, b"alive\n", "the next program")


@behaviour("limits.core-dumps")
async def core_dumps(stage: Stage) -> None:
    """A crashing program leaves no core dump."""
    sandbox = await stage.shared()
    await sandbox.shell("mkdir -p crash")
    done = await sandbox.run(["/bin/sh", "-c", "kill -SEGV $$"], cwd="crash")
    equal(done.code, 139, "exit code")
    equal(await sandbox.list("crash"), [], "files after a crash")


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
async def inode_bound(stage: Stage) -> None:
    """The workspace holds as many files as its limit says, and the failure names that limit."""
    sandbox = await stage.launch(disk=32 * MIB, inodes=600)
    made, number = await ask(sandbox, _MANY, "/workspace")
    equal(number, errno.ENOSPC, f"error after {made} files")
    expect(400 <= made <= 640, f"{made} files went into a workspace for 600")
    done = await sandbox.shell("for n in {1..999}; do : > m$n || exit 1; done")
    await _told(sandbox, done, "inodes", inodes=600)


@behaviour("bounds.open-files")
async def open_file_bound(stage: Stage) -> None:
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
        raise BrokenPromise("a file went into a full workspace")
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
        raise BrokenPromise("programs could be started after a fork bomb")


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
    """Expect that the end of a program, as a gateway reports it, names a limit with its value."""
    watch = LimitWatch(sandbox.guest.limit_hits, Limits(**limits))
    told = wire.unpack_dict(watch.amend(wire.pack(done.exit)))
    met: list[dict[str, Any]] = told.get("limits") or []
    found = {str(item["limit"]): item for item in met}
    expect(name in found, f"{name} is not among the limits {list(found)} of: {done.story()}")
    equal(found[name]["value"], limits[name], f"the limit {name}")
    expect("create a session with more" in found[name]["message"], f"{found[name]}")
