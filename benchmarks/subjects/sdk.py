"""What the SDK adds: to a command's own time, to a hundred of them at once, to a program's start."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator

from benchmarks import floors, noop, timing
from benchmarks.samples import Bar, Row, Series
from benchmarks.stage import RUNTIMES, SOURCE, Stage, make_settings
from benchmarks.subjects.execs import PROGRAM, guest_call, one_exec
from k8e import AsyncSandboxClient

ROUNDS = 200
IMPORTS = 30
WIDTH = 100
BURSTS = 9
ADDED_LOCALLY = Bar("most", 0.4)
ADDED_REMOTELY = Bar("ratio", 1.5)
AT_ONCE = Bar("ratio", 1.5)
IMPORT = Bar("most", 60)
# Run in the sandbox: as many programs at once as the SDK starts, by the cheapest call for it.
SPAWN = f"""
import os, time
began = time.perf_counter()
for _ in range({WIDTH}):
    os.posix_spawn({PROGRAM[0]!r}, {PROGRAM!r}, os.environ)
for _ in range({WIDTH}):
    os.wait()
print(time.perf_counter() - began)
"""


def measure(stage: Stage) -> Iterator[Row]:
    yield from _importing(stage)
    for runtime in stage.runtimes:
        yield from _adding(stage, runtime)
        yield from asyncio.run(_at_once(stage, runtime))


def _importing(stage: Stage) -> Iterator[Row]:
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
    yield Row("sdk", "", ours, floor, IMPORT)


def _adding(stage: Stage, runtime: str) -> Iterator[Row]:
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
    yield Row("sdk", runtime, added, guest, ADDED_LOCALLY)
    added = Series("exec adds, gRPC", "ms", _differences(took["remote"], took["guest"]))
    yield Row("sdk", runtime, added, nothing, ADDED_REMOTELY)


def _differences(ours: list[float], floor: list[float]) -> list[float]:
    """Round by round: what disturbs the machine for a while disturbs both sides of a round."""
    return timing.milliseconds([one - other for one, other in zip(ours, floor, strict=True)])


async def _at_once(stage: Stage, runtime: str) -> list[Row]:
    bursts: list[float] = []
    spawns: list[float] = []
    async with AsyncSandboxClient(stage.local_endpoint) as client:
        session_id = await client.create_session(runtime)
        for _ in range(stage.rounds(BURSTS) + 1):
            began = time.perf_counter()
            await asyncio.gather(*(client.exec(session_id, PROGRAM, 120) for _ in range(WIDTH)))
            bursts.append(time.perf_counter() - began)
            told = await client.run(SPAWN, "python", 120, session_id=session_id)
            spawns.append(float(told.stdout))
        await client.destroy_session(session_id)
    # The first burst opens a hundred connections.
    ours = Series(f"{WIDTH} execs at once", "ms", timing.milliseconds(bursts[1:]))
    floor = Series(f"{WIDTH} spawns in the sandbox", "ms", timing.milliseconds(spawns[1:]))
    return [Row("sdk", runtime, ours, floor, AT_ONCE)]
