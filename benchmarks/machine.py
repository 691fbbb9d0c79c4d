"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from benchmarks import timing
from k8e._version import __version__
from k8e.runtimes import cgroups
from k8e.runtimes.host import Host


def facts(host: Host) -> dict[str, Any]:
    return {
        "k8e": __version__,
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "memory_mb": _memory() // 10**6,
        "cgroup": "v2" if cgroups.is_unified() else "v1",
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "system_python": _version([timing.SYSTEM_PYTHON, "--version"]),
        **{name: _version([path, "--version"]) for name, path in _tools(host)},
    }


def _tools(host: Host) -> list[tuple[str, str]]:
    found = [(name, host.tool(name)) for name in ("runsc", "runc", "crun")]
    return [(name, path) for name, path in found if path]


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version(argv: list[str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    lines = (done.stdout or done.stderr).splitlines()
    return lines[0].strip() if lines else "unknown"
