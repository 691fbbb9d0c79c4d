"""What a gateway and its sandboxes hold of this machine, counted before and after many of them."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks import serving
from k8e.conformance import traces
from k8e.egress import namespaces
from k8e.egress.nftables import Nftables
from k8e.egress.rules import TABLE

Counts = dict[str, float]
GATEWAY_MB = "gateway MB"
"""Memory is no count: an allocator keeps some, so it is judged apart."""
TIMED = "nft elements that time out"
"""What the kernel removes by itself, a minute or a DNS answer's time later."""
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


def count(folder: Path, gateway: int) -> Counts:
    """Everything that belongs to the gateway ``gateway``, whose folders are below ``folder``."""
    pids = family(_parents(), gateway)
    return {
        "processes": len(pids),
        "namespaces": len(_namespaces(pids)),
        "mounts": len(_mentions(Path(f"/proc/{gateway}/mountinfo"), str(folder))),
        "loop devices": len(traces.loop_devices(str(folder))),
        "descriptors": _entries(Path(f"/proc/{gateway}/fd")),
        "threads": _entries(Path(f"/proc/{gateway}/task")),
        "files": sum(1 for _ in folder.glob("run/**/*")) + _entries(folder / "data" / "workspaces"),
        GATEWAY_MB: serving.resident_mb(gateway),
    }


def count_router(router: Path) -> Counts:
    """What sandboxes have in the router's namespace: interfaces, and elements of nft's sets."""
    if not namespaces.is_mounted(router):
        return {"router interfaces": 0, "nft elements": 0, TIMED: 0}
    listed = namespaces.run_in(router, _list_table)
    return {
        "router interfaces": len(namespaces.run_in(router, socket.if_nameindex)),
        **elements(listed),
    }


def _list_table() -> str:
    nft = Nftables()
    try:
        return nft.run_json(f"list table {TABLE}")
    finally:
        nft.close()


def elements(listed: str) -> Counts:
    """Elements in nft's JSON: those that stay until somebody removes them, and the others."""
    found: Counts = {"nft elements": 0, TIMED: 0}
    for item in json.loads(listed)["nftables"]:
        for thing in item.values():
            timed = {"dynamic", "timeout"} & set(thing.get("flags") or ())
            found[TIMED if timed else "nft elements"] += len(thing.get("elem") or ())
    return found


def left_behind(sandbox_ids: Iterable[str], folder: Path) -> list[str]:
    """What carries the name of a sandbox that should be gone."""
    ids = set(sandbox_ids)
    groups = [path for path in traces.CGROUPS.glob("*/k8e/sb-*") if path.name in ids]
    groups += [path for path in traces.CGROUPS.glob("k8e/sb-*") if path.name in ids]
    mounts = _lines(Path("/proc/self/mountinfo"))
    return [
        *(f"cgroup {path}" for path in groups),
        *(f"mount {line}" for line in mounts if any(each in line for each in ids)),
        *(f"file {path}" for path in folder.glob("run/*/sb-*") if path.name in ids),
    ]


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Counts that are higher than they were; memory left aside."""
    return {
        name: after[name] - value
        for name, value in before.items()
        if name != GATEWAY_MB and after[name] > value
    }


def family(parents: Mapping[int, int], root: int) -> set[int]:
    """A process with all of its descendants, from the parent of each process."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found, waiting = {root}, [root]
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def _parents() -> dict[int, int]:
    found: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            stat = (folder / "stat").read_text("utf-8", "replace")
            found[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
    return found


def _namespaces(pids: Iterable[int]) -> set[str]:
    found: set[str] = set()
    for pid in pids:
        for name in NAMESPACES:
            with contextlib.suppress(OSError):
                found.add(str(Path(f"/proc/{pid}/ns/{name}").readlink()))
    return found


def _lines(path: Path) -> list[str]:
    return path.read_text("utf-8", "surrogateescape").splitlines()


def _mentions(path: Path, text: str) -> list[str]:
    return [line for line in _lines(path) if text in line]


def _entries(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(1 for _ in folder.iterdir())
    return 0
