"""Frozen sandboxes: everything stands still, nothing is lost, and they can be ended."""

from __future__ import annotations

import asyncio

from k8e.conformance.behaviour import BrokenPromise, NotApplicable, behaviour, equal, expect
from k8e.conformance.sandbox import PATIENCE, Program, Sandbox, with_time
from k8e.conformance.stage import Stage
from k8e.conformance.traces import processes, traces

STILL = 0.4  # seconds in which a busy program would have counted to thousands
COUNTER = """
count = 0
while True:
    count += 1
    if count % 1000 == 0:
        print(count, flush=True)
"""


async def _counting(stage: Stage) -> tuple[Sandbox, Program]:
    sandbox = await stage.launch()
    script = f"python3 -I -c '{COUNTER}' > count"
    program = await sandbox.start(["/bin/bash", "-c", f"echo up; {script}"])
    await program.until(b"up")
    await _grown(sandbox, 0)
    return sandbox, program


async def _count(sandbox: Sandbox) -> int:
    return int((await sandbox.call("stat", path="count"))["size"])


async def _grown(sandbox: Sandbox, than: int) -> int:
    """Wait until the file of the counter is longer than it was."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                if (size := await _count(sandbox)) > than:
                    return size
            except FileNotFoundError:
                pass


@behaviour("pause.stands-still")
async def stands_still(stage: Stage) -> None:
    """Nothing happens in a frozen sandbox; thawed, it goes on where it stopped."""
    sandbox, _ = await _counting(stage)
    watcher = await stage.launch(sharing=sandbox)
    await sandbox.guest.freeze()
    before = await _count(watcher)
    await asyncio.sleep(STILL)
    equal(await _count(watcher), before, "bytes that a frozen counter wrote")
    await sandbox.guest.thaw()
    expect(await _grown(sandbox, before) > before, "it does not go on")


@behaviour("pause.no-cpu")
async def no_cpu(stage: Stage) -> None:
    """A frozen sandbox uses no CPU."""
    sandbox, _ = await _counting(stage)
    members = processes(sandbox.guest.sandbox_id)
    if not members:
        raise NotApplicable("the sandboxes of this runtime are not on this host")
    await sandbox.guest.freeze()
    before = _ticks(members)
    await asyncio.sleep(STILL)
    used = _ticks(members) - before
    await sandbox.guest.thaw()
    async with asyncio.timeout(PATIENCE):
        while _ticks(members) <= before + used:  # else there would be nothing to see
            await _count(sandbox)
    expect(used <= 2, f"it used {used} ticks of CPU time")


def _ticks(members: list[int]) -> int:
    """User and system time of processes, in kernel ticks."""
    total = 0
    for pid in members:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total


@behaviour("pause.twice")
async def twice(stage: Stage) -> None:
    """Freezing a frozen sandbox, and thawing one that is not frozen, are no errors."""
    sandbox = await stage.launch()
    await sandbox.guest.thaw()
    for _ in range(2):
        await sandbox.guest.freeze()
        await sandbox.guest.freeze()
        await sandbox.guest.thaw()
        await sandbox.guest.thaw()
        equal((await sandbox.shell("echo alive")).text, "alive\n", "a command")


@behaviour("pause.operations-wait")
async def operations_wait(stage: Stage) -> None:
    """Work under way waits and goes on: output, input, and calls that came meanwhile."""
    sandbox = await stage.launch()
    program = await sandbox.start(["/bin/cat"], stdin=True)
    await program.type(b"before\n")
    await program.until(b"before\n")
    await sandbox.guest.freeze()
    await program.type(b"while\n")
    answer = asyncio.ensure_future(sandbox.call("ping"))
    done, _ = await asyncio.wait([answer], timeout=STILL)
    if done:
        raise BrokenPromise("a frozen sandbox answered")
    await sandbox.guest.thaw()
    await answer
    await program.until(b"while\n")
    program.end_input()
    equal((await program.finish()).stdout, b"before\nwhile\n", "all of the output")


@behaviour("pause.time-out")
async def time_out(stage: Stage) -> None:
    """A command loses none of its time to a pause, and has a time-out afterwards."""
    sandbox = await stage.launch()
    script = "echo up; until test -e go; do sleep 0.02; done"

    async def check(seconds: float) -> None:
        await sandbox.shell("rm -f go")
        done = await sandbox.start(["/bin/bash", "-c", script], timeout=3 * seconds)
        over = await sandbox.start(["/bin/bash", "-c", "echo up; sleep 1000"], timeout=3 * seconds)
        for program in (done, over):
            await program.until(b"up")
        await sandbox.guest.freeze()
        await asyncio.sleep(3 * seconds + 0.2)
        await sandbox.guest.thaw()
        await sandbox.write("go", b"")
        equal((await done.finish()).status, "completed", "a command with time left")
        equal((await over.finish()).status, "timed_out", "a command without")

    await with_time(check)


@behaviour("pause.destroy")
async def destroy(stage: Stage) -> None:
    """Ending a frozen sandbox leaves nothing of it."""
    sandbox, _ = await _counting(stage)
    sandbox_id = sandbox.guest.sandbox_id
    await sandbox.guest.freeze()
    async with asyncio.timeout(PATIENCE):
        await sandbox.guest.kill()
        expect(await sandbox.guest.wait(), "no reason was given")
    equal(await asyncio.to_thread(traces, sandbox_id, stage.folders), [], "left on the host")


@behaviour("pause.purge")
async def purge(stage: Stage) -> None:
    """A frozen sandbox can be purged by its id alone."""
    sandbox, _ = await _counting(stage)
    sandbox_id = sandbox.guest.sandbox_id
    await sandbox.guest.freeze()
    async with asyncio.timeout(PATIENCE):
        await stage.runtime.purge(sandbox_id)
    equal(await asyncio.to_thread(traces, sandbox_id, stage.folders), [], "left on the host")


@behaviour("pause.adopt")
async def adopt(stage: Stage) -> None:
    """A frozen sandbox is found after a restart, still frozen, and can be thawed."""
    sandbox, program = await _counting(stage)
    await sandbox.guest.freeze()
    await stage.restart()
    expect(sandbox.guest.link is None, "it dialled though it was frozen")
    await sandbox.guest.freeze()
    await sandbox.guest.thaw()
    await _grown(sandbox, await _count(sandbox))
    await sandbox.call("signal", id=program.id, terminate=True)
    equal((await (await sandbox.attach(program.id)).finish()).status, "killed", "the program")
