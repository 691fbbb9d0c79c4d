"""The warm pool, as far as benchmarks know it. All of that is in this file."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from typing import Any

from benchmarks import stage as stages
from benchmarks.serving import Gateway
from benchmarks.stage import Stage
from k8e import SandboxClient


class Absent(Exception):
    """There is no warm pool to measure; the message says why."""


class Pool:
    """A gateway of its own that keeps ``size`` sandboxes of one runtime ready."""

    def __init__(self, client: SandboxClient, endpoint: str, runtime: str, size: int) -> None:
        self.client = client
        self.endpoint = endpoint
        self.size = size
        self._runtime = runtime
        self._admin: Any = client

    def wait(self) -> None:
        """Until as many are ready as were asked for."""
        self._admin.set_pool("", self._runtime, min_ready=self.size, max_ready=self.size, wait=True)

    def hits(self) -> int:
        """How many sessions got a sandbox from it so far."""
        return sum(item["hits"] for item in self._admin.pool() if item["runtime"] == self._runtime)


@contextlib.contextmanager
def filled(stage: Stage, runtime: str, size: int, **extra: str) -> Generator[Pool]:
    """A gateway with a full pool; Absent where this build has none."""
    if not hasattr(SandboxClient, "set_pool"):
        raise Absent("not in this build: there is no warm pool")
    config = stages.make_settings(stage.folder / f"pool-{runtime}-{time.monotonic_ns()}")
    sizes = {
        "K8E_POOL_MIN": str(size),
        "K8E_POOL_MAX": str(size),
        "K8E_POOL_TOTAL": str(size),
        "K8E_RUNTIME": runtime,
    }
    env = stages.environment(config, HOME=str(stage.folder), **sizes, **extra)
    gateway = Gateway(config, env)
    endpoint = f"unix:{config.socket}"
    try:
        with SandboxClient(endpoint) as client:
            pool = Pool(client, endpoint, runtime, size)
            pool.wait()
            yield pool
    finally:
        gateway.stop()
