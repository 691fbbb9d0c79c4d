"""Memory of idle sandboxes that have run Python and bash, when there are 1, 10 and 100 of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from benchmarks import memory
from benchmarks.stage import Stage
from benchmarks.subjects import warm
from k8e import SandboxClient
from k8e.bench.measure import Goal, Series, TableRow
from k8e.client import local

COUNTS = (1, 10)
MANY = 100
BARS = {"container": Goal("most", 10), "gvisor": Goal("most", 30)}
SETTLE_SECONDS = 2.0
FLOOR_COUNT = 10


def measure(stage: Stage) -> Iterator[TableRow]:
    for runtime in stage.runtimes:
        yield from _measure(stage, runtime)


def _measure(stage: Stage, runtime: str) -> Iterator[TableRow]:
    floor = _floor(stage, runtime)
    client = stage.local_client()
    many = stage.many(MANY)
    made: list[str] = []
    try:
        for count in sorted({*(each for each in COUNTS if each < many), many}):
            while len(made) < count:
                made.append(client.create_session(runtime))
                _warm_up(stage, client, made[-1])
            time.sleep(SETTLE_SECONDS)
            total = memory.sandboxes_mb(map(stage.sandbox_of, made))
            series = Series(f"PSS of each of {count}", "MB", [total / count])
            bar = BARS[runtime] if count == MANY else None
            yield TableRow("memory", runtime, series, floor, bar)
    finally:
        for session_id in made:
            client.destroy_session(session_id)


def _warm_up(stage: Stage, client: SandboxClient, session_id: str) -> None:
    client.run("print(1)", "python", session_id=session_id)
    client.run("echo 1", "bash", session_id=session_id)
    guest = local.Connection(local.dial(str(stage.settings.socket)))
    with contextlib.closing(guest):
        for language in ("python", "bash"):
            if warm.ready(guest, session_id, language) is not None:
                warm.wait_until_ready(guest, session_id, language)


def _floor(stage: Stage, runtime: str) -> Series:
    """The same spec by hand, with a guest that has nothing to do."""
    count = min(FLOOR_COUNT, stage.many(MANY))
    bare = stage.bare(runtime)
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(bare.alive()) for _ in range(count)]
        time.sleep(SETTLE_SECONDS)
        total = memory.sandboxes_mb(made)
    return Series(f"{bare.tool} with a guest, of {count}", "MB", [total / count])
