"""Which files of the kernel's ``/proc`` and ``/sys`` a container may see.

They are the host's own: most tell of its disks, memory, modules and configuration, and some can be
written by anybody. ``/proc/pressure`` makes a process that SIGKILL does not end for a minute. So
what ordinary programs read is listed here, and everything else that the kernel has is hidden,
whatever it is called. gVisor needs none of this: its ``/proc`` tells of its own kernel.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

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
    """The paths to hide on this host. Read anew each time: a module that is loaded adds some."""
    return hidden(os.listdir("/proc"))  # noqa: PTH208 - paths of thousands of processes take longer
