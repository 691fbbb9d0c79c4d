"""A new session, against the same bundle started by hand: create, start, the guest dials."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import floors, timing
from benchmarks.samples import Bar, Row, Series
from benchmarks.stage import Stage

ROUNDS = 15
BARS = {"gvisor": Bar("ratio", 1.5)}


def measure(stage: Stage) -> Iterator[Row]:
    for runtime in stage.runtimes:
        client = stage.local_client()
        model = client.create_session(runtime)  # also the first: it makes what later ones share
        tool = stage.runtime(runtime)
        bundle = stage.host.folder(stage.sandbox_of(model))
        bare = floors.Bare(tool, bundle, stage.folder / f"bare-{runtime}")
        made: list[str] = []
        create = timing.timed(lambda: made.append(client.create_session(runtime)))  # noqa: B023 - used in this round

        def create_and_destroy() -> float:
            took = create()  # noqa: B023 - the same
            client.destroy_session(made.pop())  # noqa: B023 - the same
            return took

        ours = "session created"
        peer = f"{tool.tool_name} create + start + guest"
        took = timing.interleave(
            stage.rounds(ROUNDS), {ours: create_and_destroy, peer: bare.create}, warm_up=1
        )
        client.destroy_session(model)
        series = {name: Series(name, "ms", timing.milliseconds(took[name])) for name in took}
        yield Row("create", runtime, series[ours], series[peer], BARS.get(runtime))
