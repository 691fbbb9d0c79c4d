"""How quickly a cluster starts and what it takes: ``python -m benchmarks.cluster``.

On machines of its own (see ``tests/cluster/machine.py``), with components that are there already.
Memory is PSS, in which what processes share is counted once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.cluster.clusters import Cluster
from tests.cluster.machine import Machine

SETTLE_SECONDS = 60.0
IDLE_SECONDS = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster")
    parser.add_argument("--cni", default="basic", choices=("basic", "cilium"))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rounds = [measure(options.cni) for _ in range(options.rounds)]
    print(json.dumps({"cni": options.cni, "rounds": rounds}, indent=1))
    return 0


def measure(cni: str) -> dict[str, Any]:
    """One cluster from empty machines: a server, and an agent that joins."""
    cluster = Cluster("--disable-sandbox-matrix", cni=cni)
    load = round(os.getloadavg()[0], 1)
    try:
        began = time.monotonic()
        cluster.start()
        ready = time.monotonic() - began
        worked = cpu_seconds(cluster.server)
        cluster.pod("first", runtime="gvisor")
        ran = time.monotonic() - began
        agent = cluster.add_machine()
        began = time.monotonic()
        cluster.join(agent)
        joined = time.monotonic() - began
        worked_to_join = cpu_seconds(agent)
        cluster.kubectl("delete", "pod", "first", "--wait=true", seconds=120)
        time.sleep(SETTLE_SECONDS)
        found: dict[str, Any] = {
            "load": load,
            "node_ready_s": round(ready, 1),
            "node_ready_cpu_s": round(worked, 1),
            "gvisor_pod_ready_s": round(ran, 1),
            "join_s": round(joined, 1),
            "join_cpu_s": round(worked_to_join, 1),
            "steps": steps(cluster.said),
            "server_mb": memory(cluster.server),
            "agent_mb": memory(agent),
        }
        found["supervisor_cpu_percent"] = round(idle(cluster.server), 2)
        return found
    finally:
        cluster.close()


def cpu_seconds(machine: Machine) -> float:
    """For how long a machine has kept one CPU busy so far, whatever else runs on the computer."""
    for group in machine.groups:
        if (group / "cpuacct.usage").exists():
            return int((group / "cpuacct.usage").read_text("ascii")) / 1e9
        if found := re.search(r"^usage_usec (\d+)", _read(group / "cpu.stat"), re.MULTILINE):
            return int(found[1]) / 1e6
    return 0.0


def _read(path: Path) -> str:
    return path.read_text("ascii") if path.exists() else ""


def steps(said: str) -> dict[str, float]:
    """When the server told each step of its start, in seconds."""
    lines = re.findall(r"^k8e: \[ *([\d.]+) s\] (.+)$", said, re.MULTILINE)
    return {text: float(seconds) for seconds, text in lines if not text.startswith("runtime ")}


def memory(machine: Machine) -> dict[str, float]:
    """PSS of each component in megabytes; shims apart, and nothing of pods."""
    found: dict[str, float] = {}
    for pid in processes(machine):
        name = program(pid)
        text = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii")
        size = re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)
        found[name] = found.get(name, 0.0) + int(size[1] if size else 0) / 1000
    totals = {"components": 0.0, "shims": 0.0}
    for name, size in found.items():
        totals["shims" if "shim" in name else "components"] += size
    return {name: round(size, 1) for name, size in (found | totals).items()}


def processes(machine: Machine) -> Iterator[int]:
    """All processes of a machine but its first, by the computer's numbers."""
    own = Path(f"/proc/{machine.pid}/ns/pid").readlink()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            same = (folder / "ns/pid").readlink() == own
        except OSError:
            continue
        if same and int(folder.name) != machine.pid:
            yield int(folder.name)


def program(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    name = Path(words[0].decode("utf-8", "replace")).name
    return "k8e" if b"k8e" in words else name


def idle(machine: Machine) -> float:
    """How much of a CPU the supervisor uses while nothing happens."""
    pid = next(pid for pid in processes(machine) if program(pid) == "k8e")
    before = ticks(pid)
    time.sleep(IDLE_SECONDS)
    return (ticks(pid) - before) / IDLE_SECONDS  # a tick is a hundredth of a second: percent


def ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


if __name__ == "__main__":
    sys.exit(main())
