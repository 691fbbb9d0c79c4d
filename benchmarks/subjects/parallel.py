"""Many ``exec("true")`` at once in one session: how long each one takes. Reported only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from benchmarks import timing
from benchmarks.samples import Row, Series
from benchmarks.stage import Stage
from k8e import AsyncSandboxClient

WIDTHS = (1, 10, 100)
PER_WIDTH = 300


def measure(stage: Stage) -> Iterator[Row]:
    stage.gateway()
    for runtime in stage.runtimes:
        yield from asyncio.run(_measure(stage, runtime))


async def _measure(stage: Stage, runtime: str) -> list[Row]:
    rows: list[Row] = []
    async with AsyncSandboxClient(stage.local_endpoint) as client:
        session_id = await client.create_session(runtime)
        for width in WIDTHS:
            samples: list[float] = []
            began = time.perf_counter()

            async def work(turns: int, samples: list[float] = samples) -> None:
                for _ in range(turns):
                    started = time.perf_counter()
                    await client.exec(session_id, "true", 120)
                    samples.append(time.perf_counter() - started)

            turns = 1 if stage.quick else max(1, PER_WIDTH // width)
            await asyncio.gather(*(work(turns) for _ in range(width)))
            rate = len(samples) / (time.perf_counter() - began)
            series = Series(f"exec, {width} at once", "ms", timing.milliseconds(samples))
            rows.append(Row("parallel", runtime, series, note=f"{rate:.0f} per second"))
        await client.destroy_session(session_id)
    return rows
