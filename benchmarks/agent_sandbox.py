"""How long a claim on a warm pool takes, as a client sees it that watches: ``k8e controller``.

    python -m benchmarks.agent_sandbox --rate 45 --seconds 60 --pools 4 --size 113
    python -m benchmarks.agent_sandbox --burst 300 --pools 1 --size 310
    python -m benchmarks.agent_sandbox --objects 10000

With ``--objects`` it measures how fast so many sandboxes are made, and then a controller that
starts with them: until it knows all, its memory, and what it costs while nothing happens.

etcd, API server, controller, the stand-in for kubelets and this client share the machine: its load
is printed with the numbers. Writes are counted from the API server's audit log.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from k8e.controller import resources
from k8e.controller.cache import Cache
from k8e.kubernetes.api import Api, Object, read_kubeconfig, section
from tests.controller.clusters import (
    SandboxCluster,
    claim,
    eventually,
    pool,
    sandbox,
    template,
)
from tests.controller.control_planes import control_plane

_FILL_SECONDS = 600.0
_LAST_SECONDS = 120.0
_QUIET_SECONDS, _QUIET_SHARE = 20.0, 0.1


class Client:
    """Makes claims, and watches when each is ready."""

    def __init__(self, kubeconfig: Path, namespace: str, pools: int) -> None:
        server, identity, token = read_kubeconfig(kubeconfig)
        self._api = Api(server, identity, token=token, most_idle=64, reuse_for_posts=True)
        self._path = resources.collection(resources.CLAIM, namespace)
        self._pools = pools
        self._began: dict[str, float] = {}
        self.took: dict[str, float] = {}
        self._all = asyncio.Event()

    async def run(self, *, rate: float, seconds: float, burst: int) -> None:
        version = str((await self._api.get(self._path))["metadata"]["resourceVersion"])
        watch = asyncio.create_task(self._watch(version))
        count, tasks = burst, [asyncio.create_task(self._claim(at)) for at in range(burst)]
        end = next_at = time.perf_counter()
        end += 0 if burst else seconds
        while next_at < end:
            await asyncio.sleep(max(0.0, next_at - time.perf_counter()))
            tasks.append(asyncio.create_task(self._claim(count)))
            count, next_at = count + 1, next_at + random.expovariate(rate)
        await asyncio.gather(*tasks)
        async with asyncio.timeout(_LAST_SECONDS):
            while len(self.took) < count:
                self._all.clear()
                await self._all.wait()
        watch.cancel()

    async def _claim(self, number: int) -> None:
        wanted = claim(f"c-{number}", f"pool-{number % self._pools}")
        self._began[wanted["metadata"]["name"]] = time.perf_counter()
        await self._api.call("POST", self._path, wanted)

    async def _watch(self, version: str) -> None:
        while True:  # the server ends the watch of a client that is too slow
            path = f"{self._path}?watch=true&resourceVersion={version}&timeoutSeconds=600"
            async for line in self._api.lines(path):
                found: Object = json.loads(line)["object"]
                version, name = found["metadata"]["resourceVersion"], found["metadata"]["name"]
                given = section(found, "status", "sandbox").get("name")
                if given and name not in self.took and resources.is_true(found, "Ready"):
                    self.took[name] = time.perf_counter() - self._began[name]
                    self._all.set()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agent_sandbox")
    parser.add_argument("--rate", type=float, default=45.0, help="claims a second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--burst", type=int, default=0, help="so many at once instead")
    parser.add_argument("--pools", type=int, default=4)
    parser.add_argument("--size", type=int, default=113, help="of each pool")
    parser.add_argument("--objects", type=int, default=0, help="so many sandboxes instead")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended, it leaves nothing behind
    if options.objects:
        return _measure_objects(options.objects)
    with control_plane() as plane, SandboxCluster(plane) as cluster, cluster.new_namespace():
        pools = [pool(f"pool-{at}", options.size) for at in range(options.pools)]
        # A lease that cannot be renewed on a busy machine would end it, and nobody starts it again.
        [first] = cluster.controllers
        cluster.stop_controller(first)
        cluster.start_controller("--leader-elect=false")
        cluster.apply(template(), *pools)
        wanted = options.pools * options.size

        def ready() -> bool:
            listed = cluster.list("swp")
            return sum(section(one, "status").get("readyReplicas", 0) for one in listed) >= wanted

        began = time.monotonic()
        eventually("the pools are full", ready, seconds=_FILL_SECONDS)
        filled = time.monotonic() - began
        client = Client(plane.admin, cluster.namespace, options.pools)
        before = os.getloadavg()[0]
        asyncio.run(client.run(rate=options.rate, seconds=options.seconds, burst=options.burst))
        _print(client, cluster, filled, before)
    return 0


def _measure_objects(count: int) -> int:
    with control_plane() as plane, SandboxCluster(plane) as cluster, cluster.new_namespace():
        before = os.getloadavg()[0]
        began = time.monotonic()
        asyncio.run(_make_all(plane.admin, cluster.namespace, count))
        made = time.monotonic() - began
        [first] = cluster.controllers
        cluster.stop_controller(first)
        process = cluster.start_controller("--leader-elect=false")
        log = plane.folder / "programs.log"
        known = len(_synced(log))
        found = eventually("it knows all", lambda: _synced(log)[known:], seconds=_LAST_SECONDS)
        busy, seconds = _processor_seconds(process.pid), time.monotonic()
        eventually("it is quiet", lambda: _is_quiet(process.pid), seconds=_LAST_SECONDS)
        settled = time.monotonic() - seconds, _processor_seconds(process.pid) - busy
        busy, seconds = _processor_seconds(process.pid), time.monotonic()
        time.sleep(_QUIET_SECONDS)
        idle = (_processor_seconds(process.pid) - busy) / (time.monotonic() - seconds)
        result = {
            "sandboxes": count,
            "made_per_second": round(count / made, 1),
            "synced_seconds": found[-1],
            "first_look_seconds": round(settled[0], 1),
            "first_look_processor_seconds": round(settled[1], 1),
            "memory_mb": _memory(process.pid),
            "idle_cores": round(idle, 3),
            "load": [round(before, 1), round(os.getloadavg()[0], 1)],
            "processors": os.cpu_count(),
        }
        print(json.dumps(result, indent=1))
    return 0


async def _make_all(kubeconfig: Path, namespace: str, count: int) -> None:
    """Make sandboxes, and wait until the controller and the stand-in have made all ready."""
    server, identity, token = read_kubeconfig(kubeconfig)
    api = Api(server, identity, token=token, most_idle=16, reuse_for_posts=True)
    path, turns = resources.collection(resources.SANDBOX, namespace), asyncio.Semaphore(16)

    async def make(number: int) -> None:
        wanted = sandbox(f"s-{number}")
        async with turns:
            await api.call("POST", path, wanted)

    sandboxes = Cache(Api(server, identity, token=token), resources.SANDBOX, namespace=namespace)
    ready, all_ready = set[str](), asyncio.Event()

    def changed(_before: Object | None, after: Object | None) -> None:
        if after is not None and resources.is_true(after, "Ready"):
            ready.add(after["metadata"]["name"])
            if len(ready) == count:
                all_ready.set()

    sandboxes.tell(changed)
    follow = asyncio.create_task(sandboxes.run())
    await asyncio.gather(*(make(number) for number in range(count)))
    async with asyncio.timeout(_FILL_SECONDS):
        await all_ready.wait()
    follow.cancel()
    api.close()


def _synced(log: Path) -> list[float]:
    """How long each controller took to know everything, by its log."""
    found = re.findall(r"synced: \d+ objects, ([\d.]+) s", log.read_text("utf-8", "replace"))
    return [float(one) for one in found]


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _is_quiet(pid: int) -> bool:
    before = _processor_seconds(pid)
    time.sleep(1)
    return _processor_seconds(pid) - before < _QUIET_SHARE


def _memory(pid: int) -> dict[str, int]:
    text = Path(f"/proc/{pid}/status").read_text("ascii")
    names = {"now": "VmRSS", "most": "VmHWM"}
    found = {name: re.search(rf"{word}:\s+(\d+) kB", text) for name, word in names.items()}
    return {name: int(one[1]) // 1024 for name, one in found.items() if one is not None}


def _print(client: Client, cluster: SandboxCluster, filled: float, before: float) -> None:
    took = sorted(one * 1000 for one in client.took.values())
    names = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    last = len(took) - 1
    shown = {name: round(took[min(int(len(took) * at), last)], 1) for name, at in names.items()}
    labels = map(resources.labels_of, cluster.list("sandbox"))
    launches = Counter(one.get(resources.LAUNCH_TYPE, "idle") for one in labels)
    writes: Counter[str] = Counter()
    for entry in cluster.plane.audit():
        if "agent-sandbox-controller" in entry["user"]["username"]:
            target: Object = section(entry, "objectRef")
            words = entry["verb"], target["resource"], target.get("subresource")
            writes["/".join(filter(None, words))] += 1
    result = {
        "claims": len(took),
        "milliseconds": {**shown, "max": round(took[-1], 1)},
        "launches": dict(launches),
        "writes": dict(writes),
        "fill_seconds": round(filled, 1),
        "load": [round(before, 1), round(os.getloadavg()[0], 1)],
        "processors": os.cpu_count(),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    sys.exit(main())
