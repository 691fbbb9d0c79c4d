"""What a sandbox hoards is missing nowhere else: not in another sandbox, and not on the host."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import subprocess
import sys
import tempfile

from k8e import errors
from k8e.conformance.behaviours import Broken, NotApplicable, behaviour, equal, expect, in_a_room
from k8e.conformance.confinement import ask
from k8e.conformance.lab.rooms import Room
from k8e.conformance.sandbox import PATIENCE, PYTHON, Program, Sandbox
from k8e.conformance.stage import Stage
from k8e.egress import namespaces
from k8e.egress.netlink import Netlink
from k8e.model import MIB

# Takes as much of something as it gets, and keeps it.
_KEEP = """
import ctypes, os, resource, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
AIO = {'x86_64': 206, 'aarch64': 0}[os.uname().machine]
kept = []
def taken(most, take):
    count = 0
    try:
        while count < most:
            got = take()
            if isinstance(got, int) and got < 0: break
            kept.append(got)
            count += 1
            if count % 500 == 0: print('.', end='', file=sys.stderr, flush=True)  # it goes on
    except OSError: pass
    return count
def watch():
    path = os.path.join(sys.argv[-1], 'w%d' % len(kept))
    os.mkdir(path)
    return libc.inotify_add_watch(kept[0], path.encode(), 0x2)
def aio():
    context = ctypes.c_ulong(0)
    return libc.syscall(AIO, 500, ctypes.byref(context))
TAKE = {
    'inotify': lambda: libc.inotify_init(),
    'watches': lambda: watch() if kept else libc.inotify_init(),
    'terminals': lambda: os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY),
    'aio': aio,
    'queues': lambda: libc.msgget(0, 0o1666),
    'semaphores': lambda: libc.semget(0, 100, 0o1666),
    'segments': lambda: libc.shmget(0, 4096, 0o1666),
    'sockets': lambda: socket.create_server(('127.0.0.1', 0)),
    'epolls': lambda: libc.epoll_create1(0),
    'timers': lambda: libc.timerfd_create(0, 0),
    'locks': lambda: os.memfd_create('x'),
}
"""
_HOARD = f"{_KEEP}\nprint(taken(int(sys.argv[2]), TAKE[sys.argv[1]]), flush=True)\ntime.sleep(600)"
_GET = f"{_KEEP}\nprint(taken(3, TAKE[sys.argv[1]]))"
# What the kernel keeps when its maker is gone; the host is to be as it was.
_FREE = """
FREE = {'queues': libc.msgctl, 'segments': libc.shmctl}
for number in kept:
    if sys.argv[1] in FREE: FREE[sys.argv[1]](number, 0, None)
    if sys.argv[1] == 'semaphores': libc.semctl(number, 0, 0)
