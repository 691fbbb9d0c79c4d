"""Numbered output: readers that come late or again, slow readers, and bounds."""

from __future__ import annotations

import asyncio
import hashlib

from k8e.conformance.behaviour import BrokenPromise, behaviour, equal, expect
from k8e.conformance.sandbox import PATIENCE, PYTHON, Sandbox
from k8e.conformance.stage import Stage
from k8e.guest import wire
from k8e.model import MIB

LINES = 200_000  # about 1.3 MiB of numbers
SMALL_WINDOW = 64 << 10
UNREAD = 2 * MIB
"""More than a guest may hold for a reader that does not read."""
GUEST_GROWTH = 8 * MIB


async def guest_memory(sandbox: Sandbox) -> int:
    """Resident bytes of the guest itself, seen from inside."""
    done = await sandbox.run(["/bin/sh", "-c", "grep VmRSS /proc/1/status"])
    return int(done.text.split()[1]) << 10


async def ended(sandbox: Sandbox, exec_id: str) -> None:
    """Wait until a program has ended, without reading its output."""
    async with asyncio.timeout(PATIENCE):
        while (await sandbox.describe(exec_id))["status"] == "running":
            await sandbox.run(["/bin/true"])


def numbers(count: int = LINES) -> bytes:
    return "".join(f"{number}\n" for number in range(1, count + 1)).encode()


@behaviour("output.complete")
async def complete(stage: Stage) -> None:
    """Megabytes of output arrive whole and in order."""
    done = await (await stage.shared()).run(["seq", str(LINES)])
    equal(done.stdout == numbers(), True, f"{len(done.stdout)} bytes are the numbers")
    equal(done.exit["seq"], len(done.stdout), "last sequence number")


