"""The whole process ``k8e sandbox run --lang bash "true"``, against ``python3 -c pass``."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from benchmarks import timing
from benchmarks.stage import Stage
from k8e.bench.measure import Goal, Series, TableRow

ROUNDS = 60
BARS = {"gvisor": Goal("ratio", 3), "container": Goal("ratio", 2)}
PEER = "python3 -c pass"


def measure(stage: Stage) -> Iterator[TableRow]:
    stage.gateway()
    k8e = [sys.executable, "-IS", str(stage.launcher)]
    run = [*k8e, "sandbox", "run", "--lang", "bash", "true"]
    contenders = {PEER: timing.python_pass(stage.environment())}
    for runtime in stage.runtimes:
        # Each runtime is a tenant, whose session the first command makes.
        env = stage.environment(K8E_SANDBOX_TENANT=runtime)
        timing.run([*k8e, "sandbox", "run", "--lang", "bash", "--runtime", runtime, "true"], env)
        contenders[runtime] = timing.program(run, env)
    took = timing.interleave(stage.rounds(ROUNDS), contenders, warm_up=2)
    peer = Series(PEER, "ms", timing.milliseconds(took[PEER]))
    for runtime in stage.runtimes:
        ours = Series("k8e sandbox run", "ms", timing.milliseconds(took[runtime]))
        yield TableRow("cli", runtime, ours, peer, BARS[runtime])
