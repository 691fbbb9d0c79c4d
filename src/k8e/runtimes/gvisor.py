"""The ``gvisor`` runtime: every system call of the sandbox is served by gVisor's own kernel.

gVisor makes ``cpuid`` trap and answers in the CPU's place, with what the CPU told it. The C library
asks about seventy times whenever a program starts, and each trap takes as long as five of the
CPU's own answers even in a virtual machine: a third of the time that ``true`` takes. Where a host
cannot make it trap, gVisor does without; so that is what it is told here, by a filter on its
system calls that refuses this one. A filter belongs to a thread and to all that it starts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from k8e import errors, rootless
from k8e.model import Limits
from k8e.runtimes import bundle, tools
from k8e.runtimes.base import Feature, Guest, Support
from k8e.runtimes.host import Host, SandboxRecord
from k8e.runtimes.oci import OciRuntime
from k8e.runtimes.probe import try_launch, version_of

_SYS_SECCOMP, _SYS_ARCH_PRCTL = 317, 158
_SET_MODE_FILTER = 1
_SPEC_ALLOW = 4  # no slower memory for programs of this thread, on kernels that would think of it
_AUDIT_ARCH_X86_64 = 0xC000003E
_ARCH_SET_CPUID = 0x1012
_AT_NUMBER, _AT_ARCH, _AT_FIRST_ARGUMENT = 0, 4, 16  # in struct seccomp_data
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_REFUSE, _ALLOW = 0x00050000 | errno.ENODEV, 0x7FFF0000


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]


def make_filter() -> bytes:
    """A filter that refuses to make ``cpuid`` trap, and nothing else."""
    steps = [
        (_LOAD, 0, 0, _AT_ARCH),
        (_JUMP_IF_EQUAL, 0, 5, _AUDIT_ARCH_X86_64),
        (_LOAD, 0, 0, _AT_NUMBER),
        (_JUMP_IF_EQUAL, 0, 3, _SYS_ARCH_PRCTL),
        (_LOAD, 0, 0, _AT_FIRST_ARGUMENT),
        (_JUMP_IF_EQUAL, 0, 1, _ARCH_SET_CPUID),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def keep_native() -> None:
    """Stop this thread, and every program that it starts, from making ``cpuid`` trap.

    Without the right to do so everything works as before, only slower.
    """
    if platform.machine() != "x86_64" or struct.calcsize("P") != 8:
        return
    code = ctypes.create_string_buffer(make_filter())
    program = _Program(len(code.raw) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(_SYS_SECCOMP, _SET_MODE_FILTER, _SPEC_ALLOW, ctypes.byref(program))


PLATFORMS = ("systrap", "ptrace")  # in order of preference; kvm hangs on many hosts
CHECKPOINT_SECONDS = 10.0
SPINNING_CPUS = 3
"""On a host with fewer CPUs, gVisor's threads that spin while they wait for each other keep others
from working: without that, programs start in four fifths of the time on two CPUs."""
# gVisor dies as a whole when its host processes reach a cgroup pids limit, so that limit is only a
# backstop; programs meet RLIMIT_NPROC, which the guest sets.
BACKSTOP_PIDS = 4096
FEWEST_CPUS = 2.0
OOM_SCORE = 500
"""All programs of a sandbox are in one process here. On a host without memory it is to end before
the gateway does; among the programs of a sandbox, ``container`` does the same."""
NETWORK = "network"
INSTALL = "run install.sh again; it installs runsc"


class GVisor(OciRuntime):
    """Sandboxes by runsc."""

    name = "gvisor"
    title = "gVisor"
    aliases: Sequence[str] = ("runsc",)
    strength = 20
    tool_name = "runsc"
    tool_names = ("runsc",)
    # Its guest binds the workspace inside the sentry, which holds the folder's descriptor from then
    # on, and may mount nothing afterwards: another mount at that place is seen by nobody. And ext4
    # refuses to make writable in place what it has given up (remount: EROFS).
    sees_new_mounts = False

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._program = host.tool(self.tool_name)
        self._platform = PLATFORMS[0]
        # runsc wants to switch controllers on from the root of all groups down, cpuset among them,
        # and gives up where it may not.
        self.group_is_ours = host.has_cgroups and rootless.inside() is not None
        self.starter = tools.Starter(keep_native)

    def command(self, *arguments: str, network: str = "") -> list[str]:
        flags = [f"--root={self.state}", f"--platform={self._platform}"]
        if self._platform == "systrap" and (os.cpu_count() or 1) < SPINNING_CPUS:
            flags.append("--systrap-disable-fast-path")
        # Both are gVisor's own network stack; with none, it has nothing but loopback.
        flags.append("--network=sandbox" if network else "--network=none")
        flags += ["--host-uds=open", "--overlay2=none"]
        if self.group_is_ours or not self.host.has_cgroups:
            flags.append("--ignore-cgroups")
        return [self._program or self.tool_name, *flags, *arguments]

    def flavour(self, record: SandboxRecord) -> bundle.Flavour:
        return bundle.Flavour(
            # CAP_SYS_ADMIN is gVisor's own, not the host's: the guest needs it to bind its
            # workspace into place and drops it right after.
            capabilities=[*bundle.GUEST_CAPABILITIES, "CAP_SYS_ADMIN"],
            id_base=None,
            seccomp=False,
            memory_overhead=bundle.GVISOR_OVERHEAD,
            pids_limit=max(BACKSTOP_PIDS, 8 * record.limits.pids),
            sysfs=True,
            slot_at="/run/k8e/slot",
            annotations={},
            cgroups=self.host.has_cgroups and not self.group_is_ours,
            oom_score=OOM_SCORE,
        )

    def can_change(self, launched: Limits, asked: Limits) -> bool:
        # It counts its CPUs when it starts: as many as its quota says, and never fewer than two.
        if asked.cpus > max(FEWEST_CPUS, launched.cpus):
            return False
        return super().can_change(launched, asked)

    def guest_limits(self, record: SandboxRecord) -> dict[str, Any]:
        # Of the bounds of a folder in memory, runsc passes the bytes on and drops the files.
        folders = [
            [item.path, ",".join(item.bounds), item.mode, item.noexec]
            for item in bundle.memory_folders(record.limits)
        ]
        return {**self.stand_in_limits(record), "nproc": record.limits.pids, "folders": folders}

    def resize_folders(self, record: SandboxRecord) -> dict[str, Any]:
        return {}  # they are among the limits of the guest

    def mount_point(self, sandbox_id: str) -> Path:
        return self.host.folder(sandbox_id) / "slot" / "w"

    async def probe(self) -> Support:
        self._program = self.host.tool(self.tool_name)  # it may have been installed since
        if self._program is None:
            return Support(self.name, False, "runsc is not installed", INSTALL)
        failures: list[str] = []
        for self._platform in PLATFORMS:
            launched = await try_launch(self)
            if launched.usable:
                network = await self._try_network()
                return await self._found(self._program, launched, network)
            failures.append(f"{self._platform}: {launched.detail}")
        return Support(self.name, False, "; ".join(failures), "k8e doctor --fresh tries again")

    async def _try_network(self) -> list[Feature]:
        """Whether gVisor's network stack takes over the interface of a namespace."""
        async with self.host.lend_network() as path:
            if not path:
                return []
            launched = await try_launch(self, path)
        self.networked = launched.usable
        if launched.usable:
            return [Feature(NETWORK, True, "gVisor's own network stack on a wire of egress")]
        return [Feature(NETWORK, False, launched.detail, "install a newer gVisor: install.sh")]

    async def _found(self, program: str, launched: Support, network: list[Feature]) -> Support:
        how = "a guest ran on it and dialled back"
        features = [
            Feature("runsc", True, await version_of(program)),
            Feature(f"platform {self._platform}", True, how),
            Feature("host unix sockets", True, how),
            *launched.features,
            *network,
        ]
        return Support(self.name, True, launched.detail, "", features)

    async def try_features(self, guest: Guest) -> list[Feature]:
        folder = self.host.folder(guest.sandbox_id)
        image = folder / "checkpoint"
        argv = self.command("checkpoint", f"--image-path={image}", guest.sandbox_id)
        try:
            await self.run(argv, folder / "log", CHECKPOINT_SECONDS)
        except errors.ToolFailed as error:
            return [Feature("checkpoint", False, str(error))]
        size = sum(file.stat().st_size for file in image.iterdir())
        return [Feature("checkpoint", True, f"{size / 1e6:.1f} MB for an idle sandbox")]

    def recall(self, support: Support) -> None:
        self._program = self.host.tool(self.tool_name)
        for name in PLATFORMS:
            if support.has(f"platform {name}"):
                self._platform = name
        self.networked = not any(
            item.name == NETWORK and not item.usable for item in support.features
        )
