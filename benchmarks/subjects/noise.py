"""``exec`` in a quiet sandbox beside a noisy one, and how much the host itself feels the noise.

The neighbour has the limits of any session, and does what a runaway program does: it burns CPU,
forks, or writes to its disk.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks import timing
from benchmarks.stage import Stage
from benchmarks.subjects.execs import PROGRAM, one_exec
from k8e import SandboxClient
from k8e.bench.samples import Row, Series

ROUNDS = 200
MOST_SECONDS = 240  # after which a neighbour that was forgotten ends
START_SECONDS = 1.0  # for it to get loud
NOISE = {
    "CPU": "for i in 1 2 3 4; do while :; do :; done & done; wait",
    "forks": "for i in 1 2 3 4; do while :; do /bin/true; done & done; wait",
    "disk": "while :; do dd if=/dev/zero of=noise bs=1M count=64 conv=fsync 2>/dev/null; done",
}
QUIET = "exec, alone"
HOST = "true on the host"


def measure(stage: Stage) -> Iterator[Row]:
    for runtime in stage.runtimes:
        yield from _measure(stage, runtime)


def _measure(stage: Stage, runtime: str) -> Iterator[Row]:
    client = stage.local_client()
    quiet, noisy = client.create_session(runtime), client.create_session(runtime)
    try:
        alone = _sample(stage, client, quiet)
        yield Row("noise", runtime, Series(QUIET, "ms", alone["exec"]))
        for name, command in NOISE.items():
            beside = _beside(stage, client, quiet, noisy, command)
            ours = Series(f"exec, beside {name}", "ms", beside["exec"])
            yield Row("noise", runtime, ours, Series(QUIET, "ms", alone["exec"]))
            theirs = Series(f"{HOST}, beside {name}", "ms", beside["host"])
            yield Row("noise", runtime, theirs, Series(f"{HOST}, alone", "ms", alone["host"]))
    finally:
        for session_id in (quiet, noisy):
            client.destroy_session(session_id)


def _beside(
    stage: Stage, client: SandboxClient, quiet: str, noisy: str, command: str
) -> dict[str, list[float]]:
    run = client.start(noisy, command, MOST_SECONDS)
    try:
        time.sleep(START_SECONDS)
        return _sample(stage, client, quiet)
    finally:
        run.kill()


def _sample(stage: Stage, client: SandboxClient, session_id: str) -> dict[str, list[float]]:
    contenders = {
        "exec": timing.timed(one_exec(client, session_id, PROGRAM)),
        "host": timing.program(PROGRAM),
    }
    took = timing.interleave(stage.rounds(ROUNDS), contenders, warm_up=3)
    return {name: timing.milliseconds(took[name]) for name in took}
