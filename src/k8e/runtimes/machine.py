"""Limits of sessions that exceed this machine's resources.

Such a limit breaks nothing, and a template may be meant for larger machines; so it is accepted,
with a warning that it holds nothing back here.
"""

from __future__ import annotations

import os
from pathlib import Path

from k8e import rootless
from k8e.model import GIB, Limits

PID_MAX = Path("/proc/sys/kernel/pid_max")
_USUAL = Limits()


def excess(limits: Limits, data_dir: Path) -> str:
    """The limits that cannot be reached on this machine, in words."""
    asked = {name: value for name, value in vars(limits).items() if value != getattr(_USUAL, name)}
    told: list[str] = []
    for name in ("cpus", "memory", "disk", "pids"):
        if name not in asked:
            continue
        there = _has(name, data_dir)
        if asked[name] > there > 0:
            told.append(f"{name} ({_shown(name, asked[name])} of {_shown(name, there)})")
    if not told:
        return ""
    what = "a limit is" if len(told) == 1 else "limits are"
    return f"{what} more than this machine has, and will not be met: {', '.join(told)}"


def _has(name: str, data_dir: Path) -> float:
    """The total of a resource; 0 if it cannot be found out."""
    try:
        if name == "cpus":
            return os.cpu_count() or 0
        if name == "pids":
            return int(PID_MAX.read_text("ascii"))
        if name == "memory" or rootless.inside():  # whose workspaces are in memory
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found = os.statvfs(data_dir)
        return found.f_frsize * found.f_blocks
    except (OSError, ValueError):
        return 0


def _shown(name: str, value: float) -> str:
    return f"{value / GIB:.4g} GiB" if name in ("memory", "disk") else f"{value:g}"
