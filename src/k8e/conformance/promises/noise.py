"""Noisy and hoarding neighbours: what one sandbox takes is missing nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator

from k8e import errors
from k8e.conformance.behaviour import (
    BrokenPromise,
    NotApplicable,
    behaviour,
    equal,
    expect,
    in_a_room,
)
from k8e.conformance.lab.rooms import Room
from k8e.conformance.promises.confinement import ask
from k8e.conformance.sandbox import PATIENCE, PYTHON, Program, Sandbox
from k8e.conformance.stage import Stage
from k8e.egress import namespaces
from k8e.egress.netlink import Netlink
from k8e.guest import wire
from k8e.model import MIB, Limits
from k8e.sessions.limits import TIMEOUT, LimitWatch

SPIN = "for i in 1 2 3 4; do while :; do :; done & done; wait"
BOMB = """
import os
told = False
while True:
    try: os.fork()
    except OSError: told = told or os.write(1, b'no more')
"""
BALLOON = """
held = []
while True:
    held.append(bytearray(16 << 20))
    for at in range(0, 16 << 20, 4096): held[-1][at] = 1
"""
FILL = "while :; do dd if=/dev/zero of=noise bs=1M conv=fsync,notrunc 2>/dev/null; echo full; done"
FLOOD = "exec yes 'a line of a log that nobody will ever read'"
SOCKETS = """
import os, socket
for _ in range(3): os.fork()
listener = socket.create_server(('127.0.0.1', 0), backlog=4096)
name = b'\\0\\1\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0\\4some\\4name\\7example\\0\\0\\1\\0\\1'
kept = []
while True:
    try:
        one = socket.socket(); one.setblocking(False); kept.append(one)
        one.connect_ex(listener.getsockname() if len(kept) % 2 else ('203.0.113.7', 443))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.sendto(name, ('198.19.255.1', 53))
    except OSError: pass
    if len(kept) > 2000:
        for one in kept: one.close()
        kept.clear()
"""
ROUNDS = 20
TIMES = 5
"""How much slower the quiet one may be at its worst."""
SLACK = 0.25  # seconds: with so few rounds, the worst is luck
TRIES = 3  # a busy host can spoil a measurement, hardly all of them
NOISE_SECONDS = 20.0  # by which a noise ends that nothing else has ended
LOUD_SECONDS = 0.3
SHORT_SECONDS = 1.0
_SAYING = ("pids", "disk")
"""Limits of which a noise says when it has met them."""
_STOPPING = ("memory", "output")
"""Limits that stop the program that meets them; others only refuse more."""
LIMITS = Limits(memory=512 * MIB, pids=64, disk=16 * MIB, output=64 * MIB)


@behaviour("noise.cpu")
async def cpu(stage: Stage) -> None:
    """Beside a sandbox that burns CPU another one goes on; what ends the burner is named."""
    await _endure(stage, ["/bin/bash", "-c", SPIN], TIMEOUT)


@behaviour("noise.forks")
async def forks(stage: Stage) -> None:
    """Beside a fork bomb another sandbox goes on, and the bomb's end names its limit."""
    await _endure(stage, ["python3", "-c", BOMB], "pids")


@behaviour("noise.memory")
async def memory(stage: Stage) -> None:
    """Beside a sandbox that eats memory another one goes on, and its end names the limit."""
    await _endure(stage, ["python3", "-c", BALLOON], "memory")


@behaviour("noise.disk")
async def disk(stage: Stage) -> None:
    """Beside a sandbox that fills its disk another one goes on, and the filler names its limit."""
    await _endure(stage, ["/bin/bash", "-c", FILL], "disk")


@behaviour("noise.output")
async def output(stage: Stage) -> None:
    """Beside a flood of output another sandbox goes on, and the flood's end names its limit."""
    await _endure(stage, ["/bin/bash", "-c", FLOOD], "output")


@behaviour("noise.sockets")
async def sockets(stage: Stage) -> None:
    """Beside a sandbox that opens sockets without end another one goes on; its end is named."""
    await _endure(stage, ["python3", "-c", SOCKETS], TIMEOUT)


