"""Sessions made and destroyed: how many a second, how fast one is gone, and what is left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import leaks, timing
from benchmarks.stage import Stage
from k8e import SandboxClient
from k8e.bench.measure import Goal, Series, TableRow
from k8e.conformance import traces
from k8e.sessions.store import SqliteSessionStore

ROUNDS = 8
BATCH = 10  # cycles in a round, for each CPU
RELEASES = 15
SHARE = Goal("share", 0.6)
NOTHING = Goal("most", 0)
GROWTH_MB = Goal("most", 10)
SETTLE_SECONDS = 20.0
LOOK = 0.002
WORKERS = os.cpu_count() or 1


def measure(stage: Stage) -> Iterator[TableRow]:
    for runtime in stage.runtimes:
        client = stage.local_client()
        yield _sustained(stage, client, runtime)
        yield _released(stage, client, runtime)
        yield from _leaked(stage, client, runtime)


def _sustained(stage: Stage, client: SandboxClient, runtime: str) -> TableRow:
    bare = stage.bare(runtime)
    batch = (1 if stage.quick else BATCH) * WORKERS
    ours, peer = "create + destroy", f"{bare.tool} run, guest, delete"
    took = timing.interleave(
        stage.rounds(ROUNDS),
        {
            ours: timing.timed(lambda: _many(batch, lambda: _cycle(client, runtime))),
            peer: timing.timed(lambda: _many(batch, bare.cycle)),
        },
        warm_up=1,
    )
    series = {name: Series(name, "/s", [batch / each for each in took[name]]) for name in took}
    note = f"{WORKERS} at a time"
    return TableRow("churn", runtime, series[ours], series[peer], SHARE, note=note)


def _cycle(client: SandboxClient, runtime: str) -> None:
    client.destroy_session(client.create_session(runtime))


def _many(count: int, work: Callable[[], object]) -> None:
    with ThreadPoolExecutor(WORKERS) as pool:
        for task in [pool.submit(work) for _ in range(count)]:
            task.result()


def _released(stage: Stage, client: SandboxClient, runtime: str) -> TableRow:
    """From the call until neither a process nor a cgroup, a mount, a device or a file is left."""
    bare = stage.bare(runtime)
    folders = [stage.settings.run_dir, stage.settings.data_dir / "workspaces"]

    def release() -> float:
        session_id = client.create_session(runtime)
        sandbox_id = stage.sandbox_of(session_id)
        paths = [*traces.cgroups(sandbox_id), stage.host.folder(sandbox_id)]
        began = time.perf_counter()
        client.destroy_session(session_id)
        while _is_held(sandbox_id, paths) and time.perf_counter() - began < SETTLE_SECONDS:
            time.sleep(LOOK)
        took = time.perf_counter() - began
        # Off the clock, since it looks at every process and file there is.
        if left := traces.traces(sandbox_id, folders):
            raise timing.ProgramFailed(f"left of a sandbox: {left[:3]}")
        return took

    ours, peer = "destroyed, all gone", f"{bare.tool} delete, cgroups, files"
    contenders: dict[str, timing.Timed] = {ours: release, peer: bare.release}
    took = timing.interleave(stage.rounds(RELEASES), contenders, warm_up=1)
    series = {name: Series(name, "ms", timing.milliseconds(took[name])) for name in took}
    return TableRow("release", runtime, series[ours], series[peer])


def _is_held(sandbox_id: str, paths: list[Path]) -> bool:
    """Whether something is left; a cgroup that is gone has no processes either."""
    return (
        any(path.exists() for path in paths)
        or bool(traces.mounts(sandbox_id))
        or bool(traces.loop_devices(sandbox_id))
    )


def _leaked(stage: Stage, client: SandboxClient, runtime: str) -> Iterator[TableRow]:
    """The same counts before and after; the first cycles are not counted, they fill caches."""
    gateway, folder = stage.gateway().pid, stage.settings.data_dir.parent
    _many(2 * WORKERS, lambda: _cycle(client, runtime))
    before = _settled(lambda: leaks.count(folder, gateway))
    _many(stage.cycles, lambda: _cycle(client, runtime))
    after = _until_back(lambda: leaks.count(folder, gateway), before)
    store = SqliteSessionStore(stage.settings.data_dir / "sessions.db")
    known = store.sandboxes()
    store.close()
    alive = {path.name for path in stage.host.sandboxes.glob("sb-*")}
    left = leaks.left_behind(set(known) - alive, folder)
    grown = leaks.grown(before, after)
    note = ", ".join([*(f"{name} +{value:g}" for name, value in grown.items()), *left[:3]])
    total = sum(grown.values()) + len(left)
    name = f"left after {stage.cycles} cycles"
    yield TableRow("leaks", runtime, Series(name, "things", [total]), bar=NOTHING, note=note)
    growth = after[leaks.GATEWAY_MB] - before[leaks.GATEWAY_MB]
    name = f"gateway grew in {stage.cycles} cycles"
    yield TableRow("leaks", runtime, Series(name, "MB", [max(0.0, growth)]), bar=GROWTH_MB)


def _settled(look: Callable[[], leaks.Counts]) -> leaks.Counts:
    """Counts that stay the same for a moment: the gateway makes things ahead."""
    until = time.monotonic() + SETTLE_SECONDS
    found = look()
    while time.monotonic() < until:
        time.sleep(0.5)
        again = look()
        if not leaks.grown(found, again) and not leaks.grown(again, found):
            return again
        found = again
    return found


def _until_back(look: Callable[[], leaks.Counts], before: leaks.Counts) -> leaks.Counts:
    until = time.monotonic() + SETTLE_SECONDS
    while leaks.grown(before, found := look()) and time.monotonic() < until:
        time.sleep(0.5)
    return found
