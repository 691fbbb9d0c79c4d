"""``make test-long``: faults of the controller in a loop, with claims under way all the time.

In an order that a seed decides, the controller is killed, a second one works beside it without a
lease, the API server is killed, the database stops for half a second again and again, or pods are
evicted. After each round every claim has one sandbox, no sandbox was ever given to two claims, no
claim was ever told two sandboxes, no pod is without its sandbox, and the pool is full.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time

from tests.controller.clusters import SandboxCluster, claim, pool, template
from tests.controller.control_planes import control_plane
from tests.controller.invariants import check_bindings

_POOL, _CLAIMS = 6, 8
_FAULTS = ("kill", "double", "api", "slow", "evict")
_STOPS, _STOP_SECONDS = 6, 0.5


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.controller.loops")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chosen = random.Random(options.seed)
    with control_plane() as plane, SandboxCluster(plane) as cluster, cluster.new_namespace():
        [first] = cluster.controllers
        cluster.stop_controller(first)
        cluster.start_controller("--leader-elect=false")
        cluster.apply(template(), pool(replicas=_POOL))
        cluster.wait_pool("pool", _POOL)
        for number in range(options.rounds):
            fault = chosen.choice(_FAULTS)
            began = time.monotonic()
            _round(cluster, chosen, number, fault)
            print(
                f"round {number} of seed {options.seed}: {fault}, {time.monotonic() - began:.1f} s"
            )
    return 0


def _round(cluster: SandboxCluster, chosen: random.Random, number: int, fault: str) -> None:
    names = [f"r{number}-{at}" for at in range(_CLAIMS)]
    second = cluster.start_controller("--leader-elect=false") if fault == "double" else None
    cluster.apply(*(claim(name) for name in names))
    time.sleep(chosen.random())  # the moment of the fault is what the seed decides
    if fault == "kill":
        [process] = cluster.controllers
        cluster.stop_controller(process, signal.SIGKILL)
        cluster.start_controller("--leader-elect=false")
    elif fault == "api":
        cluster.plane.restart_api_server()
    elif fault == "slow":
        for _ in range(_STOPS):
            cluster.plane.pause("etcd", _STOP_SECONDS)
    elif fault == "evict":
        cluster.kubectl("delete", "pods", "--all", "--wait=false")
    check_bindings(cluster, names, replicas=_POOL)
    if second is not None:
        cluster.stop_controller(second)
    cluster.kubectl("delete", "sandboxclaims", *names, "--wait=false")


if __name__ == "__main__":
    sys.exit(main())
