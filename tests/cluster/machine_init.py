"""The first process of a machine: makes its namespaces and mounts, then reaps what ends in it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_BIND, MS_REC, MS_PRIVATE, MS_SHARED = 0x1, 0x1000, 0x4000, 0x40000, 0x100000
MNT_DETACH = 2
PR_SET_PDEATHSIG = 1
SHARED_SETTINGS = (
    "vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops "
    "kernel/keys/root_maxkeys kernel/keys/root_maxbytes kernel/unprivileged_bpf_disabled "
    "kernel/timer_migration net/core/bpf_jit_enable"
).split()
"""Settings that namespaces do not have for themselves; a machine gets files in their place."""
COMMANDS = ("/usr/bin/kubectl", "/usr/bin/ctr")
"""What the computer may have and an empty machine has not."""
OWN_DISK = ("var/lib/k8e", "var/lib/kubelet", "var/log", "tmp")
WRITTEN = ".written"
"""Where a machine shows what it has written on its root."""
CLONE = Path(__file__).parents[2]
"""The clone of k8e that is tried."""
_libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: Path, kind: str = "", flags: int = 0, data: str = "") -> None:
    arguments = (source.encode(), bytes(target), kind.encode() or None)
    result = _libc.mount(*arguments, ctypes.c_ulong(flags), data.encode() or None)
    check(result, f"mounting {target}")


def main() -> None:
    folder, name, components, said = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    first = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNET
    check(_libc.unshare(first | CLONE_NEWPID), "unshare")
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        with open(reading, "rb") as pipe:
            problem = pipe.read()
        os.write(int(said), problem or str(child).encode())  # it does not know its outer number
        os.close(int(said))
        os.waitpid(child, 0)
        return
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(int(said))
    try:
        set_up(folder, name, components)
    except BaseException as error:
        os.write(writing, f"machine: {error}".encode())
        raise
    os.close(writing)
    reap()


def set_up(folder: Path, name: str, components: Path) -> None:
    socket.sethostname(name)
    mount("none", Path("/"), flags=MS_REC | MS_PRIVATE)
    root = folder / "root"
    layers = folder / "layers"
    for path in (root, layers):
        path.mkdir()
    mount("tmpfs", layers, "tmpfs", data="size=1g,mode=755")
    for part in ("upper", "work"):
        (layers / part).mkdir()
    data = f"lowerdir=/,upperdir={layers / 'upper'},workdir={layers / 'work'}"
    mount("overlay", root, "overlay", data=data)
    (root / WRITTEN).mkdir()
    mount(str(layers / "upper"), root / WRITTEN, flags=MS_BIND)
    make_root(folder, root, components)
    os.chdir(root)
    check(_libc.syscall(155, b".", b"."), "pivot_root")
    check(_libc.umount2(b".", MNT_DETACH), "leaving the old root")
    os.chdir("/")
    # As on a host that systemd has started: what a pod mounts can be seen by others.
    mount("none", Path("/"), flags=MS_REC | MS_SHARED)
    Path("/etc/hostname").write_text(f"{name}\n", "ascii")
    Path("/etc/hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n", "ascii")
    for path in ("/etc/resolv.conf", *COMMANDS):
        Path(path).unlink(missing_ok=True)
    Path("/etc/resolv.conf").write_text("nameserver 10.89.0.1\n", "ascii")


def make_root(folder: Path, root: Path, components: Path) -> None:
    mount("proc", root / "proc", "proc")
    for setting in SHARED_SETTINGS:
        own_setting(folder, root / "proc/sys" / setting)
    mount("sysfs", root / "sys", "sysfs")
    mount("bpf", root / "sys/fs/bpf", "bpf", data="mode=700")
    make_cgroups(root / "sys/fs/cgroup")
    mount("/dev", root / "dev", flags=MS_BIND | MS_REC)
    mount("tmpfs", root / "run", "tmpfs", data="mode=755")
    for part in OWN_DISK:
        own = folder / "disk" / part
        own.mkdir(parents=True)
        target = root / part
        target.mkdir(parents=True, exist_ok=True)
        mount(str(own), target, flags=MS_BIND)
    (root / "tmp").chmod(0o1777)
    # Components by their own inodes: an overlay would show others. The clone may lie in a folder of
    # which the machine has its own, such as /tmp.
    for path in (components, CLONE):
        if path.is_dir():
            target = root / path.relative_to("/")
            target.mkdir(parents=True, exist_ok=True)
            mount(str(path), target, flags=MS_BIND)


def own_setting(folder: Path, path: Path) -> None:
    if not path.exists():
        return
    own = folder / "settings" / path.name
    own.parent.mkdir(exist_ok=True)
    own.write_text(path.read_text("ascii"), "ascii")
    mount(str(own), path, flags=MS_BIND)


def make_cgroups(target: Path) -> None:
    """The hierarchies of the computer, with the machine's own groups as their roots."""
    kinds = [line.split(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    wanted: dict[str, list[str]] = {}
    for place, system in kinds:
        path, kind = place.split(" ")[4], system.split(" ")
        if kind[0] in ("cgroup", "cgroup2") and path.startswith("/sys/fs/cgroup"):
            wanted[path] = kind
    if "/sys/fs/cgroup" in wanted:
        mount("cgroup2", target, "cgroup2")
        return
    mount("tmpfs", target, "tmpfs", data="mode=755")
    for path, kind in wanted.items():
        own = target / Path(path).name
        own.mkdir()
        options = {option for option in kind[2].split(",") if option not in ("rw", "ro")}
        mount(kind[0], own, kind[0], data=",".join(sorted(options)) if kind[0] == "cgroup" else "")


def reap() -> None:
    """Be the init of the machine."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            signal.sigwait([signal.SIGCHLD])


if __name__ == "__main__":
    main()
