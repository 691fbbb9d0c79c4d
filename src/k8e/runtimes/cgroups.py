"""Reading and removing the cgroups that runsc and runc make, on v1 and v2."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

from k8e import rootless
from k8e.rootless import cgroup

ROOT = Path("/sys/fs/cgroup")
NOWHERE = ROOT / "none-of-ours"
PARENT = "k8e"
NEIGHBOURS = "k8e-neighbours"
"""On v2 in a container: where the processes go that were in the container's own cgroup."""
CONTROLLERS = ("cpu", "memory", "pids")
V1_WEIGHT, V2_WEIGHT = 256, 25
"""Of all sandboxes together, where any other group of the host has 1024 or 100. With as much as the
others have, busy sandboxes keep a new process of the host, and the gateway that all of them need,
waiting for a tenth of a second and more now and then; with a quarter, for a few milliseconds. Where
nobody else wants the CPUs, sandboxes still have all of them."""
CLEAR_ROUNDS = 3  # a process may fork while it is moved
REMOVE_SECONDS = 5.0
OLD_SECONDS = 3600.0  # far more than any launch takes
_FREEZER, _THAWED = "freezer.state", "THAWED"


def root() -> Path:
    """The group above ours: the root of all, or one that was delegated to a gateway's user."""
    if rootless.inside() is None:
        return ROOT
    return cgroup.given() or NOWHERE


def usable() -> bool:
    """Whether there may be groups for new sandboxes."""
    return rootless.inside() is None or cgroup.reached()


def is_unified() -> bool:
    """Whether this host has only cgroup v2."""
    return (ROOT / "cgroup.controllers").exists()


def hierarchies() -> list[Path]:
    """The mounted controllers: one on v2, one per controller on v1."""
    if is_unified():
        return [root()]
    return [path for path in root().glob("*") if (path / "cgroup.procs").exists()]


def prepare() -> None:
    """On v2, enable limits for the groups below the root; a probe explains failures.

    Without root that was done before: now we are where processes outside have no number.
    """
    if not is_unified() or rootless.inside() is not None:
        return
    switch = root() / "cgroup.subtree_control"
    usable = (root() / "cgroup.controllers").read_text("ascii").split()
    wanted = [name for name in CONTROLLERS if name in usable]
    if set(wanted) <= set(switch.read_text("ascii").split()):
        return
    with contextlib.suppress(OSError):
        # At once: with cpu alone the root would become a place for threads, where memory cannot be.
        text = " ".join(f"+{name}" for name in wanted)
        try:
            switch.write_text(text, "ascii")
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.EOPNOTSUPP):
                raise
            _clear_root(switch)
            switch.write_text(text, "ascii")


def weigh() -> None:
    """Make the group of all sandboxes with its weight; otherwise the first program would make it.

    Where that is not possible, the host says who comes first.
    """
    file, ours, _ = _weight_file()
    with contextlib.suppress(OSError):
        file.parent.mkdir(exist_ok=True)
        if int(file.read_text("ascii")) != ours:
            file.write_text(str(ours), "ascii")


def relative_weight() -> float | None:
    """The weight of all sandboxes together, where another group has 1; None if none is set."""
    file, _, usual = _weight_file()
    with contextlib.suppress(OSError):
        return int(file.read_text("ascii")) / usual
    return None


def _weight_file() -> tuple[Path, int, int]:
    """The file with the weight of all sandboxes, its value, and that of other groups."""
    if is_unified():
        return root() / PARENT / "cpu.weight", V2_WEIGHT, 100
    return root() / "cpu" / PARENT / "cpu.shares", V1_WEIGHT, 1024


def path_of(sandbox_id: str) -> str:
    """The ``cgroupsPath`` of an OCI spec."""
    return f"/{root().relative_to(ROOT) / PARENT / sandbox_id}"


def make(sandbox_id: str, resources: dict[str, Any]) -> None:
    """Make the group of a sandbox, with its limits, for a runtime that cannot; only on v2."""
    group = root() / PARENT / sandbox_id
    group.parent.mkdir(exist_ok=True)
    cgroup.switch_on(group.parent)
    group.mkdir(exist_ok=True)
    _set(group / "memory.swap.max", 0)
    set_limits(sandbox_id, resources)


