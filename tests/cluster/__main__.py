"""``make cluster``: a cluster on machines of its own, until ``make cluster-down``."""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import zlib
from pathlib import Path

from tests.cluster.clusters import Cluster
from tests.cluster.machine_init import CLONE

STATE = Path(f"/run/k8e-cluster-{zlib.crc32(bytes(CLONE)):08x}.json")
"""Of this clone: each may have a cluster of its own."""
SECONDS = 900.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster")
    parser.add_argument("action", choices=("up", "shell", "down"))
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--cni", default="cilium")
    parser.add_argument("--node", default="node-1")
    options = parser.parse_args()
    if options.action == "up":
        return up(options.nodes, options.cni)
    if options.action == "down":
        return down()
    return shell(options.node)


def up(nodes: int, cni: str) -> int:
    """Start a cluster; a process in the background holds its machines."""
    if STATE.exists():
        print(f"a cluster runs already ({STATE}); make cluster-down ends it")
        return 1
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(reading)
        os.setsid()
        hold(nodes, cni, writing)
        os._exit(0)
    os.close(writing)
    ready = select.select([reading], [], [], SECONDS)[0] and os.read(reading, 1)
    if not ready:
        return 1
    print("make cluster-shell enters its server; make cluster-down ends it")
    return 0


def hold(nodes: int, cni: str, told: int) -> None:
    signal.signal(signal.SIGTERM, _leave)
    # Whoever started us may read what we print to its end, which must not be that of a machine.
    progress = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    cluster = Cluster(cni=cni)
    try:
        cluster.start()
        print(f"{cluster.server.name}: ready", file=progress, flush=True)
        for _ in range(nodes - 1):
            cluster.join(machine := cluster.add_machine())
            print(f"{machine.name}: ready", file=progress, flush=True)
        commands = {machine.name: machine.command() for machine in cluster.machines}
        groups = {machine.name: list(map(str, machine.groups)) for machine in cluster.machines}
        state = {"pid": os.getpid(), "commands": commands, "groups": groups}
        STATE.write_text(json.dumps(state), "utf-8")
        os.write(told, b".")
        os.close(told)
        progress.close()
        signal.pause()
    finally:
        STATE.unlink(missing_ok=True)
        cluster.close()


def _leave(_number: int, _frame: object) -> None:
    sys.exit(0)


def shell(node: str) -> int:
    state = json.loads(STATE.read_bytes())
    for group in state["groups"][node]:
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()), "ascii")
    environ = {**os.environ, "KUBECONFIG": "/etc/k8e/k8e.yaml", "PS1": f"{node}# "}
    command = [*state["commands"][node], "bash", "--norc"]
    return subprocess.run(command, env=environ, check=False).returncode


def down() -> int:
    try:
        pid = json.loads(STATE.read_bytes())["pid"]
        descriptor = os.pidfd_open(pid)
    except (OSError, ValueError):
        print("no cluster runs")
        STATE.unlink(missing_ok=True)
        return 0
    signal.pidfd_send_signal(descriptor, signal.SIGTERM)
    return 0 if select.select([descriptor], [], [], SECONDS)[0] else 1


if __name__ == "__main__":
    sys.exit(main())
