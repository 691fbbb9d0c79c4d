"""``make test-long``: what takes too long for every run. Its newest result is ``loops.json``.

Kills the supervisor and single components of a cluster again and again, in an order that a seed
decides. After each kill the cluster must heal by itself, and no container of a pod may change.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from k8e import _version
from tests.cluster.clusters import Cluster, eventually

RESULT = Path(__file__).with_name("loops.json")
HEAL_SECONDS = 180.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.loops")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--cni", default="cilium")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chosen = random.Random(options.seed)
    cluster = Cluster("--disable-sandbox-matrix", cni=options.cni)
    try:
        cluster.start()
        cluster.pod("plain")
        cluster.pod("gvisor", runtime="gvisor")
        healed = [kill(cluster, chosen, number) for number in range(options.kills)]
    finally:
        cluster.close()
    result = {
        "version": _version.__version__,
        "cni": options.cni,
        "seed": options.seed,
        "load": round(os.getloadavg()[2], 1),
        "kills": len(healed),
        "slowest_s": max(item["healed_s"] for item in healed),
        "each": healed,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    return 0


def kill(cluster: Cluster, chosen: random.Random, number: int) -> dict[str, Any]:
    """Kill one process, wait until all is well again, and look at the pods."""
    before = identities(cluster)
    status = told(cluster)
    victims = {item["name"]: item["pid"] for item in status["components"]} | {"k8e": status["pid"]}
    name = chosen.choice(sorted(victims))
    began = time.monotonic()
    cluster.server.run("kill", "-9", str(victims[name]))
    if name == "k8e":
        cluster.start()
    eventually(f"{name} is healed", lambda: is_well(cluster, victims, name), seconds=HEAL_SECONDS)
    assert identities(cluster) == before, f"{name}: containers of pods have changed"
    assert cluster.fetch("gvisor", f"http://{cluster.address('plain')}:8080/") == "plain"
    seconds = round(time.monotonic() - began, 1)
    print(f"{number + 1}: {name}, {seconds} s", flush=True)
    return {"killed": name, "healed_s": seconds}


def told(cluster: Cluster) -> dict[str, Any]:
    done = cluster.server.k8e("status", check=False)
    return json.loads(done.stdout)["cluster"]


def is_well(cluster: Cluster, before: dict[str, int], killed: str) -> bool:
    found = told(cluster)
    now = {item["name"]: item["pid"] for item in found["components"]} | {"k8e": found["pid"]}
    all_run = all(item["running"] for item in found["components"]) and bool(found["pid"])
    ready = [node["ready"] for node in found.get("nodes", [])]
    return all_run and ready == [True] and now[killed] != before[killed]


def identities(cluster: Cluster) -> set[str]:
    """The containers of our pods, and how often each was started again."""
    found = cluster.get("pods")["items"]
    return {
        f"{status['containerID']} {status['restartCount']}"
        for item in found
        for status in item["status"]["containerStatuses"]
    }


if __name__ == "__main__":
    sys.exit(main())