def within(sandbox_id: str, argv: list[str]) -> list[str]:
    """A command that first goes into the group that was made for a sandbox."""
    file = root() / PARENT / sandbox_id / "cgroup.procs"
    return ["/bin/sh", "-c", 'echo 0 >"$0" && exec "$@"', str(file), *argv]


_LIMIT_FILES = {
    "cpu": ("cpu.max", "cpu.cfs_quota_us"),
    "memory": ("memory.max", "memory.limit_in_bytes"),
    "pids": ("pids.max", "pids.max"),
}
_NO_LIMIT = ("", "max", "-1")


def limit_of(sandbox_id: str, controller: str) -> str:
    """The limit that the kernel enforces for a sandbox, as it writes it; empty if there is none."""
    v2_name, v1_name = _LIMIT_FILES[controller]
    base, name = (root(), v2_name) if is_unified() else (root() / controller, v1_name)
    with contextlib.suppress(OSError):
        value = (base / PARENT / sandbox_id / name).read_text("ascii").strip()
        return "" if value.split(" ")[0] in _NO_LIMIT else value
    return ""


def set_limits(sandbox_id: str, resources: dict[str, Any]) -> None:
    """Set other limits for a running sandbox; ``resources`` are those of an OCI specification.

    OSError where it uses more memory already than it may have from now on.
    """
    memory, cpu, pids = resources["memory"], resources["cpu"], resources["pids"]
    if is_unified():
        group = root() / PARENT / sandbox_id
        with contextlib.suppress(FileNotFoundError):
            if int((group / "memory.current").read_text("ascii")) > memory["limit"]:
                # The kernel would make room by killing what is there.
                raise OSError(errno.EBUSY, "the sandbox uses more memory than it may have")
        _set(group / "cpu.max", f"{cpu['quota']} {cpu['period']}")
        _set(group / "memory.max", memory["limit"])  # beside it, memory.swap.max stays 0
        _set(group / "pids.max", pids["limit"])
        return
    _set(root() / "cpu" / PARENT / sandbox_id / "cpu.cfs_quota_us", cpu["quota"])
    _set(root() / "pids" / PARENT / sandbox_id / "pids.max", pids["limit"])
    group = root() / "memory" / PARENT / sandbox_id
    if not group.exists():
        return
    # Memory and swap together may never be less than memory alone, not even for a moment.
    files = [group / "memory.memsw.limit_in_bytes", group / "memory.limit_in_bytes"]
    if memory["limit"] < int((files[1]).read_text("ascii")):
        files.reverse()
    for file in files:
        _set(file, memory["limit"])


def cpu_seconds(sandbox_id: str) -> float | None:
    """The CPU time that a sandbox has used so far; None where it is not counted."""
    group = f"{PARENT}/{sandbox_id}"
    with contextlib.suppress(OSError, ValueError):
        if not is_unified():
            return int((root() / "cpuacct" / group / "cpuacct.usage").read_text("ascii")) / 1e9
        for line in (root() / group / "cpu.stat").read_text("ascii").splitlines():
            if line.startswith("usage_usec "):
                return int(line.split()[1]) / 1e6
    return None


def limit_sockets(sandbox_id: str, size: int) -> None:
    """Bound the kernel's memory for a sandbox's sockets.

    On v2 that is part of its memory; on v1 it would only be bounded for the whole host.
    """
    _set(root() / "memory" / PARENT / sandbox_id / "memory.kmem.tcp.limit_in_bytes", size)


def _set(file: Path, value: object) -> None:
    if file.exists():  # what a host cannot limit, it did not at the launch, and a probe tells
        file.write_text(str(value), "ascii")


def limit_hits(sandbox_id: str) -> dict[str, int]:
    """How often a sandbox met a limit: a process killed for memory, or refused."""
    hits = {"memory": memory_limit_hits(sandbox_id), "pids": 0}
    base = root() if is_unified() else root() / "pids"
    with contextlib.suppress(OSError, ValueError):
        for line in (base / PARENT / sandbox_id / "pids.events").read_text("ascii").splitlines():
            if line.startswith("max "):
                hits["pids"] = int(line.split()[1])
    return hits