async def _endure(stage: Stage, argv: list[str], limit: str) -> None:
    quiet = await stage.shared()
    seen: list[str] = []
    for _ in range(TRIES):
        loud = await stage.launch(
            memory=LIMITS.memory, pids=LIMITS.pids, disk=LIMITS.disk, output=LIMITS.output
        )
        alone = await _worst(quiet)
        async with _noise(loud, argv, limit) as said:
            if limit in _SAYING:
                async with asyncio.timeout(PATIENCE):
                    await said.wait()
            else:
                await asyncio.sleep(LOUD_SECONDS)  # for it to get loud
            beside = await _worst(quiet)
        if limit == TIMEOUT:
            await _check_timed_out(loud, argv)
        await loud.guest.kill()
        if beside <= TIMES * alone + SLACK:
            return
        seen.append(f"{beside * 1000:.0f} ms beside the noise, {alone * 1000:.0f} ms alone")
    raise BrokenPromise(f"the slowest of {ROUNDS} commands: {seen}")


async def _worst(quiet: Sandbox) -> float:
    """The seconds that the slowest of a few commands took."""
    worst = 0.0
    for _ in range(ROUNDS):
        began = time.monotonic()
        done = await quiet.run(["true"])
        worst = max(worst, time.monotonic() - began)
        expect(done.code == 0, f"the quiet sandbox was harmed: {done.story()}")
    return worst


@contextlib.asynccontextmanager
async def _noise(loud: Sandbox, argv: list[str], limit: str) -> AsyncGenerator[asyncio.Event]:
    """A noise for as long as the block runs; then check that its end names ``limit``.

    The event is set when it says something, or has ended.
    """
    program = await loud.start(argv, timeout=NOISE_SECONDS)
    said = asyncio.Event()
    listening = asyncio.create_task(_listen(program, said))
    try:
        yield said
    finally:
        if limit not in _STOPPING:
            with contextlib.suppress(errors.K8eError, OSError):
                await loud.call("signal", id=program.id, terminate=True)
        async with asyncio.timeout(PATIENCE):
            ended = await listening
    if limit != TIMEOUT:
        await _check_told(loud, ended, limit)


async def _check_timed_out(loud: Sandbox, argv: list[str]) -> None:
    """Run the noise again, up to a time-out: nothing else stops one that is slowed or refused."""
    program = await loud.start(argv, timeout=SHORT_SECONDS)
    async with asyncio.timeout(PATIENCE):
        ended = await _listen(program, asyncio.Event())
    expect(bool(ended), "the sandbox ended with its noise")
    told = wire.unpack_dict(ended)
    expect(told.get("status") == "timed_out", f"the noise did not end by its time-out: {told}")
    await _check_told(loud, ended, TIMEOUT)


async def _listen(program: Program, said: asyncio.Event) -> bytes:
    """Read everything that a program prints, and keep only its EXIT; empty if the link broke."""
    try:
        while True:
            kind, body = await program.next()
            if kind == wire.EXIT:
                return body
            if kind == wire.OUT:
                said.set()
    except errors.GuestFailed:
        return b""
    finally:
        said.set()


async def _check_told(loud: Sandbox, ended: bytes, limit: str) -> None:
    if not ended:
        async with asyncio.timeout(PATIENCE):
            reason = await loud.guest.wait()
        expect(limit in reason, f"the sandbox ended and does not name {limit}: {reason}")
        return
    told = wire.unpack_dict(LimitWatch(loud.guest.limit_hits, LIMITS).amend(ended))
    found = [item["limit"] for item in told.get("limits") or ()]
    expect(limit in found, f"the end names {found}, not {limit}: {told}")


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
    """Let one sandbox take all it can get of each; another one and the host must still get some."""
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
    """One terminal too many is refused with that reason, and not with a full disk."""
    sandbox = await stage.launch()
    program = await sandbox.start([PYTHON, "-I", "-c", _HOARD, "terminals", "10000", _TMP])
    await program.until(b"\n")
    try:
        await sandbox.run(["true"], tty=[24, 80])
    except OSError as error:
        equal(error.errno, errno.EMFILE, "what is missing")
        expect("terminals" in str(error), f"it says {error}")
    else:
        raise BrokenPromise("a terminal more than there may be")


@behaviour("hoard.kernel-objects")
async def kernel_objects(stage: Stage) -> None:
    """Queues, semaphores, segments, timers, epolls and AIO of one sandbox take none from others."""
    await _hoard(stage, "aio", "queues", "semaphores", "segments", "timers", "epolls", "locks")


@behaviour("hoard.sockets")
async def hoarded_sockets(stage: Stage) -> None:
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
    """The number of neighbours that the kernel remembers for the namespace of this thread."""
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
