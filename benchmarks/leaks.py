"""What a gateway and its sandboxes hold of this machine, counted before and after many of them."""

from __future__ import annotations

import contextlib
import json
import re
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
_SANDBOX = re.compile(r"sb-[a-z0-9]+")
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
    return [text for sandbox_id, text in _named(folder) if sandbox_id in ids]


def unknown(sandbox_ids: Iterable[str], ready: int, folder: Path) -> list[str]:
    """Sandboxes that no session ever had, if there are more than wait for one."""
    found: dict[str, list[str]] = {}
    for sandbox_id, text in _named(folder):
        found.setdefault(sandbox_id, []).append(text)
    strays = set(found) - set(sandbox_ids)
    if len(strays) <= ready:
        return []
    return [f"of nobody: {text}" for sandbox_id in sorted(strays) for text in found[sandbox_id]]


def _named(folder: Path) -> list[tuple[str, str]]:
    """All that names a sandbox of the gateway whose folders are in ``folder``: the name, and what.

    Others on this machine have sandboxes too: a cgroup or process is told by its folder, or by a
    name that is in the folder as well.
    """
    files = [*folder.glob("run/*/sb-*"), *folder.glob("data/workspaces/sb-*")]
    found = [(_SANDBOX.findall(path.name)[0], f"file {path}") for path in files]
    for line in _mentions(Path("/proc/self/mountinfo"), str(folder)):
        found += [(name, f"mount {line}") for name in set(_SANDBOX.findall(line))]
    for pid in _parents():
        with contextlib.suppress(OSError):
            told = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
            if str(folder) in told:
                found += [(name, f"process {pid}") for name in set(_SANDBOX.findall(told))]
    ours = {name for name, _ in found}
    groups = [*traces.CGROUPS.glob("*/k8e/sb-*"), *traces.CGROUPS.glob("k8e/sb-*")]
    return found + [(path.name, f"cgroup {path}") for path in groups if path.name in ours]


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
