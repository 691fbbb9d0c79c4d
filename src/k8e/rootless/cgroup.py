"""A control group that the user may divide: where there is one, limits hold without root.

Only on cgroup v2, and only where the group was delegated, as ``systemd-run --user --scope -p
Delegate=yes`` does. A group with processes in it cannot be divided, so they move into a child of
it, and the holder with them: its place tells every later gateway which group has its sandboxes.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

MOUNTED = Path("/sys/fs/cgroup")
LEAF = "k8e-gateway"
CONTROLLERS = ("cpu", "memory", "pids")
"""All of them, or the group is of no use: runc refuses a limit that it cannot set."""
ROUNDS = 3  # a process may fork while it is moved


def step_aside() -> None:
    """Leave our group to sandboxes and move to a child of it; does nothing where that is forbidden.

    Outside of the holder's namespaces: in there, other processes of the group have no number.
    """
    group = _of("self")
    if group is None or group.name == LEAF or not _controls(group):
        return
    with contextlib.suppress(OSError):
        (group / LEAF).mkdir(exist_ok=True)
        try:
            _move(group, group / LEAF)
            switch_on(group)
        except OSError:
            (group / LEAF).rmdir()


def follow(holder: int) -> None:
    """Move to the holder's group: the kernel lets us start programs there only from within."""
    target = _of(str(holder))
    if target is not None and target.name == LEAF and target != _of("self"):
        with contextlib.suppress(OSError):
            (target / "cgroup.procs").write_text(str(os.getpid()), "ascii")


def given() -> Path | None:
    """The group that the holder's user may divide, if there is one. Only inside."""
    own = _own()
    if own is None or own.name != LEAF or not _controls(own.parent):
        return None
    return own.parent if os.access(own.parent / "cgroup.subtree_control", os.W_OK) else None


def reached() -> bool:
    """Whether programs that this process starts can join groups below the given one."""
    group, own = given(), _of("self")
    return group is not None and own is not None and group in own.parents


def switch_on(group: Path) -> None:
    """Enable limits for the groups below one."""
    # At once: with cpu alone it would become a place for threads, where memory cannot be.
    text = " ".join(f"+{name}" for name in CONTROLLERS)
    (group / "cgroup.subtree_control").write_text(text, "ascii")


def _own() -> Path | None:
    """The group of the holder, which is the first process inside."""
    return _of("1")


def _of(process: str) -> Path | None:
    """The group of a process, on cgroup v2."""
    if not (MOUNTED / "cgroup.controllers").exists():
        return None
    with contextlib.suppress(OSError):
        for line in Path("/proc", process, "cgroup").read_text("utf-8", "replace").splitlines():
            if line.startswith("0::/"):
                return MOUNTED / line.removeprefix("0::/")
    return None


def _controls(group: Path) -> bool:
    with contextlib.suppress(OSError):
        return {*CONTROLLERS} <= {*(group / "cgroup.controllers").read_text("ascii").split()}
    return False


def _move(group: Path, target: Path) -> None:
    """Move all processes, including ones that we do not know, such as the shell that started us."""
    for _ in range(ROUNDS):
        for pid in (group / "cgroup.procs").read_text("ascii").split():
            with contextlib.suppress(ProcessLookupError):
                (target / "cgroup.procs").write_text(pid, "ascii")
