"""OCI bundles as data: a specification in, a ``config.json`` out. Nothing here touches the host.

They are the host's own: most tell of its disks, memory, modules and configuration, and some can be
written by anybody. ``/proc/pressure`` makes a process that SIGKILL does not end for a minute. So
what ordinary programs read is listed here, and everything else that the kernel has is hidden,
whatever it is called. gVisor needs none of this: its ``/proc`` tells of its own kernel.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k8e.model import MIB, Limits
from k8e.runtimes import cgroups, rootfs, seccomp
from k8e.runtimes.guest_package import PLACE, Interpreter

VISIBLE = frozenset(
    (
        "cpuinfo filesystems loadavg meminfo mounts net self stat sys sysvipc thread-self uptime "
        "version"
    ).split()
)
"""Entries of ``/proc``, beside processes. All but the times and sizes in ``loadavg``, ``meminfo``,
``stat`` and ``uptime`` are the sandbox's own or constant. gVisor shows programs as few."""
HIDDEN_SETTINGS = (
    # Folders with nothing that a program needs.
    "abi debug dev fs/binfmt_misc fs/fuse fs/quota fs/xfs kernel/firmware_config kernel/keys "
    "kernel/usermodehelper "
    # How much the host uses of something.
    "fs/aio-nr fs/dentry-negative fs/dentry-state fs/file-nr fs/inode-nr fs/inode-state "
    "vm/numa_stat "
    # Which host it is, what it runs, and in what state its kernel is.
    "kernel/acct kernel/bootloader_type kernel/bootloader_version kernel/cad_pid "
    "kernel/hotplug kernel/modprobe kernel/poweroff_cmd kernel/printk "
    "kernel/random/boot_id kernel/real-root-dev kernel/tainted"
).split()
"""Below ``/proc/sys``, which is read-only as a whole."""
HIDDEN_OF_CPUS = ("vulnerabilities",)
"""Below the one folder of ``/sys`` that a container sees: which attacks on the CPU would work."""
CPUS = "/sys/devices/system/cpu"
"""All that programs look for in a sysfs."""


def hidden(entries: Iterable[str]) -> list[str]:
    """The paths to hide, where ``entries`` are those of the host's ``/proc``."""
    names = sorted(name for name in entries if not name.isdigit() and name not in VISIBLE)
    return [
        *(f"/proc/{name}" for name in names),
        *(f"/proc/sys/{name}" for name in HIDDEN_SETTINGS),
        *(f"{CPUS}/{name}" for name in HIDDEN_OF_CPUS),
    ]


def hidden_here() -> list[str]:
    """The paths to hide on this host. Read again each time: a module that is loaded adds some."""
    return hidden(os.listdir("/proc"))  # noqa: PTH208 - paths of thousands of processes take longer


GUEST_CAPABILITIES = ["CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_CHOWN", "CAP_DAC_OVERRIDE"]
ID_RANGE = 65536  # uids in a sandbox's user namespace, where nobody says otherwise
CPU_PERIOD = 100_000  # microseconds
WARM = {"python": (256 * MIB, 32), "node": (512 * MIB, 64)}
"""Memory and processes without which a session needs all it has for its programs."""
# The guest keeps the memory of its buffers: getting it anew for every chunk of a file costs more
# than everything else (in gVisor three quarters of the time). Programs do not inherit this.
GUEST_MALLOC = ["MALLOC_MMAP_THRESHOLD_=8388608", "MALLOC_TRIM_THRESHOLD_=16777216"]
HOST_LOCALE = ["LANG=C.UTF-8"]
# In an image's root these open no file: neither locales nor converters nor zones are the image's.
IMAGE_LOCALE = ["LC_ALL=C", "TZ=:"]
MOST_TERMINALS = 128
"""Terminals that a sandbox may have on the host's kernel, which has 3,072 for all of them; gVisor's
are its own."""
_TERMINALS = ("nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5")
BYTES_PER_INODE = 16 << 10
"""Of the size of a folder in memory: a file without content costs the kernel a kilobyte, which
counts against the session's memory, and which no killing of programs gives back."""
LEAST_INODES = 256
MASKED = (
    "/proc/acpi /proc/asound /proc/interrupts /proc/kcore /proc/keys /proc/latency_stats "
    "/proc/sched_debug /proc/scsi /proc/timer_list /proc/timer_stats /sys/devices/virtual/powercap "
    "/sys/firmware /sys/kernel /sys/module"
).split()
"""Hidden where a runtime says nothing else."""
READ_ONLY_BIND = ("ro", "rro", "rnosuid", "rnodev")
"""Read-only with everything mounted below; ``ro`` alone would cover the top mount only."""
READ_ONLY = "/proc/bus /proc/fs /proc/irq /proc/sys /proc/sysrq-trigger".split()


