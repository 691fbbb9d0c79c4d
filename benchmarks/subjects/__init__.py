"""What can be measured: functions from a stage to rows, and to what had to be skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.stage import Stage
from benchmarks.subjects import (
    agents,
    churn,
    commands,
    creating,
    egress,
    execs,
    files,
    first,
    footprint,
    memory,
    noise,
    parallel,
    sdk,
    standing,
    typescript,
    warm,
)
from k8e.bench.measure import Skipped, TableRow

Subject = Callable[[Stage], Iterator[TableRow | Skipped]]

SUBJECTS: dict[str, Subject] = {
    "footprint": footprint.measure,
    "first": first.measure,
    "create": creating.measure,
    "exec": execs.measure,
    "warm": warm.measure,
    "sdk": sdk.measure,
    "typescript": typescript.measure,
    "cli": commands.measure,
    "mcp": agents.measure,
    "files": files.measure,
    "parallel": parallel.measure,
    "egress": egress.measure,
    "memory": memory.measure,
    "peers": standing.measure,
    "noise": noise.measure,
    "churn": churn.measure,
}