"""
_MOST = {"sockets": 10_000, "terminals": 10_000, "segments": 5000, "queues": 5000}
_CROWDS = ("link6", "group6", "wide6", "near6", "group4", "local4", "near4", "direct4", "shout4")
_ADDRESSES = 400  # of each kind; a kernel has room for 1024 of each family, for all namespaces
_FEW = 2000  # of what costs gVisor more
_TMP = "/tmp"  # noqa: S108 - a path in the sandbox


async def _hoard(stage: Stage, *kinds: str) -> None:
    """Let one sandbox take all it can get of each; another one and the host still get some."""
    other, greedy = await stage.shared(), await stage.launch()
    for kind in kinds:
        before = await _get(other, kind)
        most = str(_MOST.get(kind, _FEW))
        program = await greedy.start([PYTHON, "-I", "-c", _HOARD, kind, most, _TMP])
        await program.until(b"\n")
        took = int(program.outcome.text)
        expect(took or not before, f"the probe of {kind} is blind")
        equal(await _get(other, kind), before, f"{kind} in another sandbox, after {took}")
        equal(await asyncio.to_thread(_on_host, kind), 3, f"{kind} on the host, after {took}")
        done = await greedy.run(["echo", "alive"])
        equal(done.stdout, b"alive\n", f"a program beside one that hoards {kind}")


async def _get(sandbox: Sandbox, kind: str) -> int:
    await sandbox.shell("rm -rf /tmp/hoard; mkdir /tmp/hoard")
    return await ask(sandbox, _GET + _FREE, kind, "/tmp/hoard")  # noqa: S108 - in the sandbox


def _on_host(kind: str) -> int:
    with tempfile.TemporaryDirectory(prefix="k8e-") as folder:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _GET + _FREE, kind, folder],
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )
    return int(done.stdout or -1)


@behaviour("hoard.watchers")
async def watchers(stage: Stage) -> None:
    """All the inotify instances and watches that one sandbox gets are missing nowhere else."""
    await _hoard(stage, "watches", "inotify")


@behaviour("hoard.terminals")
async def terminals(stage: Stage) -> None:
    """A sandbox has so many terminals and no more; others and the host still get some."""
    await _hoard(stage, "terminals")


@behaviour("bounds.terminals", gvisor="its terminals are memory of its own, which is counted")
async def terminals_told(stage: Stage) -> None:
    """Who wants one terminal more than there may be is told so, and not of a full disk."""
    sandbox = await stage.launch()
    program = await sandbox.start([PYTHON, "-I", "-c", _HOARD, "terminals", "10000", _TMP])
    await program.until(b"\n")
    try:
        await sandbox.run(["true"], tty=[24, 80])
    except OSError as error:
        equal(error.errno, errno.EMFILE, "what is missing")
        expect("terminals" in str(error), f"it says {error}")
    else:
        raise Broken("a terminal more than there may be")


@behaviour("hoard.kernel-objects")
async def kernel_objects(stage: Stage) -> None:
    """Queues, semaphores, segments, timers, epolls and AIO of one sandbox take none from others."""
    await _hoard(stage, "aio", "queues", "semaphores", "segments", "timers", "epolls", "locks")


@behaviour("hoard.sockets")
async def sockets(stage: Stage) -> None:
    """Ten thousand listening sockets in one sandbox take none from others or the host."""
    await _hoard(stage, "sockets")


@in_a_room("hoard.neighbours")
def neighbours(room: Room) -> None:
    """No datagram puts more than a few entries into the kernel's tables of neighbours."""
    for words in ((), ("open",)):
        with room.beside(*words) as crowded:
            tried = crowded.attempt(*(["crowd", kind, _ADDRESSES] for kind in _CROWDS))
            equal([it.error for it in tried.outcomes if it.error], [], "probes that failed")
            expect(any(int(it.said.split()[0]) for it in tried.outcomes), "the probe is blind")
            for path in (room.scene.net / "slots" / str(crowded.slot.number), room.scene.router):
                found = namespaces.run_in(path, _neighbours)
                expect(found["others"] < 32, f"under {words or 'none'}, in {path.name}: {found}")
                # A link has 256 groups of IPv4; these go first, as soon as others need room.
                expect(found["groups"] < 300, f"under {words or 'none'}, in {path.name}: {found}")


def _neighbours() -> dict[str, int]:
    """How many neighbours the kernel remembers for the namespace of this thread."""
    with contextlib.closing(Netlink()) as netlink:
        found = netlink.neighbours()
    groups = sum(address.is_multicast for address in found)
    return {"groups": groups, "others": len(found) - groups}


@behaviour("hoard.attributes")
async def attributes(stage: Stage) -> None:
    """Extended attributes take room of the workspace like everything else, and no more."""
    size = 8 * MIB
    sandbox = await stage.launch(disk=size)
    script = (
        "import os; count = 0; number = 0\n"
        "try:\n"
        "    while count < 20000:\n"
        "        path = f'/workspace/f{count}'\n"
        "        os.close(os.open(path, os.O_CREAT))\n"
        "        os.setxattr(path, 'user.x', os.urandom(3000)); count += 1\n"
        "except OSError as error: number = error.errno\n"
        "room = os.statvfs('/workspace')\n"
        "print((count, number, room.f_blocks * room.f_bsize))"
    )
    count, number, room = await ask(sandbox, script)
    if not count and number in (errno.ENOTSUP, errno.EPERM):
        raise NotApplicable("files in these workspaces have no attributes of users")
    equal(number, errno.ENOSPC, f"error after {count} attributes")
    expect(count * 3000 <= size and room <= size, f"{count} attributes went into {room} bytes")


@behaviour("hoard.programs")
async def programs(stage: Stage) -> None:
    """Programs beyond the limit are refused in words; those that run go on, and the guest too."""
    sandbox = await stage.launch(pids=40)

    async def start() -> Program | None:
        try:
            return await sandbox.start(["sleep", "600"])
        except (errors.K8eError, OSError) as error:
            expect(str(error), "a refusal without a reason")
            return None

    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(start()) for _ in range(400)]
    running = [task.result() for task in started if task.result() is not None]
    expect(8 <= len(running) <= 40, f"{len(running)} of 400 programs run within a limit of 40")
    for program in running[:10]:
        if program is not None:
            await sandbox.call("signal", id=program.id, signal=9)
            equal((await program.finish()).code, 137, "the end of a program")
    equal((await sandbox.run(["echo", "alive"])).stdout, b"alive\n", "a program afterwards")