@dataclass(frozen=True)
class BundleLayout:
    """The places on the host of the parts of one sandbox."""

    rootfs: Path
    bound: list[str]
    guest: Path
    """The packed guest's file."""
    link: Path
    slot: Path
    tools: Path | None
    """Language tools for ``/opt/k8e/tools``, where they are installed."""
    open_files: int
    """Of each process; at most the gateway's own hard limit."""
    python: Interpreter | None = None
    """The guest's own Python, where the root need not have one."""
    locales: Path | None = None
    """What is shown in the place of the host's locales, where the root is the host's own."""
    hidden: Sequence[str] = tuple(MASKED)
    """Paths in the sandbox below which a program finds nothing."""


@dataclass(frozen=True)
class Flavour:
    """The differences between the runtimes."""

    capabilities: list[str]
    id_base: int | None
    """First host uid of the sandbox's user namespace; None for no user namespace."""
    seccomp: bool
    memory_overhead: int
    pids_limit: int
    sysfs: bool
    """Whether a sysfs is mounted: gVisor's own tells nothing, the host's would."""
    slot_at: str
    """Where the slot is mounted: the workspace itself, or beside it for a guest that binds."""
    annotations: dict[str, str]
    cgroups: bool = True
    """Whether there are cgroups to hold the sandbox to its limits."""
    id_range: int = ID_RANGE
    """How many uids that has."""
    oom_score: int = 0
    """How readily the kernel ends the first process where the host has no memory; 0: not said."""


_MEMORY_FOLDERS = (
    ("/dev/shm", 1, "1777", "noexec"),  # noqa: S108 - a path in the sandbox
    ("/tmp", 2, "1777", ""),  # noqa: S108 - a path in the sandbox
    ("/var/tmp", 1, "1777", ""),  # noqa: S108 - a path in the sandbox
    ("/home", 3, "755", ""),  # what pip installs is there
)
"""Folders in memory: where, eighths of the session's limit, mode, and an option. Memory behind them
counts against that limit: full, they leave an eighth of it."""


