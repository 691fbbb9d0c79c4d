"""A live session beside live containers of other systems, by the commands that those have.

Commands and code in it, a small file, memory of each of ten idle ones, and making and removing one
after the other. k8e is measured by its SDK and, for commands, by its whole command too.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

from benchmarks import memory, timing
from benchmarks import peers as peering
from benchmarks.peers import CGROUP, Peer, Standing
from benchmarks.stage import Stage
from k8e import SandboxClient
from k8e.bench.measure import Series, Skipped, TableRow
from k8e.runtimes import cgroups

ROUNDS, CYCLES = 20, 10
IDLE_COUNT = 10
SETTLE_SECONDS = 2.0
CODE = "print(1)"
CONTENT = "x" * 1023
COMMANDS = {
    "exec true": ["true"],
    "run Python": ["python3", "-c", CODE],
    "write 1 KiB": ["sh", "-c", 'printf %s "$0" >/tmp/small', CONTENT],
}
"""What is done, and the command that does it elsewhere."""


def measure(stage: Stage) -> Iterator[TableRow | Skipped]:
    skipped: list[Skipped] = []

    def skip(name: str, reason: str) -> None:
        skipped.append(Skipped("peers", "", name, reason))

    tools = {name: path for name in ("runc", "runsc") if (path := stage.host.tool(name))}
    with peering.found(stage.folder / "standing", tools, skip) as peers:
        yield from skipped
        for runtime in stage.runtimes:
            alike = [(peer, peer.standing) for peer in peers if peer.kind == runtime]
            usable = [(peer, how) for peer, how in alike if how is not None]
            yield from _commands(stage, runtime, usable)
            yield from _memory(stage, runtime, usable)
            yield from _churn(stage, runtime, usable)


def _label(peer: Peer) -> str:
    return peer.name.replace(" run ", " ")


def _name(peer: Peer, number: int = 0) -> str:
    """Of a container: those of one system share a store, whichever runtime they have."""
    return "".join(letter for letter in peer.name if letter.isalpha()) + str(number)


# Commands in one that lives.


def _commands(
    stage: Stage, runtime: str, peers: list[tuple[Peer, Standing]]
) -> Iterator[TableRow | Skipped]:
    client = stage.local_client()
    session_id = client.create_session(runtime)
    try:
        with contextlib.ExitStack() as stack:
            for peer, how in peers:
                stack.enter_context(_alive(peer, how, [_name(peer)]))
            for what, argv in COMMANDS.items():
                contenders = _ours(stage, client, session_id, what)
                mine = list(contenders)
                for peer, how in peers:
                    contenders[_label(peer)] = timing.program(how.exec(_name(peer), argv), peer.env)
                took = timing.interleave(stage.rounds(ROUNDS), contenders, warm_up=1)
                yield from _rows(runtime, what, took, mine)
    finally:
        client.destroy_session(session_id)


def _ours(
    stage: Stage, client: SandboxClient, session_id: str, what: str
) -> dict[str, timing.Timed]:
    if what == "run Python":
        run = timing.timed(lambda: client.run(CODE, "python", session_id=session_id))
        return {"k8e, SDK": run}
    if what == "write 1 KiB":
        write = timing.timed(lambda: client.write_file(session_id, "small", CONTENT))
        return {"k8e, SDK": write}
    k8e = [sys.executable, "-IS", str(stage.launcher), "sandbox", "run"]
    argv = [*k8e, "--session-id", session_id, "--lang", "bash", "true"]
    return {
        "k8e, SDK": timing.timed(lambda: client.exec(session_id, COMMANDS[what])),
        "k8e, command": timing.program(argv, stage.environment()),
    }


def _rows(
    runtime: str, what: str, took: dict[str, list[float]], mine: list[str]
) -> Iterator[TableRow]:
    series = {
        name: Series(f"{name}, {what}", "ms", timing.milliseconds(took[name])) for name in took
    }
    for ours in mine:
        for name in series:
            if name not in mine:
                yield TableRow("peers", runtime, series[ours], series[name], sense="speed-up")


@contextlib.contextmanager
def _alive(peer: Peer, how: Standing, names: list[str]) -> Generator[None]:
    try:
        for name in names:
            timing.output(how.start(name), peer.env)
        yield
    finally:
        for name in names:
            with contextlib.suppress(timing.ProgramFailed):  # the others must go too
                timing.output(how.remove(name), peer.env)


# Memory.


def _memory(stage: Stage, runtime: str, peers: list[tuple[Peer, Standing]]) -> Iterator[TableRow]:
    count = 2 if stage.quick else IDLE_COUNT
    client = stage.local_client()
    made = [client.create_session(runtime) for _ in range(count)]
    try:
        time.sleep(SETTLE_SECONDS)
        ours = memory.sandboxes_mb(map(stage.sandbox_of, made)) / count
    finally:
        for session_id in made:
            client.destroy_session(session_id)
    mine = Series(f"k8e, PSS of each of {count}", "MB", [ours])
    for peer, how in peers:
        with _alive(peer, how, [_name(peer, each) for each in range(count)]):
            time.sleep(SETTLE_SECONDS)
            total = memory.processes_mb(memory.below(_peer_groups())) / count
        theirs = Series(f"{_label(peer)}, PSS of each of {count}", "MB", [total])
        note = "ours: guest and interpreter; theirs: sleep, and what is in its group"
        yield TableRow("peers", runtime, mine, theirs, note=note)


def _peer_groups() -> list[Path]:
    return [hierarchy / CGROUP for hierarchy in cgroups.hierarchies()]


# Making and removing.


def _churn(stage: Stage, runtime: str, peers: list[tuple[Peer, Standing]]) -> Iterator[TableRow]:
    client = stage.local_client()
    what = "made and removed"
    contenders: dict[str, timing.Timed] = {
        "k8e, SDK": timing.timed(lambda: client.destroy_session(client.create_session(runtime)))
    }
    for peer, how in peers:
        contenders[_label(peer)] = timing.timed(lambda peer=peer, how=how: _cycle(peer, how))
    took = timing.interleave(stage.rounds(CYCLES), contenders, warm_up=1)
    yield from _rows(runtime, what, took, ["k8e, SDK"])


def _cycle(peer: Peer, how: Standing) -> None:
    timing.output(how.start(_name(peer)), peer.env)
    timing.output(how.remove(_name(peer)), peer.env)
