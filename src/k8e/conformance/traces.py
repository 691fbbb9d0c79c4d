"""Traces of a sandbox on this host, by its id."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

from k8e.runtimes import uids
from k8e.runtimes.cgroups import root

CGROUPS = Path("/sys/fs/cgroup")


def cgroups(sandbox_id: str) -> list[Path]:
    """Cgroups that carry the sandbox's name; a user's own are far below the root of all."""
    found = {
        path
        for top in (CGROUPS, root())
        for pattern in (f"*/{sandbox_id}", f"*/*/{sandbox_id}")
        for path in top.glob(pattern)
    }
    return sorted(found)


def processes(sandbox_id: str) -> list[int]:
    """Processes in the sandbox's cgroups, or with its id among their arguments."""
    needle = sandbox_id.encode()
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            told = (folder / "cmdline").read_bytes() + (folder / "cgroup").read_bytes()
            if needle in told and int(folder.name) != os.getpid() and not awaits_burial(folder):
                found.append(int(folder.name))
    return found


def awaits_burial(folder: Path) -> bool:
    """Whether a process is dead and waits only for the host's init to reap it."""
    state, parent = (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[:2]
    return state in "ZX" and parent == "1"


def mounts(sandbox_id: str) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines()
    return [line.split(" ")[4] for line in lines if sandbox_id in line]


def loop_devices(sandbox_id: str) -> list[str]:
    """Loop devices whose file belongs to the sandbox."""
    found: list[str] = []
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if sandbox_id in file.read_text("utf-8", "surrogateescape"):
                found.append(file.parts[3])
    return found


def files(sandbox_id: str, folders: Iterable[Path]) -> Iterator[str]:
    for top in folders:
        for folder, names, others in os.walk(top):
            for name in [*names, *others]:
                if sandbox_id in name:
                    yield os.path.join(folder, name)  # noqa: PTH118 - as os.walk says it


def traces(sandbox_id: str, folders: Iterable[Path]) -> list[str]:
    """Everything of a sandbox that this host still has."""
    return [
        *(f"cgroup {path}" for path in cgroups(sandbox_id)),
        *(f"process {pid}" for pid in processes(sandbox_id)),
        *(f"mount {point}" for point in mounts(sandbox_id)),
        *(f"device {name}" for name in loop_devices(sandbox_id)),
        *(f"file {path}" for path in files(sandbox_id, [*folders, uids.CLAIMS])),
    ]


def kill_all(sandbox_id: str) -> int:
    """Kill a sandbox's processes behind the back of its runtime; return how many there were."""
    found = processes(sandbox_id)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(found)
