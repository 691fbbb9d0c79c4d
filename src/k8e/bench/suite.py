"""The suite of ``k8e bench``: the waits of a user of a gateway, measured through the SDK.

Everything happens in sessions of its own, which end with it; those of a suite that was killed end
with their lifetime. Beside each number stands a floor that was measured in the same minute.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from k8e import errors
from k8e.bench.measure import (
    Series,
    TableRow,
    Timed,
    interleave,
    megabytes_per_second,
    milliseconds,
    timed,
)
from k8e.client.blocking import SandboxClient

LABELS = {"k8e-bench": "1"}
MAKING_SECONDS = 3.0  # in which a gateway may still make a session that its client gave up
LIFETIME = 900.0  # seconds; a suite takes less than a minute
PATIENCE = 120.0
PROGRAM = ["true"]
LANGUAGES = {
    "python": ("print(1)", ("python3", "-c")),
    "node": ("console.log(1)", ("node", "-e")),
    "bash": ("echo 1", ("bash", "-c")),
}
"""A program in each, and the command that starts an interpreter for it."""
SMALL = 1 << 10
FILE = "bench.bin"
WARM_SECONDS = 0.4  # after which an interpreter is started ahead even in a busy session
NOTHING = "a call of nothing"
PYTHON = "python -c pass on this host"

Tell = Callable[[str], None]
"""Called with the name of what is being measured."""


@dataclass(frozen=True)
class Plan:
    """The numbers of rounds and sessions of a measurement."""

    rounds: int = 20
    at_once: int = 10
    large: int = 100 << 20
    """Bytes of the large file."""


QUICK = Plan(rounds=2, at_once=2, large=1 << 20)


class Suite:
    """Measures one runtime of one gateway; ``runtime`` may be empty for the gateway's choice."""

    def __init__(self, client: SandboxClient, runtime: str, plan: Plan, tell: Tell) -> None:
        self._client = client
        self._runtime = runtime
        self._plan = plan
        self._tell = tell
        self._made: set[str] = set()

    def measure(self) -> Generator[TableRow]:
        """Yield rows as they are ready; the sessions are destroyed, also when it is left early."""
        try:
            yield from self._first_results()
            with self._session() as session_id:
                yield from self._execs(session_id)
                for language in LANGUAGES:
                    yield from self._run(session_id, language)
                yield from self._files(session_id)
        finally:
            for session_id in tuple(self._made):
                with suppress(errors.K8eError, OSError):
                    self._destroy_surely(session_id)

    # Sessions.

    def _create(self) -> str:
        session_id = f"bench-{os.urandom(10).hex()}"
        self._made.add(session_id)  # first, because an interrupted call may still make it
        return self._client.create_session(
            self._runtime,
            session_id=session_id,
            labels=LABELS,
            lifetime=LIFETIME,
            idle_timeout=LIFETIME,
        )

    def _destroy(self, session_id: str) -> None:
        self._client.destroy_session(session_id)
        self._made.discard(session_id)

    def _destroy_surely(self, session_id: str) -> None:
        """Destroy a session that may still be in the making."""
        until = time.monotonic() + MAKING_SECONDS
        while True:
            try:
                self._destroy(session_id)
                return
            except errors.SessionNotFound:
                if time.monotonic() > until:
                    return
            time.sleep(0.1)

    @contextmanager
    def _session(self) -> Generator[str]:
        session_id = self._create()
        try:
            yield session_id
        finally:
            self._destroy(session_id)

    def _exec(self, session_id: str, *argv: str) -> None:
        done = self._client.exec(session_id, list(argv), PATIENCE)
        if done.exit_code:
            raise errors.GuestFailed(f"{argv[0]} ended with {done.exit_code}: {done.stderr[:200]}")

    # What is measured.

    def _first_results(self) -> Iterator[TableRow]:
        """From the request for a session until a program in it has ended."""
        plan, destroyed = self._plan, list[float]()

        def once() -> float:
            began = time.perf_counter()
            session_id = self._create()
            self._exec(session_id, *PROGRAM)
            took = time.perf_counter() - began
            destroyed.append(timed(lambda: self._destroy(session_id))())
            return took

        self._tell("create to first result")
        one = interleave(plan.rounds, {"": once, PYTHON: timed(_python_pass)}, warm_up=1)
        floor = Series(PYTHON, "ms", milliseconds(one[PYTHON]))
        yield self._row("create to first result", milliseconds(one[""]), floor)
        yield self._row("destroy", milliseconds(destroyed[1:]), floor)
        self._tell(f"{plan.at_once} sessions at once")
        with ThreadPoolExecutor(plan.at_once) as pool:
            tasks = [pool.submit(once) for _ in range(plan.at_once)]
            many = [task.result() for task in tasks]
        name = f"create to first result, {plan.at_once} at once"
        yield self._row(name, milliseconds(many), floor)

    def _execs(self, session_id: str) -> Iterator[TableRow]:
        self._tell("exec")
        rounds = 5 * self._plan.rounds
        work = timed(lambda: self._exec(session_id, *PROGRAM))
        one = interleave(rounds, {"": work, NOTHING: self._nothing()}, warm_up=1)
        nothing = Series(NOTHING, "ms", milliseconds(one[NOTHING]))
        yield self._row("exec true", milliseconds(one[""]), nothing)
        for width in (self._plan.at_once, 10 * self._plan.at_once):
            with ThreadPoolExecutor(width) as pool:
                tasks = [pool.submit(work) for _ in range(max(rounds, width))]
                many = [task.result() for task in tasks]
            yield self._row(f"exec true, {width} at once", milliseconds(many), nothing)

    def _run(self, session_id: str, language: str) -> Iterator[TableRow]:
        """Run code in a language; nothing where the sandbox does not have it."""
        code, command = LANGUAGES[language]
        if self._client.exec(session_id, f"command -v {command[0]}", PATIENCE).exit_code:
            return
        self._tell(f"run {language}")
        floor = f'{" ".join(command)} "{code}" in it'

        def run() -> float:
            time.sleep(WARM_SECONDS)
            return timed(lambda: self._client.run(code, language, session_id=session_id))()

        contenders: dict[str, Timed] = {
            "": run,
            floor: timed(lambda: self._exec(session_id, *command, code)),
        }
        took = interleave(self._plan.rounds, contenders, warm_up=1)
        peer = Series(floor, "ms", milliseconds(took[floor]))
        yield self._row(f"run {language}", milliseconds(took[""]), peer)

    def _files(self, session_id: str) -> Iterator[TableRow]:
        for size in (SMALL, self._plan.large):
            label = f"{size >> 20} MiB" if size >> 20 else f"{size >> 10} KiB"
            self._tell(f"files of {label}")
            rounds = self._plan.rounds if size == SMALL else max(2, self._plan.rounds // 5)
            with tempfile.TemporaryDirectory() as folder:
                took = interleave(rounds, self._copies(session_id, size, Path(folder)), warm_up=1)
            for verb in ("write", "read"):
                peer = _copied("a file on this host", size, took[f"{verb} here"])
                ours = _copied(f"{verb} {label}", size, took[verb])
                yield TableRow("", self._runtime, ours, peer)

    def _copies(self, session_id: str, size: int, folder: Path) -> dict[str, Timed]:
        data, here = os.urandom(size), folder / FILE

        def read() -> None:
            if self._client.read_bytes(session_id, FILE) != data:
                raise errors.GuestFailed("the data read differs from the data written")

        return {
            "write": timed(lambda: self._client.write_file(session_id, FILE, data)),
            "write here": timed(lambda: here.write_bytes(data)),
            "read": timed(read),
            "read here": timed(here.read_bytes),
        }

    def _nothing(self) -> Timed:
        """The gateway's quickest answer: a round trip alone."""
        return timed(self._client.status)

    def _row(self, name: str, samples: list[float], floor: Series) -> TableRow:
        return TableRow("", self._runtime, Series(name, floor.unit, samples), floor)


def _copied(name: str, size: int, seconds: list[float]) -> Series:
    """Small files are measured by time, large ones by speed."""
    if size == SMALL:
        return Series(name, "ms", milliseconds(seconds))
    return Series(name, "MB/s", megabytes_per_second(size, seconds))


def _python_pass() -> None:
    subprocess.run([sys.executable, "-I", "-c", "pass"], check=True)
