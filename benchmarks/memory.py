"""How much memory sandboxes take, by the kernel's proportional set size (PSS).

PSS divides a page by the number of processes that have it mapped. Summed over all processes of a
sandbox, what gVisor's kernel shares with its stubs is counted once; what sandboxes share with each
other, such as the text of Python and of runsc, is divided among them.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
from collections.abc import Iterable
from pathlib import Path

from k8e.conformance import traces

KIB = 1024
NEAR = 16
SYS_KCMP, KCMP_VM = {"x86_64": 312, "aarch64": 272}[platform.machine()], 1
_libc = ctypes.CDLL(None, use_errno=True)


def sandboxes_mb(sandbox_ids: Iterable[str]) -> float:
    """PSS of all processes of some sandboxes together, in MB (10⁶ bytes)."""
    return processes_mb(pid for each in sandbox_ids for pid in members(each))


def members(sandbox_id: str) -> set[int]:
    """The processes in a sandbox's cgroups: its programs, and what runs them."""
    return below(traces.cgroups(sandbox_id))


def below(groups: Iterable[Path]) -> set[int]:
    """The processes in some cgroups, and in those below them."""
    found: set[int] = set()
    for group in groups:
        for file in (group / "cgroup.procs", *group.glob("**/cgroup.procs")):
            with contextlib.suppress(OSError):
                found.update(map(int, file.read_text("ascii").split()))
    return found


def processes_mb(pids: Iterable[int]) -> float:
    total = 0
    for pid in _one_of_each(pids):
        with contextlib.suppress(OSError):  # it has ended
            total += parse_pss(Path(f"/proc/{pid}/smaps_rollup").read_text("ascii", "replace"))
    return total / 1e6


def _one_of_each(pids: Iterable[int]) -> list[int]:
    """One process of those that have the very same memory, which each would tell as its own.

    gVisor has two processes for every program's memory.
    """
    chosen: list[int] = []
    for pid in sorted(set(pids)):
        # Such twins are made one right after the other; more looks would be quadratic.
        if not any(_same_memory(pid, other) for other in chosen[-NEAR:]):
            chosen.append(pid)
    return chosen


def _same_memory(one: int, other: int) -> bool:
    """Whether two processes share an address space (``kcmp``); not, where nobody can tell."""
    told: int = _libc.syscall(SYS_KCMP, one, other, KCMP_VM, 0, 0)
    return told == 0


def parse_pss(rollup: str) -> int:
    """Bytes, from the text of ``/proc/PID/smaps_rollup``; none for a process without memory."""
    for line in rollup.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * KIB
    return 0
