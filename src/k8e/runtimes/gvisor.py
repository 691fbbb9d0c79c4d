"""The ``gvisor`` runtime: every system call of the sandbox is served by gVisor's own kernel."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from k8e import errors, rootless
from k8e.model import Limits
from k8e.runtimes import bundle, cpuid, tools
from k8e.runtimes.base import Feature, Guest, Support
from k8e.runtimes.host import Host, Record
from k8e.runtimes.oci import OciRuntime
from k8e.runtimes.probing import try_launch, version_of

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
    tool_name = "runsc"
    tool_names = ("runsc",)

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._program = host.tool(self.tool_name)
        self._platform = PLATFORMS[0]
        # runsc wants to switch controllers on from the root of all groups down, cpuset among them,
        # and gives up where it may not.
        self.group_is_ours = host.has_cgroups and rootless.inside() is not None
        self.starter = tools.Starter(cpuid.keep_native)

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

    def flavour(self, record: Record) -> bundle.Flavour:
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

    def guest_limits(self, record: Record) -> dict[str, Any]:
        # Of the bounds of a folder in memory, runsc passes the bytes on and drops the files.
        folders = [
            [item.path, ",".join(item.bounds), item.mode, item.noexec]
            for item in bundle.memory_folders(record.limits)
        ]
        return {**self.stand_in_limits(record), "nproc": record.limits.pids, "folders": folders}

    def resize_folders(self, record: Record) -> dict[str, Any]:
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
        for platform in PLATFORMS:
            if support.has(f"platform {platform}"):
                self._platform = platform
        self.networked = not any(
            item.name == NETWORK and not item.usable for item in support.features
        )
