"""``exec`` of ``true`` into a live session, against ``runsc exec`` and ``runc exec``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import floors, timing
from benchmarks.stage import RUNTIMES, Stage, make_settings
from k8e import SandboxClient
from k8e.bench.measure import Goal, Series, TableRow
from k8e.client import requests

ROUNDS = 100
PROGRAM = ["/bin/true"]  # what the runtimes' own tools start, too
LINE = "true"  # goes through the sandbox's shell
LOCAL_BARS = {"gvisor": Goal("faster", 2.5), "container": Goal("faster", 5)}
REMOTE_BARS = {"container": Goal("faster", 3)}
LINK_BARS = {"gvisor": Goal("ratio", 1.15)}


def measure(stage: Stage) -> Iterator[TableRow]:
    for runtime in stage.runtimes:
        yield from _measure(stage, runtime)


def _measure(stage: Stage, runtime: str) -> Iterator[TableRow]:
    local, remote = stage.local_client(), stage.remote_client()
    session_id = local.create_session(runtime)
    sandbox_id = stage.sandbox_of(session_id)
    tool = stage.runtime(runtime)
    peer = f"{tool.tool_name} exec true"
    with floors.lone(RUNTIMES[runtime], make_settings(stage.folder / f"exec-{runtime}")) as lone:
        took = timing.interleave(
            stage.rounds(ROUNDS),
            {
                "exec(['true'])": timing.timed(one_exec(local, session_id, PROGRAM)),
                "exec('true')": timing.timed(one_exec(local, session_id, LINE)),
                "exec(['true']), gRPC": timing.timed(one_exec(remote, session_id, PROGRAM)),
                "guest on its link": lambda: lone.exec(guest_call()),
                peer: timing.program(floors.exec_argv(tool, sandbox_id, *PROGRAM)),
            },
            warm_up=3,
        )
    local.destroy_session(session_id)
    series = {name: Series(name, "ms", timing.milliseconds(took[name])) for name in took}
    for name, bars in (
        ("exec(['true'])", LOCAL_BARS),
        ("exec('true')", LOCAL_BARS),
        ("exec(['true']), gRPC", REMOTE_BARS),
    ):
        bar = bars.get(runtime)
        yield TableRow("exec", runtime, series[name], series[peer], bar, sense="speed-up")
    ours, floor = series["exec(['true'])"], series["guest on its link"]
    yield TableRow("exec", runtime, ours, floor, LINK_BARS.get(runtime))


def one_exec(
    client: SandboxClient, session_id: str, command: str | list[str]
) -> Callable[[], None]:
    def run() -> None:
        result = client.exec(session_id, command)
        if result.exit_code:
            raise timing.ProgramFailed(f"{command!r} in the sandbox: {result}")

    return run


def guest_call() -> dict[str, Any]:
    """What the SDK's call is when it reaches the guest."""
    call = requests.command_call({}, PROGRAM, timeout=30, stdin=False, options={})
    del call["session"]
    return call