@dataclass(frozen=True)
class MemoryFolder:
    """A folder of a sandbox whose files are memory."""

    path: str
    size: int
    mode: str
    noexec: bool

    @property
    def inodes(self) -> int:
        """How many files it may hold."""
        return max(LEAST_INODES, self.size // BYTES_PER_INODE)

    @property
    def bounds(self) -> list[str]:
        """Its bounds, as options of a mount."""
        return [f"size={self.size}", f"nr_inodes={self.inodes}"]


def memory_folders(limits: Limits) -> list[MemoryFolder]:
    """The folders in memory of a sandbox with these limits."""
    return [
        MemoryFolder(path, limits.memory * eighths // 8, mode, bool(option))
        for path, eighths, mode, option in _MEMORY_FOLDERS
    ]


def _bind(source: Path | str, target: str, *options: str) -> dict[str, Any]:
    return {
        "destination": target,
        "type": "bind",
        "source": str(source),
        "options": ["rbind", "nosuid", "nodev", *options],
    }


def _tmpfs(folder: MemoryFolder) -> dict[str, Any]:
    options = ["nosuid", "nodev", *folder.bounds, f"mode={folder.mode}"]
    return {
        "destination": folder.path,
        "type": "tmpfs",
        "source": "tmpfs",
        "options": [*options, "noexec"] if folder.noexec else options,
    }


def _mounts(layout: BundleLayout, flavour: Flavour, limits: Limits) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {
            "destination": "/proc",
            "type": "proc",
            "source": "proc",
            "options": ["nosuid", "noexec", "nodev"],
        },
        {
            "destination": "/dev",
            "type": "tmpfs",
            "source": "tmpfs",
            "options": ["nosuid", "noexec", "strictatime", "mode=755", "size=65536"],
        },
        {
            "destination": "/dev/pts",
            "type": "devpts",
            "source": "devpts",
            "options": [*_TERMINALS, *(() if flavour.sysfs else (f"max={MOST_TERMINALS}",))],
        },
        *map(_tmpfs, memory_folders(limits)),
    ]
    if flavour.sysfs:
        options = ["nosuid", "noexec", "nodev", "ro"]
        mounts.append(
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": options}
        )
    else:
        mounts.append(_bind(CPUS, CPUS, *READ_ONLY_BIND, "noexec"))
    mounts += [_bind(folder, folder, *READ_ONLY_BIND) for folder in layout.bound]
    if layout.locales is not None:
        mounts.append(_bind(layout.locales, str(rootfs.PLACE), *READ_ONLY_BIND))
    if layout.tools is not None:
        mounts.append(_bind(layout.tools, "/opt/k8e/tools", *READ_ONLY_BIND))
    if layout.python is not None:
        mounts.append(_bind(layout.python.folder, PLACE, *READ_ONLY_BIND))
    mounts.append(_bind(layout.guest.parent, "/run/k8e/guest", *READ_ONLY_BIND))
    mounts.append(_bind(layout.link, "/run/k8e/link", *READ_ONLY_BIND))
    mounts.append(_bind(layout.slot, flavour.slot_at, "rw", "rslave"))
    return mounts


def make_resources(flavour: Flavour, limits: Limits) -> dict[str, Any]:
    """The limits of the kernel for a sandbox, as an OCI specification has them."""
    memory = limits.memory + flavour.memory_overhead
    return {
        "memory": {"limit": memory, "swap": memory},
        "cpu": {"period": CPU_PERIOD, "quota": max(1000, int(limits.cpus * CPU_PERIOD))},
        "pids": {"limit": flavour.pids_limit},
        "devices": [{"allow": False, "access": "rwm"}],
    }


def _process(layout: BundleLayout, flavour: Flavour, *, limits_itself: bool) -> dict[str, Any]:
    held = ("bounding", "effective", "permitted")
    python = ["/usr/bin/python3"] if layout.python is None else layout.python.argv
    locale = HOST_LOCALE if layout.python is None else IMAGE_LOCALE
    rlimits = [
        {"type": "RLIMIT_NOFILE", "hard": layout.open_files, "soft": layout.open_files},
        {"type": "RLIMIT_CORE", "hard": 0, "soft": 0},
    ]
    # A runtime without CAP_SYS_RESOURCE may set them only where the user namespace is its own.
    own = [f"K8E_OPEN_FILES={layout.open_files}"] if limits_itself else []
    return {
        "terminal": False,
        "user": {"uid": 0, "gid": 0},
        "args": [*python, "-I", "-S", "-B", f"/run/k8e/guest/{layout.guest.name}"],
        "env": ["PATH=/usr/bin:/bin", *locale, *GUEST_MALLOC, *own],
        "cwd": "/",
        "noNewPrivileges": True,
        **({"oomScoreAdj": flavour.oom_score} if flavour.oom_score else {}),
        "capabilities": dict.fromkeys(held, flavour.capabilities),
        "rlimits": [] if limits_itself else rlimits,
    }


def make_config(
    sandbox_id: str,
    layout: BundleLayout,
    flavour: Flavour,
    limits: Limits,
    network: str = "",
    user_namespace: str = "",
) -> dict[str, Any]:
    """The whole ``config.json`` of one sandbox, with the paths of namespaces that exist already."""
    namespaces = [{"type": name} for name in ("pid", "ipc", "uts", "mount", "cgroup")]
    linux: dict[str, Any] = {
        # The slot's mounts come from the host; crun's own default would cut them off.
        "rootfsPropagation": "rslave",
        "maskedPaths": list(layout.hidden),
        "readonlyPaths": READ_ONLY,
    }
    if flavour.cgroups:
        linux["cgroupsPath"] = cgroups.path_of(sandbox_id)
        linux["resources"] = make_resources(flavour, limits)
    if flavour.id_base is not None:
        namespaces.append(_namespace("user", user_namespace))
        mapping = [{"containerID": 0, "hostID": flavour.id_base, "size": flavour.id_range}]
        linux["uidMappings"] = linux["gidMappings"] = mapping
    if flavour.seccomp:
        linux["seccomp"] = seccomp.profile()
    linux["namespaces"] = [*namespaces, _namespace("network", network)]
    return {
        "ociVersion": "1.0.2",
        "hostname": "sandbox",
        "root": {"path": str(layout.rootfs), "readonly": True},
        "process": _process(layout, flavour, limits_itself=bool(user_namespace)),
        "mounts": _mounts(layout, flavour, limits),
        "annotations": flavour.annotations,
        "linux": linux,
    }


def _namespace(kind: str, path: str) -> dict[str, str]:
    return {"type": kind, "path": path} if path else {"type": kind}


SOCKET_SHARE = 4
"""Buffers of sockets have at most this part of the session's memory, beside it."""
GVISOR_OVERHEAD = 96 * MIB
"""What gVisor itself may use beyond the session's memory: its kernel and a process per stub."""


def warm_languages(limits: Limits) -> list[str]:
    """The languages whose interpreters may wait in a sandbox.

    A Python takes some 8 MiB and is one process, a Node 40 MiB and seven threads.
    """
    return [name for name, (m, p) in WARM.items() if limits.memory >= m and limits.pids >= p]
