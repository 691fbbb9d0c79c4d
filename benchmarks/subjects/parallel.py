"""``exec`` at 1, 10 and 100 at once in one session, against spawning as many in the sandbox.

Each one's own time, from the call to its end. The floor is a program in the same sandbox that
starts as many at once and reads their output; it has neither a client nor a gateway.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

from benchmarks import timing
from benchmarks.stage import Stage
from benchmarks.subjects.execs import PROGRAM
from k8e import AsyncSandboxClient
from k8e.bench.measure import Series, TableRow

WIDTHS = (1, 10)
MANY = 100
PER_WIDTH = 300
# Run in the sandbox. One reader of many pipes, as the guest is one.
SPAWN = f"""
import json, os, select, time
def spawn(width):
    poll, began, left = select.epoll(), {{}}, {{}}
    took = []
    for number in range(width):
        start = time.perf_counter()
        actions, pipes = [], [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
        for at, (ours, theirs) in enumerate(pipes, 1):
            actions.append((os.POSIX_SPAWN_DUP2, theirs, at))
            poll.register(ours, select.EPOLLIN)
            began[ours] = number, start
        left[number] = 2
        os.posix_spawn({PROGRAM[0]!r}, {PROGRAM!r}, os.environ, file_actions=actions)
        for _, theirs in pipes:
            os.close(theirs)
    while left:
        for fd, _ in poll.poll():
            if not os.read(fd, 65536):
                poll.unregister(fd)
                os.close(fd)
                number, start = began.pop(fd)
                left[number] -= 1
                if not left[number]:
                    del left[number]
                    took.append(time.perf_counter() - start)
    for _ in range(width):
        os.wait()
    return took
print(json.dumps([seconds for _ in range(TURNS) for seconds in spawn(WIDTH)]))
"""


def measure(stage: Stage) -> Iterator[TableRow]:
    stage.gateway()
    for runtime in stage.runtimes:
        yield from asyncio.run(_measure(stage, runtime))


async def _measure(stage: Stage, runtime: str) -> list[TableRow]:
    rows: list[TableRow] = []
    async with AsyncSandboxClient(stage.local_endpoint) as client:
        session_id = await client.create_session(runtime)
        try:
            for width in (*WIDTHS, stage.many(MANY)):
                turns = 1 if stage.quick else max(1, PER_WIDTH // width)
                rows.append(await _at_once(client, session_id, runtime, width, turns))
        finally:
            await client.destroy_session(session_id)
    return rows


async def _at_once(
    client: AsyncSandboxClient, session_id: str, runtime: str, width: int, turns: int
) -> TableRow:
    samples: list[float] = []

    async def work(turns: int) -> None:
        for _ in range(turns):
            started = time.perf_counter()
            await client.exec(session_id, PROGRAM, timing.PATIENCE)
            samples.append(time.perf_counter() - started)

    await asyncio.gather(*(work(1) for _ in range(width)))  # opens the connections
    samples.clear()
    began = time.perf_counter()
    await asyncio.gather(*(work(turns) for _ in range(width)))
    rate = len(samples) / (time.perf_counter() - began)
    code = SPAWN.replace("TURNS", str(turns)).replace("WIDTH", str(width))
    told = await client.run(code, "python", timing.PATIENCE, session_id=session_id)
    if told.exit_code:
        raise timing.ProgramFailed(told.stderr)
    ours = Series(f"exec, {width} at once", "ms", timing.milliseconds(samples))
    floor = Series(
        f"spawn in the sandbox, {width} at once", "ms", timing.milliseconds(json.loads(told.stdout))
    )
    return TableRow("parallel", runtime, ours, floor, note=f"{rate:.0f} per second")
