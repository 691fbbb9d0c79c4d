"""What the SDK adds: to a command, to a hundred of them at once, and to a program's start."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator

from benchmarks import floors, noop, timing
from benchmarks.serving import SOURCE
from benchmarks.stage import RUNTIMES, Stage, make_settings
from benchmarks.subjects.execs import PROGRAM, guest_call, one_exec
from k8e import AsyncSandboxClient
from k8e.bench.measure import Goal, Series, TableRow

ROUNDS = 200
IMPORTS = 30
WIDTH = 100
BURSTS = 9
ADDED_LOCALLY = Goal("most", 0.4)
ADDED_REMOTELY = Goal("ratio", 1.5)
AT_ONCE = Goal("ratio", 1.5)
IMPORT = Goal("most", 60)
# Run in the sandbox: as many programs at once as the SDK starts, by the cheapest call for it, with
# nothing but their ends awaited, and with their output read, which is what an exec does.
SPAWN = f"""
import os, select, time
def spawn(reading):
    began = time.perf_counter()
    poll = select.epoll()
    for _ in range({WIDTH}):
        actions, pipes = [], [os.pipe2(os.O_CLOEXEC) for _ in range(2 if reading else 0)]
        for number, (ours, theirs) in enumerate(pipes, 1):
            actions.append((os.POSIX_SPAWN_DUP2, theirs, number))
            poll.register(ours, select.EPOLLIN)
        os.posix_spawn({PROGRAM[0]!r}, {PROGRAM!r}, os.environ, file_actions=actions)
        for _, theirs in pipes:
            os.close(theirs)
    left = 2 * {WIDTH} if reading else 0
    while left:
        for fd, _ in poll.poll():
            if not os.read(fd, 65536):
                poll.unregister(fd)
                os.close(fd)
                left -= 1
    for _ in range({WIDTH}):
        os.wait()
    return time.perf_counter() - began
print(spawn(False), spawn(True))
"""


def measure(stage: Stage) -> Iterator[TableRow]:
    yield from _importing(stage)
    for runtime in stage.runtimes:
        yield from _adding(stage, runtime)
        yield from asyncio.run(_at_once(stage, runtime))


def _importing(stage: Stage) -> Iterator[TableRow]:
    """What ``import k8e`` and the use of its client add to a Python that does nothing."""
    code = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); import k8e; k8e.SandboxClient"
    took = timing.interleave(
        stage.rounds(IMPORTS),
        {
            "import": timing.program([sys.executable, "-c", code]),
            "pass": timing.program([sys.executable, "-c", "pass"]),
        },
        warm_up=2,
    )
    ours = Series("import k8e, and its client", "ms", _differences(took["import"], took["pass"]))
    floor = Series("python3 -c pass", "ms", timing.milliseconds(took["pass"]))
    yield TableRow("sdk", "", ours, floor, IMPORT)


def _adding(stage: Stage, runtime: str) -> Iterator[TableRow]:
    local, remote = stage.local_client(), stage.remote_client()
    session_id = local.create_session(runtime)
    config = make_settings(stage.folder / f"sdk-{runtime}")
    with (
        floors.lone(RUNTIMES[runtime], config) as lone,
        noop.calling(stage.settings.data_dir / "tls") as call,
    ):
        took = timing.interleave(
            stage.rounds(ROUNDS),
            {
                "local": timing.timed(one_exec(local, session_id, PROGRAM)),
                "remote": timing.timed(one_exec(remote, session_id, PROGRAM)),
                "guest": lambda: lone.exec(guest_call()),
                "noop": timing.timed(call),
            },
            warm_up=5,
        )
    local.destroy_session(session_id)
    guest = Series("guest on its link", "ms", timing.milliseconds(took["guest"]))
    nothing = Series("no-op gRPC call", "ms", timing.milliseconds(took["noop"]))
    added = Series("exec adds", "ms", _differences(took["local"], took["guest"]))
    yield TableRow("sdk", runtime, added, guest, ADDED_LOCALLY)
    added = Series("exec adds, gRPC", "ms", _differences(took["remote"], took["guest"]))
    yield TableRow("sdk", runtime, added, nothing, ADDED_REMOTELY)


def _differences(ours: list[float], floor: list[float]) -> list[float]:
    """Round by round: what disturbs the machine for a while disturbs both sides of a round."""
    return timing.milliseconds([one - other for one, other in zip(ours, floor, strict=True)])


async def _at_once(stage: Stage, runtime: str) -> list[TableRow]:
    bursts: list[float] = []
    spawns: list[list[float]] = [[], []]
    async with AsyncSandboxClient(stage.local_endpoint) as client:
        session_id = await client.create_session(runtime)
        for _ in range(stage.rounds(BURSTS) + 1):
            began = time.perf_counter()
            await asyncio.gather(*(client.exec(session_id, PROGRAM, 120) for _ in range(WIDTH)))
            bursts.append(time.perf_counter() - began)
            told = await client.run(SPAWN, "python", 120, session_id=session_id)
            if told.exit_code:
                raise timing.ProgramFailed(told.stderr)
            for series, text in zip(spawns, told.stdout.split(), strict=True):
                series.append(float(text))
        await client.destroy_session(session_id)
    # The first burst opens a hundred connections.
    ours = Series(f"{WIDTH} execs at once", "ms", timing.milliseconds(bursts[1:]))
    bare, read = (timing.milliseconds(series[1:]) for series in spawns)
    floor = Series(f"{WIDTH} spawns in the sandbox, output read", "ms", read)
    least = Series(f"{WIDTH} spawns in the sandbox", "ms", bare)
    return [TableRow("sdk", runtime, ours, floor, AT_ONCE), TableRow("sdk", runtime, ours, least)]
