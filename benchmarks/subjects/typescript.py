"""The TypeScript SDK beside the Python SDK: commands, files, and the start of a program.

Both do the same in the same session, in turns. A warm interpreter is waited for before each warm
run: each uses one up, and whoever came right after the other's would measure how quickly the next
one starts.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from benchmarks import timing
from benchmarks.stage import Stage
from benchmarks.subjects import warm
from benchmarks.subjects.execs import PROGRAM, one_exec
from k8e import AsyncSandboxClient, SandboxClient
from k8e.bench.measure import Goal, Series, Skipped, TableRow
from k8e.client import local

SDK = Path(__file__).parents[2] / "sdk/typescript"
ROUNDS = 200
IMPORTS = 30
WIDTH = 100
BURSTS = 9
TRANSFERS = 8
SIZE = 100 << 20
SLOWER = Goal("ratio", 1.3)
AT_ONCE = Goal("ratio", 1.2)
LARGE = Goal("least", 300)
IMPORT = Goal("most", 60)


class Worker:
    """A program of Node.js that does what it is told, and says how long that took."""

    def __init__(self, setting: dict[str, object]) -> None:
        argv = [SDK / "node_modules/.bin/tsx", "bench/worker.ts"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, cwd=SDK, stdin=pipe, stdout=pipe, text=True)
        self.ask(json.dumps(setting))

    def ask(self, word: str) -> float:
        """Seconds that something took."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        told = self._process.stdout.readline()
        if not told:
            raise timing.ProgramFailed(f"the program of Node.js ended at {word}")
        return float(told)

    def timed(self, word: str) -> timing.Timed:
        return lambda: self.ask(word)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.ask("close")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timing.PATIENCE)


def measure(stage: Stage) -> Iterator[TableRow | Skipped]:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None or not (SDK / "node_modules/.stamp").exists():
        yield Skipped(
            "typescript", "", "all", "its packages are not there (sdk/typescript/setup.sh)"
        )
        return
    timing.output([npm, "--prefix", str(SDK), "run", "--silent", "build"])
    yield _importing(stage, node)
    for runtime in stage.runtimes:
        python = stage.local_client()
        session_id = python.create_session(runtime)
        setting: dict[str, object] = {
            "local": stage.local_endpoint,
            "remote": stage.settings.listen,
            "ca": str(stage.settings.data_dir / "tls/ca.crt"),
            "sessionId": session_id,
            "program": PROGRAM,
            "width": stage.many(WIDTH),
            "size": SIZE,
        }
        with Worker(setting) as worker:
            yield from _calls(stage, runtime, worker, python, session_id)
            yield from _at_once(stage, runtime, worker, session_id)
            yield from _files(stage, runtime, worker, python, session_id)
        python.destroy_session(session_id)


def _importing(stage: Stage, node: str) -> TableRow:
    """What ``import "k8e"`` adds to a Node.js that does nothing."""
    code = f"import({json.dumps(str(SDK / 'dist/index.mjs'))})"
    took = timing.interleave(
        stage.rounds(IMPORTS),
        {
            "import": timing.program([node, "-e", code]),
            "nothing": timing.program([node, "-e", "0"]),
        },
        warm_up=2,
    )
    pairs = zip(took["import"], took["nothing"], strict=True)
    added = timing.milliseconds([one - other for one, other in pairs])
    ours = Series('import "k8e"', "ms", added)
    floor = Series("node -e 0", "ms", timing.milliseconds(took["nothing"]))
    return TableRow("typescript", "", ours, floor, IMPORT)


def _calls(
    stage: Stage, runtime: str, worker: Worker, python: SandboxClient, session_id: str
) -> Iterator[TableRow]:
    remote = stage.remote_client()
    guest = local.Connection(local.dial(str(stage.settings.socket)))

    def run() -> None:
        python.run("pass", "python", session_id=session_id)

    def when_ready(work: timing.Timed) -> timing.Timed:
        def wait_and_work() -> float:
            warm.wait_until_ready(guest, session_id, "python")
            return work()

        return wait_and_work

    run()  # from then on interpreters are kept warm
    try:
        took = timing.interleave(
            stage.rounds(ROUNDS),
            {
                "exec": worker.timed("local-exec"),
                "exec, Python": timing.timed(one_exec(python, session_id, PROGRAM)),
                "warm run": when_ready(worker.timed("local-run")),
                "warm run, Python": when_ready(timing.timed(run)),
                "exec over TLS": worker.timed("remote-exec"),
                "exec over TLS, Python": timing.timed(one_exec(remote, session_id, PROGRAM)),
                "exec by @grpc/grpc-js": worker.timed("grpc-js-exec"),
            },
            warm_up=5,
        )
    finally:
        guest.close()
    series = {name: Series(name, "ms", timing.milliseconds(took[name])) for name in took}
    for name, bar in (("exec", SLOWER), ("warm run", SLOWER), ("exec over TLS", None)):
        yield TableRow("typescript", runtime, series[name], series[f"{name}, Python"], bar)
    yield TableRow("typescript", runtime, series["exec over TLS"], series["exec by @grpc/grpc-js"])


def _at_once(stage: Stage, runtime: str, worker: Worker, session_id: str) -> Iterator[TableRow]:
    width = stage.many(WIDTH)
    with asyncio.Runner() as runner:
        client = AsyncSandboxClient(stage.local_endpoint)

        async def burst() -> None:
            calls = (client.exec(session_id, PROGRAM, 120) for _ in range(width))
            await asyncio.gather(*calls)

        took = timing.interleave(
            stage.rounds(BURSTS),
            {
                "ours": worker.timed("local-at-once"),
                "python": timing.timed(lambda: runner.run(burst())),
            },
            warm_up=1,
        )
        runner.run(client.close())
    ours = Series(f"{width} execs at once", "ms", timing.milliseconds(took["ours"]))
    peer = Series(f"{width} execs at once, Python", "ms", timing.milliseconds(took["python"]))
    yield TableRow("typescript", runtime, ours, peer, AT_ONCE)


def _files(
    stage: Stage, runtime: str, worker: Worker, python: SandboxClient, session_id: str
) -> Iterator[TableRow]:
    content = bytes(SIZE)

    def write() -> None:
        python.write_file(session_id, "theirs", content)

    def read() -> None:
        python.read_bytes(session_id, "theirs")

    took = timing.interleave(
        stage.rounds(TRANSFERS),
        {
            "write": worker.timed("local-write"),
            "write, Python": timing.timed(write),
            "read": worker.timed("local-read"),
            "read, Python": timing.timed(read),
            "read over TLS": worker.timed("remote-read"),
            "read by @grpc/grpc-js": worker.timed("grpc-js-read"),
        },
        warm_up=1,
    )
    speeds = {
        name: Series(f"{name}, 100 MiB", "MB/s", timing.megabytes_per_second(SIZE, took[name]))
        for name in took
    }
    bar = LARGE if runtime == "container" else None
    for name in ("write", "read"):
        yield TableRow("typescript", runtime, speeds[name], speeds[f"{name}, Python"], bar)
    yield TableRow("typescript", runtime, speeds["read over TLS"], speeds["read by @grpc/grpc-js"])
