"""``exec`` in a quiet sandbox beside a noisy one, and how much the host itself feels the noise.

The neighbour has the limits of any session. What is promised is about the tail: p99 beside the
noise is at most five times p99 alone. The host's own ``true`` tells what of it is the machine's.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import timing
from benchmarks.noises import NOISES, neighbour
from benchmarks.stage import Stage
from benchmarks.subjects.execs import PROGRAM, one_exec
from k8e import SandboxClient
from k8e.bench.samples import Bar, Row, Series

ROUNDS = 200
BAR = Bar("ratio", 5)
EXEC, HOST, GATEWAY = "exec", "true on the host", "the gateway's answer"

Samples = dict[str, list[float]]


def measure(stage: Stage) -> Iterator[Row]:
    for runtime in stage.runtimes:
        yield from _measure(stage, runtime)


def _measure(stage: Stage, runtime: str) -> Iterator[Row]:
    client = stage.local_client()
    quiet = client.create_session(runtime)
    try:
        alone = _sample(stage, client, quiet)
        yield Row("noise", runtime, Series(f"{EXEC}, alone", "ms", alone[EXEC]))
        for noise in NOISES:
            with neighbour(stage, client, runtime, noise) as loud:
                beside = _sample(stage, client, quiet)
            yield from _compare(runtime, noise, beside, alone, f"stopped {loud.ends} times")
    finally:
        client.destroy_session(quiet)


def _compare(runtime: str, noise: str, beside: Samples, alone: Samples, note: str) -> Iterator[Row]:
    for what in (EXEC, GATEWAY, HOST):
        ours = Series(f"{what}, beside {noise}", "ms", beside[what])
        yield Row("noise", runtime, ours, Series(f"{what}, alone", "ms", alone[what]))
        tail = Series(f"p99 of {ours.name}", "ms", [ours.p99])
        before = Series(f"p99 of {what}, alone", "ms", [Series("", "ms", alone[what]).p99])
        bar = BAR if what == EXEC else None
        yield Row("noise", runtime, tail, before, bar, note=note)


def _sample(stage: Stage, client: SandboxClient, session_id: str) -> Samples:
    contenders = {
        EXEC: timing.timed(one_exec(client, session_id, PROGRAM)),
        GATEWAY: timing.timed(lambda: client.get_session(session_id)),
        HOST: timing.program(PROGRAM),
    }
    took = timing.interleave(stage.rounds(ROUNDS), contenders, warm_up=3)
    return {name: timing.milliseconds(took[name]) for name in took}
