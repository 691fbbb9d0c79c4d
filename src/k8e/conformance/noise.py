"""A sandbox that uses all it can get of one thing, and another one that must not feel it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

from k8e import errors
from k8e.conformance.behaviours import Broken, behaviour, expect
from k8e.conformance.sandbox import PATIENCE, Program, Sandbox
from k8e.conformance.stage import Stage
from k8e.guest import wire
from k8e.model import MIB, Limits
from k8e.sessions.limiting import TIMEOUT, Watch

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
"""Limits that stop whoever meets them; others only refuse more."""
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
    raise Broken(f"the slowest of {ROUNDS} commands: {seen}")


async def _worst(quiet: Sandbox) -> float:
    """Seconds that the slowest of a few commands took."""
    worst = 0.0
    for _ in range(ROUNDS):
        began = time.monotonic()
        done = await quiet.run(["true"])
        worst = max(worst, time.monotonic() - began)
        expect(done.code == 0, f"the quiet sandbox was harmed: {done.story()}")
    return worst


@contextlib.asynccontextmanager
async def _noise(loud: Sandbox, argv: list[str], limit: str) -> AsyncGenerator[asyncio.Event]:
    """A noise for as long as the block runs; afterwards, what its end says of ``limit``.

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
    """The noise once more, up to a time-out: nothing else stops who is only slowed or refused."""
    program = await loud.start(argv, timeout=SHORT_SECONDS)
    async with asyncio.timeout(PATIENCE):
        ended = await _listen(program, asyncio.Event())
    expect(bool(ended), "the sandbox ended with its noise")
    told = wire.unpack_dict(ended)
    expect(told.get("status") == "timed_out", f"the noise did not end by its time-out: {told}")
    await _check_told(loud, ended, TIMEOUT)


async def _listen(program: Program, said: asyncio.Event) -> bytes:
    """Take all that a program prints, and keep nothing but its EXIT; empty if the link broke."""
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
    told = wire.unpack_dict(Watch(loud.guest.sandbox_id, LIMITS).amend(ended))
    found = [item["limit"] for item in told.get("limits") or ()]
    expect(limit in found, f"the end names {found}, not {limit}: {told}")
