"""The ``gvisor`` runtime: every system call of the sandbox is served by gVisor's own kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from k8e.runtimes import bundle
from k8e.runtimes.base import Feature, Support
from k8e.runtimes.host import Host, Record
from k8e.runtimes.oci import OciRuntime
from k8e.runtimes.probing import try_launch, version_of

PLATFORM = "systrap"
# gVisor dies as a whole when its host processes reach a cgroup pids limit, so that limit is only a
# backstop; programs meet RLIMIT_NPROC, which the guest sets.
BACKSTOP_PIDS = 4096
INSTALL = "run install.sh again; it installs runsc"


class GVisor(OciRuntime):
    """Sandboxes by runsc."""

    name = "gvisor"
    tool_name = "runsc"

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._program = host.tool(self.tool_name)

    def command(self, *arguments: str) -> list[str]:
        return [
            self._program or self.tool_name,
            f"--root={self.state}",
            f"--platform={PLATFORM}",
            "--network=sandbox",
            "--host-uds=open",
            "--overlay2=none",
            *arguments,
        ]

    def flavour(self, record: Record) -> bundle.Flavour:
        return bundle.Flavour(
            # CAP_SYS_ADMIN is gVisor's own, not the host's: the guest needs it to bind its
            # workspace into place and drops it right after.
            capabilities=[*bundle.GUEST_CAPABILITIES, "CAP_SYS_ADMIN"],
            id_base=None,
            seccomp=False,
            memory_overhead=bundle.GVISOR_OVERHEAD,
            pids_limit=max(BACKSTOP_PIDS, 8 * record.limits.pids),
            slot_at="/run/k8e/slot",
            annotations={},
        )

    def guest_limits(self, record: Record) -> dict[str, Any]:
        # A program that asks for more than all memory gets ENOMEM instead of taking gVisor down.
        return {"nproc": record.limits.pids, "data": record.limits.memory}

    def mount_point(self, sandbox_id: str) -> Path:
        return self.host.folder(sandbox_id) / "slot" / "w"

    async def probe(self) -> Support:
        if self._program is None:
            return Support(self.name, False, "runsc is not installed", INSTALL)
        version = await version_of(self._program)
        launched = await try_launch(self)
        features = [
            Feature("runsc", True, version),
            Feature("platform " + PLATFORM, launched.usable, launched.detail),
            Feature("network sandbox", launched.usable, launched.detail),
            Feature("host unix sockets", launched.usable, launched.detail),
            *launched.features,
        ]
        fix = "" if launched.usable else "see the detail; k8e doctor --verbose shows runsc's log"
        return Support(self.name, launched.usable, launched.detail, fix, features)
