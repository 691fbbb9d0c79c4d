"""The warm pool, as far as benchmarks know it. All of that is in this file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Generator, Iterator
from typing import Any, cast

from benchmarks import stage as stages
from benchmarks import timing
from benchmarks.serving import COMMAND, Gateway
from benchmarks.stage import Stage
from k8e import SandboxClient
from k8e.settings import Settings

FILL_SECONDS = 300.0
LOOK = 0.02  # seconds between two looks at how far it is
SETTINGS = {"pool_min", "pool_max"}


class Absent(Exception):
    """There is no warm pool to measure; the message says why."""


class Pool:
    """A gateway of its own that keeps ``size`` sandboxes of one runtime ready."""

    def __init__(self, config: Settings, env: dict[str, str], size: int, runtime: str) -> None:
        self.size = size
        self.runtime = runtime
        self.endpoint = f"unix:{config.socket}"
        self._env = env

    def client(self) -> SandboxClient:
        return SandboxClient(self.endpoint)

    def wait(self, count: int | None = None) -> None:
        """Until as many are ready as were asked for, or ``count`` of them."""
        wanted = self.size if count is None else min(count, self.size)
        until = time.monotonic() + FILL_SECONDS
        while (ready := self.ready()) < wanted:
            if time.monotonic() > until:
                raise Absent(f"{ready} of {wanted} were ready after {FILL_SECONDS:g} s")
            time.sleep(LOOK)

    def ready(self) -> int:
        told = timing.output([*COMMAND, "pool", "--json"], self._env)
        return sum(_ready(json.loads(told), self.runtime))


def _ready(told: Any, runtime: str) -> Iterator[int]:
    """The numbers called ``ready`` beside our runtime, wherever they stand in an answer."""
    items = cast("list[Any]", told) if isinstance(told, list) else []
    if isinstance(told, dict):
        table = cast("dict[str, Any]", told)
        if isinstance(table.get("ready"), int) and table.get("runtime", runtime) == runtime:
            yield table["ready"]
            return
        items = list(table.values())
    for item in items:
        yield from _ready(item, runtime)


@contextlib.contextmanager
def filled(stage: Stage, runtime: str, size: int, **extra: str) -> Generator[Pool]:
    """A gateway with a full pool; Absent where this build has none."""
    missing = SETTINGS - {item.name for item in dataclasses.fields(Settings)}
    if missing:
        raise Absent("not in this build: no warm pool (K8E_POOL_MIN, K8E_POOL_MAX)")
    folder = stage.folder / f"pool-{runtime}-{size}-{time.monotonic_ns()}"
    config = stages.make_settings(folder)
    sizes = {"K8E_POOL_MIN": str(size), "K8E_POOL_MAX": str(size), "K8E_RUNTIME": runtime}
    env = stages.environment(config, HOME=str(stage.folder), **sizes, **extra)
    gateway = Gateway(config, env)
    try:
        pool = Pool(config, env, size, runtime)
        pool.wait()
        yield pool
    finally:
        gateway.stop()