def memory_limit_hits(sandbox_id: str) -> int:
    """How many processes of a sandbox the kernel killed because its memory ran out."""
    group = f"{PARENT}/{sandbox_id}"
    for file in (
        root() / group / "memory.events",
        root() / "memory" / group / "memory.oom_control",
    ):
        with contextlib.suppress(OSError, ValueError):
            for line in file.read_text("ascii").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def remove(sandbox_id: str, seconds: float = REMOVE_SECONDS) -> None:
    """Kill the remaining processes in a sandbox's cgroups and remove the cgroups.

    All that can be removed is, also where one cannot; then OSError.
    """
    deadline = time.monotonic() + seconds
    failed: list[OSError] = []
    for folder in _groups_of(sandbox_id):
        try:
            _remove_one(folder, deadline)
        except OSError as error:
            failed.append(error)
    if failed:
        raise failed[0]


def _groups_of(sandbox_id: str) -> list[Path]:
    """All cgroups of a sandbox, innermost first."""
    found: list[Path] = []
    for hierarchy in hierarchies():
        group = hierarchy / PARENT / sandbox_id
        if group.is_dir():
            found += sorted(group.glob("**/"), reverse=True)
    return found


def what_is_left(sandbox_id: str) -> tuple[list[int], int]:
    """The processes that are still in the cgroups of a sandbox, and how many cgroups it has."""
    groups = _groups_of(sandbox_id)
    found: set[int] = set()
    for group in groups:
        with contextlib.suppress(OSError):
            found |= set(map(int, (group / "cgroup.procs").read_text("ascii").split()))
    return sorted(found), len(groups)


def sweep(seconds: float = OLD_SECONDS) -> None:
    """Remove cgroups of sandboxes that have long been empty.

    A sandbox has a process from its first moment to its last, whichever gateway it belongs to, so
    an old group without one is what somebody failed to remove.
    """
    oldest = time.time() - seconds
    for hierarchy in hierarchies():
        for group in (hierarchy / PARENT).glob("sb-*"):
            with contextlib.suppress(OSError):  # one that is in use cannot be removed
                if group.stat().st_ctime < oldest:
                    for folder in sorted(group.glob("**/"), reverse=True):
                        folder.rmdir()


def end_frozen(sandbox_id: str) -> None:
    """Kill what is frozen in a sandbox's cgroup: on v1 it dies only when it is thawed.

    On v2 a killed process dies frozen.
    """
    group = root() / "freezer" / PARENT / sandbox_id
    if _is_frozen(group):
        _kill_members(group)


def remove_parent() -> None:
    """Remove k8e's own cgroups when no sandbox is left in them."""
    for hierarchy in hierarchies():
        with contextlib.suppress(OSError):
            (hierarchy / PARENT).rmdir()


def _clear_root(switch: Path) -> None:
    """Move the processes out of the root, as Docker does before it runs in Docker.

    The true root may have processes and limits for its groups at once, a container's own may not.
    """
    with contextlib.suppress(OSError):
        switch.write_text(" ".join(f"-{name}" for name in CONTROLLERS), "ascii")
    target = root() / NEIGHBOURS
    target.mkdir(exist_ok=True)
    for _ in range(CLEAR_ROUNDS):
        for pid in (root() / "cgroup.procs").read_text("ascii").split():
            with contextlib.suppress(ProcessLookupError):
                (target / "cgroup.procs").write_text(pid, "ascii")


def _remove_one(group: Path, deadline: float) -> None:
    while True:
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            _kill_members(group)
            time.sleep(0.005)  # dying processes leave their cgroup when they are reaped
        else:
            return


def _kill_members(group: Path) -> None:
    with contextlib.suppress(OSError):
        for pid in (group / "cgroup.procs").read_text("ascii").split():
            # One in no namespace of ours is told as 0, which to kill means ourselves.
            with contextlib.suppress(ProcessLookupError):
                if pid != "0":
                    os.kill(int(pid), signal.SIGKILL)
    if _is_frozen(group):
        with contextlib.suppress(OSError):
            (group / _FREEZER).write_text(_THAWED, "ascii")


def _is_frozen(group: Path) -> bool:
    with contextlib.suppress(OSError):
        return (group / _FREEZER).read_text("ascii").strip() != _THAWED
    return False