@behaviour("output.block")
async def block(stage: Stage) -> None:
    """A reader that does not read stops the program; nothing is lost when it reads on."""
    sandbox = await stage.shared()
    size = 16 * MIB
    script = (
        "import hashlib, os; block = bytes(range(256)) * 256\n"
        f"for _ in range({size} // len(block)): os.write(1, block)"
    )
    program = await sandbox.start(
        [PYTHON, "-c", script], output="block", window=SMALL_WINDOW, generous=False
    )
    held = 0
    for _ in range(50):  # each turn is a whole program, so time passes
        await sandbox.run(["/bin/true"])
        held = (await sandbox.describe(program.id))["seq"]
    expect(0 < held <= UNREAD, f"{held} bytes were taken with nobody reading")
    equal((await sandbox.describe(program.id))["status"], "running", "the program's status")
    program.generous = True
    program.credit(SMALL_WINDOW)
    done = await program.finish()
    equal(len(done.stdout), size, "bytes in the end")
    wanted = hashlib.sha256(bytes(range(256)) * (size // 256)).digest()
    equal(hashlib.sha256(done.stdout).digest(), wanted, "digest of the output")
    equal(done.exit["lost"], False, "lost")


@behaviour("output.ring")
async def ring(stage: Stage) -> None:
    """With a ring, a program never waits for its reader, and the newest output is kept."""
    sandbox = await stage.shared()
    program = await sandbox.start(
        ["seq", str(LINES)], output="ring", window=SMALL_WINDOW, generous=False
    )
    await ended(sandbox, program.id)
    program.generous = True
    program.credit(4 * SMALL_WINDOW)
    done = await program.finish()
    everything = numbers()
    equal(done.exit["lost"], True, "lost")
    equal(done.exit["seq"], len(everything), "last sequence number")
    tail = done.stdout[SMALL_WINDOW:]
    expect(len(tail) >= 256 << 10, f"only {len(tail)} bytes were kept")
    expect(everything.endswith(tail), "what was kept is not the newest")
    expect(everything.startswith(done.stdout[:SMALL_WINDOW]), "the first bytes are wrong")


@behaviour("output.limit")
async def limit(stage: Stage) -> None:
    """Output beyond the limit of each stream is dropped and reported; the program runs on."""
    sandbox = await stage.shared()
    script = "head -c 5000 /dev/zero; head -c 10 /dev/zero >&2; echo end > limit-reached; exit 3"
    done = await sandbox.shell(script, limit=1000)
    equal((len(done.stdout), len(done.stderr)), (1000, 10), "bytes of stdout and stderr")
    equal((done.exit["truncated"], done.code), (True, 3), "truncated, exit code")
    equal(await sandbox.read("limit-reached"), b"end\n", "the program's last act")
    short = await sandbox.shell("head -c 1000 /dev/zero", limit=1000)
    equal(short.exit["truncated"], False, "truncated at exactly the limit")


@behaviour("output.flood")
async def flood(stage: Stage) -> None:
    """A gigabyte of output with a limit ends, is cut off, and leaves the guest small."""
    sandbox = await stage.shared()
    before = await guest_memory(sandbox)
    done = await sandbox.shell("dd if=/dev/zero bs=1M count=1024 status=none", limit=MIB)
    equal((len(done.stdout), done.exit["truncated"], done.code), (MIB, True, 0), "output")
    growth = await guest_memory(sandbox) - before
    expect(growth < GUEST_GROWTH, f"the guest grew by {growth} bytes")


@behaviour("output.byte-by-byte")
async def byte_by_byte(stage: Stage) -> None:
    """A program that prints single bytes to alternating streams is kept in bounded memory."""
    sandbox = await stage.shared()
    before = await guest_memory(sandbox)
    script = "import os\nfor _ in range(20000): os.write(1, b'o'); os.write(2, b'e')"
    program = await sandbox.start([PYTHON, "-c", script], output="ring", generous=False)
    await ended(sandbox, program.id)
    growth = await guest_memory(sandbox) - before
    expect(growth < GUEST_GROWTH, f"the guest grew by {growth} bytes")
    program.generous = True
    program.credit(SMALL_WINDOW)
    done = await program.finish()
    equal((len(done.stdout), len(done.stderr)), (20000, 20000), "bytes of stdout and stderr")


@behaviour("output.two-readers")
async def two_readers(stage: Stage) -> None:
    """Two readers of one program both get everything, each at its own pace."""
    sandbox = await stage.shared()
    first = await sandbox.start(["/bin/sh", "-c", f"read x; seq {LINES}"], stdin=True)
    second = await sandbox.attach(first.id, window=SMALL_WINDOW)
    await first.type(b"\n")
    async with asyncio.TaskGroup() as tasks:  # together: the slower one sets the pace
        done = [tasks.create_task(reader.finish()) for reader in (first, second)]
    for number, outcome in enumerate(task.result() for task in done):
        equal(outcome.stdout == numbers(), True, f"reader {number} got the numbers")
        equal(outcome.code, 0, f"exit code for reader {number}")


@behaviour("output.attach-from")
async def attach_from(stage: Stage) -> None:
    """A reader that comes back goes on at the sequence number that it asks for."""
    sandbox = await stage.shared()
    program = await sandbox.start(
        ["/bin/sh", "-c", "echo 0123456789; read x; echo end"], stdin=True
    )
    await program.until(b"0123456789\n")
    again = await sandbox.attach(program.id, seq=7)
    await program.type(b"\n")
    done = await again.finish()
    equal((again.first_seq, done.stdout, done.exit["lost"]), (7, b"789\nend\n", False), "attached")


@behaviour("output.attach-later")
async def attach_later(stage: Stage) -> None:
    """A finished program can still be asked for its output and exit code, more than once."""
    sandbox = await stage.shared()
    program = await sandbox.start(["/bin/sh", "-c", "echo out; echo err >&2; exit 6"])
    await program.finish()
    for _ in range(2):
        done = await (await sandbox.attach(program.id)).finish()
        equal((done.stdout, done.stderr, done.code), (b"out\n", b"err\n", 6), "asked later")


@behaviour("output.idempotent-start")
async def idempotent_start(stage: Stage) -> None:
    """Starting an exec twice under one id runs it once, and both callers get its output."""
    sandbox = await stage.shared()
    argv = ["/bin/sh", "-c", "echo ran >> once; cat once; read x; echo end"]
    first = await sandbox.start(argv, id="just-once", stdin=True)
    second = await sandbox.start(argv, id="just-once", stdin=True)
    equal(second.info["pid"], first.info["pid"], "process of the second start")
    await first.until(b"ran\n")
    await first.type(b"\n")
    for program in (first, second):
        equal((await program.finish()).stdout, b"ran\nend\n", "output")
    third = await sandbox.start(argv, id="just-once", stdin=True)
    equal((await third.finish()).stdout, b"ran\nend\n", "output of a start after the end")


@behaviour("output.many-finished")
async def many_finished(stage: Stage) -> None:
    """Finished programs are kept for a while, within bounds that hold for hundreds of them."""
    sandbox = await stage.shared()
    before = await guest_memory(sandbox)
    ids: list[str] = []
    for _ in range(100):
        program = await sandbox.start(["head", "-c", "500000", "/dev/zero"])
        await program.finish()
        ids.append(program.id)
    growth = await guest_memory(sandbox) - before
    expect(growth < 2 * GUEST_GROWTH, f"the guest grew by {growth} bytes")
    done = await (await sandbox.attach(ids[-1])).finish()
    equal(len(done.stdout), 500_000, "bytes of the newest")


@behaviour("output.unread-link-stays-free")
async def unread_link_stays_free(stage: Stage) -> None:
    """A program whose reader does not read holds up no other program on the same link."""
    sandbox = await stage.shared()
    stuck = [await sandbox.start(["yes"], generous=False) for _ in range(4)]
    done = await sandbox.run(["seq", str(LINES)])
    equal(done.stdout == numbers(), True, "another program's output is whole")
    for program in stuck:
        await sandbox.call("signal", id=program.id, signal=9)
        program.generous = True
        program.credit(wire.WINDOW)
        if (await program.finish()).code != 137:
            raise BrokenPromise(f"a stuck program ended otherwise: {program.outcome.exit}")
