"""A new session, against the same bundle started by hand: create, start, the guest dials."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import timing
from benchmarks.stage import Stage
from k8e.bench.measure import Goal, Series, TableRow

ROUNDS = 15
BARS = {"gvisor": Goal("ratio", 1.5)}


def measure(stage: Stage) -> Iterator[TableRow]:
    client = stage.local_client()
    for runtime in stage.runtimes:
        bare = stage.bare(runtime)

        def create_and_destroy(runtime: str = runtime) -> float:
            made: list[str] = []
            took = timing.timed(lambda: made.append(client.create_session(runtime)))()
            client.destroy_session(made.pop())
            return took

        ours, peer = "session created", f"{bare.tool} create + start + guest"
        contenders = {ours: create_and_destroy, peer: bare.create}
        took = timing.interleave(stage.rounds(ROUNDS), contenders, warm_up=1)
        series = {name: Series(name, "ms", timing.milliseconds(took[name])) for name in took}
        yield TableRow("create", runtime, series[ours], series[peer], BARS.get(runtime))
