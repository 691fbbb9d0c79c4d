"""Thousands of sessions of mixed work: the gateway stays small, and nothing is left of them.

    python -m benchmarks.soak --sessions 5000

It prints how the gateway's memory went, and fails where something grew or a session did wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

from benchmarks import leaks, mixing, serving, stage, world
from benchmarks.stage import Amount
from k8e import SandboxClient
from k8e.sessions.store import SqliteSessionStore
from k8e.settings import Settings

WORKERS = 3
PIECES = 3  # of work in one session
SHORT_LIFE = 4.0  # seconds of a session that nobody destroys …
NEGLECTED = 0.1  # … and how many of them there are
WARM_UP = 0.25  # of all sessions: allocators and caches fill first
MAX_SLOPE = 3.0  # MB that a thousand sessions may add
MAX_GROWTH = 12.0  # MB for runs that are too short for a slope
ENOUGH = 400  # sessions for a slope
SETTLE_SECONDS = 30.0
SAME = 3  # looks, half a second apart, that see the same
MAX_FAILURES = 10
BOUNDED = {
    "threads": 8,  # the event loop's pool starts them as it needs them, and never more
    leaks.TIMED: 64,  # of the last sessions
}


class Course:
    """How a soak went."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.done = 0
        self.works: Counter[str] = Counter()
        self.samples: list[tuple[int, float]] = []
        """Sessions so far, and the gateway's memory in MB."""
        self.problems: list[str] = []


def slope(samples: Sequence[tuple[int, float]]) -> float:
    """MB for a thousand sessions, by least squares."""
    count = len(samples)
    if count < 2:
        return 0.0
    middle = sum(at for at, _ in samples) / count
    mean = sum(mb for _, mb in samples) / count
    spread = sum((at - middle) ** 2 for at, _ in samples)
    return 1000 * sum((at - middle) * (mb - mean) for at, mb in samples) / spread if spread else 0.0


def judge_memory(samples: Sequence[tuple[int, float]], sessions: int) -> list[str]:
    """What is wrong with the course of the memory, after the warm-up."""
    steady = [item for item in samples if item[0] >= sessions * WARM_UP]
    if len(steady) < 2:
        return []
    if sessions >= ENOUGH and slope(steady) > MAX_SLOPE:
        return [f"the gateway grows by {slope(steady):.1f} MB for a thousand sessions"]
    growth = steady[-1][1] - steady[0][1]
    if sessions < ENOUGH and growth > MAX_GROWTH:
        return [f"the gateway grew by {growth:.1f} MB"]
    return []


