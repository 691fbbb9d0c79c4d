"""From the request for a sandbox until its first result: sequential, staggered, and in a burst.

"Result" is the first line that a command printed, for everybody: k8e's sessions made anew and from
the warm pool, the same spec by hand, and other systems. Its end, and what each cleans up, is off
the clock; of code that an interpreter runs for us, the end is the result. Sessions of k8e come with
an egress policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import NamedTuple

from benchmarks import peers as peering
from benchmarks import pool as pools
from benchmarks import timing, world
from benchmarks.peers import Peer
from benchmarks.stage import Stage
from k8e import AsyncSandboxClient, SandboxClient
from k8e.bench.measure import Goal, Series, Skipped, TableRow

ROUNDS = 20
BURST = 100
STAGGERED = 50
SPACING = 0.2  # seconds between two requests, as the public benchmark has it
READY = 4  # sandboxes in the pool for one claim at a time
WARM_BURSTS = 3
PATIENCE = 300.0
COMMANDS = {"echo": ["echo", "1"], "python": ["python3", "-c", "print(1)"]}
CODE = "print(1)"
PYTHON = "python3 -c pass"
FASTER = Goal("faster", 20)
MOST = {"container": Goal("most", 10), "gvisor": Goal("most", 18)}
MOST_BURST = {"container": Goal("most", 500), "gvisor": Goal("most", 1500)}
BAR_PEERS = {
    "container": ("podman run (crun)",),
    # With crun, podman has none of gVisor's protection; the same protection is what is compared.
    "gvisor": ("podman run (runsc)", "podman run (crun)"),
}

Result = TableRow | Skipped


class Ours(NamedTuple):
    """Sessions of one runtime: made anew, or from a full pool."""

    name: str
    runtime: str
    client: SandboxClient
    endpoint: str
    pool: pools.Pool | None

    def wait(self) -> None:
        if self.pool is not None:
            self.pool.wait()

    def hits(self) -> int:
        return self.pool.hits() if self.pool else 0

    def first(self, what: str) -> float:
        self.wait()
        hits = self.hits()
        began = time.perf_counter()
        session_id = self.client.create_session(self.runtime, [world.NAME])
        if what == "python":
            said = self.client.run(CODE, "python", session_id=session_id).stdout
            took = time.perf_counter() - began
        else:
            lines = self.client.exec_stream(session_id, COMMANDS[what])
            said = next(lines, "")
            took = time.perf_counter() - began
            said += "".join(lines)
        self.client.destroy_session(session_id)
        self.wait()  # what fills it up again would disturb the next contender
        if said != "1\n":
            raise timing.ProgramFailed(f"{what} printed {said!r}")
        if self.pool and self.hits() == hits:
            raise timing.ProgramFailed("a session did not come from the pool")
        return took

    async def at(self, moments: Sequence[float]) -> list[float]:
        """Seconds of each of many, begun at ``moments`` from now; those that fail are left out."""
        async with AsyncSandboxClient(self.endpoint) as client, asyncio.timeout(PATIENCE):
            made: list[str] = []
            origin = time.perf_counter()

            async def one(moment: float) -> float:
                await asyncio.sleep(max(0.0, origin + moment - time.perf_counter()))
                began = time.perf_counter()
                session_id = await client.create_session(self.runtime, [world.NAME])
                made.append(session_id)
                took = 0.0
                async for _ in client.exec_stream(session_id, COMMANDS["echo"], PATIENCE):
                    took = took or time.perf_counter() - began
                if not took:
                    raise timing.ProgramFailed("a command printed nothing")
                return took

            try:
                told = await asyncio.gather(*map(one, moments), return_exceptions=True)
                took = [each for each in told if isinstance(each, float)]
                if not took:
                    raise timing.ProgramFailed(f"none of {len(told)} had a result: {told[0]!r}")
                return took
            finally:
                for session_id in made:
                    await client.destroy_session(session_id)


def measure(stage: Stage) -> Iterator[Result]:
    skipped: list[Skipped] = []

    def skip(name: str, reason: str) -> None:
        skipped.append(Skipped("first", "", name, reason))

    tools = {
        name: path for name in ("runc", "runsc") if (path := stage.host.tool(name)) is not None
    }
    with (
        world.made(stage.folder / "first-world") as uplink,
        peering.found(stage.folder / "peers", tools, skip) as peers,
    ):
        uplinked = {"K8E_UPLINK_NAMESPACE": str(uplink), "K8E_RESOLVERS": world.RESOLVER}
        yield from skipped
        yield from _one_by_one(stage, peers, uplinked)
        for runtime in stage.runtimes:
            yield from _together(stage, runtime, peers, uplinked)


@contextlib.contextmanager
def _staged(
    stage: Stage, runtimes: Iterable[str], uplinked: dict[str, str], size: int
) -> Generator[tuple[list[Ours], list[Skipped]]]:
    """Sessions of the runtimes anew and, where there is a pool of ``size``, from it."""
    with contextlib.ExitStack() as stack:
        name = f"cold-{time.monotonic_ns()}"
        cold = stack.enter_context(stage.serving(name, **uplinked))
        ours: list[Ours] = []
        missing: list[Skipped] = []
        for runtime in runtimes:
            endpoint = stage.endpoint(name)
            ours.append(Ours(f"k8e {runtime}, new", runtime, cold, endpoint, None))
            try:
                pool = stack.enter_context(pools.filled(stage, runtime, size, **uplinked))
            except pools.Absent as error:
                missing.append(Skipped("first", runtime, "from the warm pool", str(error)))
                continue
            label = f"k8e {runtime}, pool"
            ours.append(Ours(label, runtime, pool.client, pool.endpoint, pool))
        yield ours, missing


def _one_by_one(stage: Stage, peers: list[Peer], uplinked: dict[str, str]) -> Iterator[Result]:
    with _staged(stage, stage.runtimes, uplinked, READY) as (ours, missing):
        yield from missing
        for what, argv in COMMANDS.items():
            contenders: dict[str, timing.Timed] = {PYTHON: timing.python_pass()}
            floors = {runtime: f"{stage.bare(runtime).tool} run" for runtime in stage.runtimes}
            for runtime, name in floors.items():
                contenders[name] = _call(stage.bare(runtime).first_line, argv)
            for peer in peers:
                contenders[peer.name] = _call(peer.first_line, argv)
            for each in ours:
                contenders[each.name] = _call(each.first, what)
            rounds = stage.rounds(ROUNDS if what == "echo" else ROUNDS // 2)
            took = timing.interleave(rounds, contenders, warm_up=1)
            series = {
                name: Series(f"{name}, sequential", "ms", timing.milliseconds(took[name]))
                for name in took
            }
            for each in ours:
                yield from _compare(what, each, series, floors[each.runtime], peers)


def _call(function: Callable[..., float], argument: object) -> timing.Timed:
    return lambda: function(argument)


def _compare(
    what: str, ours: Ours, series: dict[str, Series], floor: str, peers: list[Peer]
) -> Iterator[TableRow]:
    subject = f"first {what}"
    mine, warm = series[ours.name], ours.pool is not None
    limit = MOST[ours.runtime] if warm and what == "echo" else None
    yield TableRow(subject, ours.runtime, mine, series[floor], limit)
    yield TableRow(subject, ours.runtime, mine, series[PYTHON])
    for peer in peers:
        is_bar = warm and what == "echo" and peer.name in BAR_PEERS[ours.runtime]
        bar = FASTER if is_bar else None
        yield TableRow(subject, ours.runtime, mine, series[peer.name], bar, "speed-up", peer.note)


def _together(
    stage: Stage, runtime: str, peers: list[Peer], uplinked: dict[str, str]
) -> Iterator[Result]:
    burst, staggered = stage.many(BURST), stage.many(STAGGERED)
    argv = COMMANDS["echo"]
    bare = stage.bare(runtime)
    bare_burst = _burst_series(f"{bare.tool} run", [bare.burst(argv, burst)])
    others = {f"{bare.tool} run": _call(bare.first_line, argv)} | {
        peer.name: _call(peer.first_line, argv) for peer in peers if peer.kind == runtime
    }
    spreads = [_spread(name, work, staggered) for name, work in others.items()]
    with _staged(stage, [runtime], uplinked, burst) as (ours, missing):
        yield from missing
        bursts: dict[str, Series] = {}
        for each in ours:
            each.first("echo")  # the first one of a gateway makes what the others share
            moments = [SPACING * number for number in range(staggered)]
            took = timing.milliseconds(asyncio.run(each.at(moments)))
            mine = Series(f"{each.name}, staggered", "ms", took)
            note = f"{staggered}, {SPACING:g} s apart"
            for spread in spreads:
                yield TableRow("first echo", runtime, mine, spread, sense="speed-up", note=note)
            rounds: list[list[float]] = []
            hits = each.hits()
            for _ in range(WARM_BURSTS if each.pool else 1):
                each.wait()
                rounds.append(asyncio.run(each.at([0.0] * burst)))
            bursts[each.name] = _burst_series(each.name, rounds)
            failed = len(rounds) * burst - sum(map(len, rounds))
            note = f"{burst} at once" + (f", {failed} FAILED" if failed else "")
            if each.pool:
                note += f", {each.hits() - hits} of {len(rounds) * burst} from the pool"
            yield TableRow("first echo", runtime, bursts[each.name], bare_burst, note=note)
            wall = _wall_series(each.name, rounds, burst)
            bar = MOST_BURST[runtime] if each.pool and burst == BURST else None
            yield TableRow("first echo", runtime, wall, _wall_of(bare_burst, burst), bar)
    for peer in (one for one in peers if one.kind == runtime):
        try:
            theirs = _burst_series(peer.name, [peer.burst(argv, burst)])
        except timing.ProgramFailed as error:
            yield Skipped("first", runtime, f"{peer.name}, burst", str(error)[:200])
            continue
        for series in bursts.values():
            yield TableRow("first echo", runtime, series, theirs, sense="speed-up")


def _spread(name: str, work: timing.Timed, count: int) -> Series:
    took = timing.staggered(work, count, SPACING)
    return Series(f"{name}, staggered", "ms", timing.milliseconds(took))


def _burst_series(name: str, rounds: Sequence[Sequence[float]]) -> Series:
    seconds = [one for each in rounds for one in each]
    return Series(f"{name}, burst", "ms", timing.milliseconds(seconds))


def _wall_series(name: str, rounds: Sequence[Sequence[float]], count: int) -> Series:
    walls = timing.milliseconds([max(each) for each in rounds])
    return Series(f"{name}, the last of {count}", "ms", walls)


def _wall_of(burst: Series, count: int) -> Series:
    name = burst.name.removesuffix(", burst")
    return Series(f"{name}, the last of {count}", "ms", [max(burst.samples)])
