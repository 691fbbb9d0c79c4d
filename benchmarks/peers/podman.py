"""podman with crun, runc and runsc, in storage of its own.

crun gives up where cgroup v2 has controllers beside v1. There it runs in a mount namespace without
the v2 mount, which costs it the millisecond of ``nsenter``.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Generator, Sequence
from pathlib import Path

from benchmarks import timing
from benchmarks.peers import (
    CGROUP,
    HOW_TO_INSTALL,
    Peer,
    Standing,
    Unavailable,
    environment,
    make_root,
)
from k8e.egress import namespaces
from k8e.runtimes import mounts

HYBRID = Path("/sys/fs/cgroup/unified/cgroup.controllers")
# A copy of all mounts would keep loop devices and network namespaces of others alive.
PREPARE = f"""
umount {HYBRID.parent}
while read -r source target kind rest; do
  case "$source $kind" in /dev/loop*|*" nsfs") umount -l "$target" || true;; esac
done < /proc/self/mounts
"""
# podman asks for more than a container in a container may have.
ULIMITS = ["--ulimit", "nproc=1024:1024", "--ulimit", "nofile=1024:1024"]


@contextlib.contextmanager
def found(folder: Path, tools: dict[str, str]) -> Generator[list[Peer]]:
    podman = shutil.which("podman")
    if podman is None:
        raise Unavailable(HOW_TO_INSTALL)
    root, env = make_root(folder), environment(folder)
    base = [podman, "--root", str(folder / "s"), "--runroot", str(folder / "r")]
    base += ["--tmpdir", str(folder / "t")]
    base += ["--cgroup-manager=cgroupfs", "--events-backend=none"]
    with contextlib.ExitStack() as stack:
        peers: list[Peer] = []
        crun = shutil.which("crun")
        if crun is not None:
            prefix = stack.enter_context(_without_hybrid(folder)) if _is_hybrid() else []
            note = "in a mount namespace without cgroup v2" if prefix else ""
            peers.append(_peer("crun", "container", [*prefix, *base], crun, root, env, note))
        for name, kind in (("runc", "container"), ("runsc", "gvisor")):
            if name in tools:
                peers.append(_peer(name, kind, base, tools[name], root, env))
        yield peers


def _peer(
    name: str,
    kind: str,
    base: list[str],
    runtime: str,
    root: Path,
    env: dict[str, str],
    note: str = "",
) -> Peer:
    command = [*base, "--runtime", runtime]
    flags = ["--network=none", f"--cgroup-parent=/{CGROUP}", *ULIMITS]
    flags += ["--volume=/usr:/usr:ro", "--rootfs", str(root)]

    def wrap(argv: Sequence[str]) -> list[str]:
        return [*command, "run", "--rm", *flags, *argv]

    standing = Standing(command, flags, ("--time=0",))
    return Peer(f"podman run ({name})", kind, wrap, env, note, standing)


def _is_hybrid() -> bool:
    with contextlib.suppress(OSError):
        return bool(HYBRID.read_text("ascii").strip())
    return False


@contextlib.contextmanager
def _without_hybrid(folder: Path) -> Generator[list[str]]:
    """What to put before a command so that it sees no cgroup v2 mount."""
    nsenter, unshare = shutil.which("nsenter"), shutil.which("unshare")
    if nsenter is None or unshare is None:
        raise Unavailable("crun needs a mount namespace here, and util-linux is not installed")
    # A file can hold a mount namespace only where mounts are private.
    place = folder / "ns"
    place.mkdir()
    with _private(place):
        held = place / "mnt"
        held.touch()
        timing.output([unshare, f"--mount={held}", "--", "sh", "-ec", PREPARE])
        try:
            yield [nsenter, f"--mount={held}", "--"]
        finally:
            namespaces.unmount(held)


@contextlib.contextmanager
def _private(folder: Path) -> Generator[None]:
    mounts.make_private_mount(folder)
    try:
        yield
    finally:
        mounts.unmount(folder)