class Soak:
    """One gateway, and those who use it."""

    def __init__(
        self, config: Settings, gateway: serving.Gateway, runtimes: Sequence[str], *, seed: int = 0
    ) -> None:
        self._config = config
        self._gateway = gateway
        self._runtimes = runtimes
        self._endpoint = f"unix:{config.socket}"
        self._works = mixing.everything(self._endpoint)
        self._lock = threading.Lock()
        self._seed = seed
        self.course = Course()

    def run(self, sessions: int) -> Course:
        """Use so many sessions, and look at what is left."""
        self._one_of_each()
        before = self._settled()
        turns = iter(range(sessions))
        threads = [
            threading.Thread(target=self._work, args=(turns, max(1, sessions // 50)))
            for _ in range(WORKERS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._check_end(before)
        self.course.problems += judge_memory(self.course.samples, sessions)
        return self.course

    def _one_of_each(self) -> None:
        """So that all is loaded that ever will be, before anything is counted."""
        with SandboxClient(self._endpoint) as client:
            for runtime in self._runtimes:
                session_id = client.create_session(runtime)
                for work in self._works:
                    work(client, session_id)
                client.destroy_session(session_id)

    def _work(self, turns: Iterator[int], every: int) -> None:
        with SandboxClient(self._endpoint) as client:
            while len(self.course.problems) < MAX_FAILURES:
                with self._lock:
                    turn = next(turns, None)
                if turn is None:
                    return
                try:
                    self._session(client, turn)
                except Exception as error:  # one more reason to fail, at the end
                    self.course.problems.append(f"{type(error).__name__}: {error}")
                self._count(every)

    def _session(self, client: SandboxClient, turn: int) -> None:
        # Of its own number, so that it is the same one whichever thread has it.
        chance = random.Random(f"{self._seed} {turn}")
        runtime = self._runtimes[turn % len(self._runtimes)]
        neglected = chance.random() < NEGLECTED
        lifetime = SHORT_LIFE if neglected else 0.0
        session_id = client.create_session(runtime, lifetime=lifetime)
        try:
            for work in chance.choices(self._works, k=PIECES):
                work(client, session_id)
                self.course.works[work.__qualname__.partition(".")[0]] += 1
        except Exception:
            if not neglected:  # else it may have ended in the middle of anything
                raise
        if not neglected:
            client.destroy_session(session_id)

    def _count(self, every: int) -> None:
        with self._lock:
            self.course.done += 1
            if self.course.done % every == 0:
                self.course.samples.append((self.course.done, self._gateway.resident_mb()))

    # What is left.

    def _look(self) -> leaks.Counts:
        folder = self._config.data_dir.parent
        found = leaks.count(folder, self._gateway.pid)
        return found | leaks.count_router(self._config.run_dir / "net" / "router")

    def _settled(self) -> leaks.Counts:
        """Counts that stay the same for a while, with all that the gateway makes ahead."""
        with SandboxClient(self._endpoint) as client:
            self._until(lambda: all(item["ready"] >= item["target"] for item in client.pool()))
        seen: list[leaks.Counts] = []

        def is_settled() -> bool:
            seen.append(self._look() | {leaks.GATEWAY_MB: 0})
            return len(seen) >= SAME and all(item == seen[-1] for item in seen[-SAME:])

        self._until(is_settled)
        return seen[-1]

    def _until(self, check: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SETTLE_SECONDS
        while not check() and time.monotonic() < deadline:
            time.sleep(0.5)

    def _check_end(self, before: leaks.Counts) -> None:
        """Nothing is there that was not there before, and the audit trail is whole."""
        with SandboxClient(self._endpoint) as client:
            self._until(lambda: not client.list_sessions())
            self.course.problems += client.verify_audit()["problems"]
            waiting = sum(int(pool["max"]) for pool in client.pool())
        self._until(lambda: not self._left(before))
        self.course.problems += self._left(before)
        store = SqliteSessionStore(self._config.data_dir / "sessions.db")
        known = store.sandboxes()
        store.close()
        folder = self._config.data_dir.parent
        self.course.problems += leaks.left_behind(known, folder)
        self.course.problems += leaks.unknown(known, waiting, folder)

    def _left(self, before: leaks.Counts) -> list[str]:
        grown = leaks.grown(before, self._look())
        return [
            f"left: {name} +{more:g}"
            for name, more in sorted(grown.items())
            if more > BOUNDED.get(name, 0)
        ]


@contextlib.contextmanager
def staged(runtimes: Sequence[str], *, seed: int = 0) -> Generator[Soak]:
    """A gateway in a world of its own."""
    with stage.staged(Amount(runtimes)) as place, world.made(place.folder / "world") as uplink:
        config = stage.make_settings(place.folder / "soak")
        extra = {
            "K8E_UPLINK_NAMESPACE": str(uplink),
            "K8E_RESOLVERS": world.RESOLVER,
            "K8E_ALLOWED_HOSTS": world.NAME,
            "K8E_POOL_MIN": "1",
            "K8E_POOL_MAX": "1",
        }
        env = stage.environment(config, HOME=str(place.folder), **extra)
        gateway = serving.Gateway(config, env)
        try:
            yield Soak(config, gateway, runtimes, seed=seed)
        finally:
            gateway.stop()


def report(course: Course) -> dict[str, object]:
    seconds = time.monotonic() - course.began
    steady = course.samples[len(course.samples) // 4 :]
    return {
        "sessions": course.done,
        "seconds": round(seconds, 1),
        "work": dict(sorted(course.works.items())),
        "gateway_mb": [round(mb, 1) for _, mb in course.samples],
        "mb_per_1000_sessions": round(slope(steady), 2) if course.done >= ENOUGH else None,
        "problems": course.problems[:MAX_FAILURES],
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.soak", description=__doc__)
    parser.add_argument("--sessions", type=int, default=5000)
    parser.add_argument("--runtime", choices=list(stage.RUNTIMES), action="append")
    parser.add_argument("--seed", type=int, help="repeat the sessions of an earlier run")
    parser.add_argument("--json", type=Path, help="write the report there too")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    sys.stderr.write(f"seed {seed}\n")
    with staged(options.runtime or list(stage.RUNTIMES), seed=seed) as soak:
        told = {"seed": seed, **report(soak.run(options.sessions))}
    text = json.dumps(told, indent=1)
    sys.stdout.write(text + "\n")
    if options.json:
        options.json.write_text(text, "utf-8")
    return 1 if told["problems"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
