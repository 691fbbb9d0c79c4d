"""``exec`` in a quiet sandbox beside a noisy one, and how much the host itself feels the noise.

The neighbour has the limits of any session. What is promised is about the tail: p99 beside the
noise is at most five times p99 alone. "Alone" is measured before each noise and after the last.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import timing
from benchmarks.noises import NOISES, neighbour
from benchmarks.stage import Stage
from benchmarks.stealing import Guarded
from benchmarks.subjects.execs import PROGRAM, one_exec
from k8e import SandboxClient
from k8e.bench.measure import Goal, Series, TableRow

ROUNDS, ROUNDS_ALONE = 200, 60
BAR = Goal("ratio", 5)
EXEC, HOST, GATEWAY = "exec", "true on the host", "the gateway's answer"


class Samples:
    """Milliseconds of everything, in one situation."""

    def __init__(self) -> None:
        self.took: dict[str, list[float]] = {}
        self.set_aside: dict[str, list[float]] = {}

    def add(self, rounds: int, contenders: dict[str, timing.Timed]) -> None:
        guarded = {name: Guarded(work) for name, work in contenders.items()}
        took = timing.interleave(rounds, guarded, warm_up=3)
        for name, seconds in took.items():
            self.took.setdefault(name, []).extend(timing.milliseconds(seconds))
            aside = timing.milliseconds(guarded[name].set_aside)
            self.set_aside.setdefault(name, []).extend(aside)

    def series(self, what: str, where: str) -> Series:
        return Series(f"{what}, {where}", "ms", self.took[what])

    def tail(self, what: str, where: str) -> Series:
        return Series(f"p99 of {what}, {where}", "ms", [self.series(what, where).p99])

    def note(self, what: str) -> str:
        """What was not counted, since the host had taken the CPUs."""
        aside = self.set_aside[what]
        return f"{len(aside)} set aside, at most {max(aside):.0f} ms" if aside else ""


def measure(stage: Stage) -> Iterator[TableRow]:
    for runtime in stage.runtimes:
        yield from _measure(stage, runtime)


def _measure(stage: Stage, runtime: str) -> Iterator[TableRow]:
    client = stage.local_client()
    quiet = client.create_session(runtime)
    contenders = _contenders(client, quiet)
    alone, beside, notes = Samples(), {noise: Samples() for noise in NOISES}, dict[str, str]()
    try:
        for noise, samples in beside.items():
            alone.add(stage.rounds(ROUNDS_ALONE), contenders)
            with neighbour(stage, client, runtime, noise) as loud:
                samples.add(stage.rounds(ROUNDS), contenders)
            notes[noise] = f"stopped {loud.ends} times"
        alone.add(stage.rounds(ROUNDS_ALONE), contenders)
    finally:
        client.destroy_session(quiet)
    yield TableRow("noise", runtime, alone.series(EXEC, "alone"), note=alone.note(EXEC))
    for noise, samples in beside.items():
        yield from _compare(runtime, noise, samples, alone, notes[noise])


def _compare(
    runtime: str, noise: str, beside: Samples, alone: Samples, stopped: str
) -> Iterator[TableRow]:
    for what in (EXEC, GATEWAY, HOST):
        where = f"beside {noise}"
        yield TableRow("noise", runtime, beside.series(what, where), alone.series(what, "alone"))
        note = "; ".join(filter(None, [stopped, beside.note(what)]))
        tails = beside.tail(what, where), alone.tail(what, "alone")
        yield TableRow("noise", runtime, *tails, BAR if what == EXEC else None, note=note)


def _contenders(client: SandboxClient, session_id: str) -> dict[str, timing.Timed]:
    return {
        EXEC: timing.timed(one_exec(client, session_id, PROGRAM)),
        GATEWAY: timing.timed(lambda: client.get_session(session_id)),
        HOST: timing.program(PROGRAM),
    }
