"""What can be measured. A subject is a function from a stage to the rows of its table."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.samples import Row
from benchmarks.stage import Stage
from benchmarks.subjects import (
    commands,
    creating,
    egress,
    execs,
    files,
    footprint,
    parallel,
    sdk,
    warm,
)

Subject = Callable[[Stage], Iterator[Row]]

SUBJECTS: dict[str, Subject] = {
    "footprint": footprint.measure,
    "create": creating.measure,
    "exec": execs.measure,
    "warm": warm.measure,
    "sdk": sdk.measure,
    "cli": commands.measure,
    "files": files.measure,
    "parallel": parallel.measure,
    "egress": egress.measure,
}
