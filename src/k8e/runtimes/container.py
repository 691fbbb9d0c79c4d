"""The ``container`` runtime: namespaces, cgroups and seccomp by ``runc`` or ``crun``.

Weaker than gVisor, since the sandbox talks to the host's own kernel; every sandbox has a user
namespace with a uid range of its own, no capabilities for user code, and a system-call allow-list.
"""

from __future__ import annotations

import logging
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from k8e import errors
from k8e.runtimes import bundle, procfs, resizing, userspaces
from k8e.runtimes.base import Feature, Support
from k8e.runtimes.host import Host, Record
from k8e.runtimes.oci import OciRuntime
from k8e.runtimes.probing import try_launch, version_of

log = logging.getLogger(__name__)

CHILD_OOM_SCORE = 500
SHARED_COUNTS = (
    "a sandbox counts against root's share of inotify instances, which it could use up: its user "
    "namespace could not be made by a uid of its own (%s)"
)
TOOLS = ("runc", "crun")  # in order of preference
INSTALL = "run install.sh again; it installs runc"


class Container(OciRuntime):
    """Sandboxes by runc, or by crun where that one works."""

    name = "container"

    tool_name = TOOLS[0]
    tool_names = TOOLS

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._program = host.tool(self.tool_name)

    def command(self, *arguments: str, network: str = "") -> list[str]:
        return [self._program or self.tool_name, "--root", str(self.state), *arguments]

    def assign(self, record: Record) -> Record:
        if record.workspace_of:
            # Files carry the uids of the range, so whoever shares the files shares the range.
            base = self.host.uids.share(record.sandbox_id, record.workspace_of)
        else:
            base = self.host.uids.take(record.sandbox_id)
        return replace(record, id_base=base)

    def user_namespace(self, record: Record) -> str:
        if record.id_base is None:
            return ""
        path = self.host.folder(record.sandbox_id) / "userns"
        try:
            userspaces.make(path, record.id_base, self.host.uids.size)
        except (OSError, subprocess.SubprocessError) as error:
            log.warning(SHARED_COUNTS, error)
            return ""
        return str(path)

    def hidden_files(self) -> list[str]:
        return procfs.hidden_here()

    def flavour(self, record: Record) -> bundle.Flavour:
        return bundle.Flavour(
            capabilities=bundle.GUEST_CAPABILITIES,
            id_base=record.id_base,
            id_range=self.host.uids.size,
            seccomp=True,
            memory_overhead=0,
            # The guest itself is one of them.
            pids_limit=record.limits.pids + 1,
            sysfs=False,
            slot_at="/workspace",
            annotations={},
            cgroups=self.host.has_cgroups,
        )

    def guest_limits(self, record: Record) -> dict[str, Any]:
        return {**self.stand_in_limits(record), "oom_score_adj": CHILD_OOM_SCORE}

    async def switch(self, verb: str, sandbox_id: str, wanted: str) -> None:
        if not self.host.has_cgroups:
            raise errors.RuntimeUnusable(
                "a container cannot be paused here: the gateway has no control group for it",
                hint="use gvisor, or run k8e as root",
            )
        await super().switch(verb, sandbox_id, wanted)

    def resize_folders(self, record: Record) -> dict[str, Any]:
        resizing.resize_folders(
            record.pid, record.pid_started, bundle.memory_folders(record.limits)
        )
        return {}

    def mount_point(self, sandbox_id: str) -> Path:
        return self.host.folder(sandbox_id) / "slot"

    async def probe(self) -> Support:
        closed = self.host.closed_folder()
        if closed is not None:
            detail = f"{closed} is closed to other users, so a sandbox cannot reach its root"
            fix = f"chmod o+x {closed}, or set K8E_DATA_DIR to another folder"
            return Support(self.name, False, detail, fix)
        failures: list[str] = []
        for tool_name in TOOLS:
            program = self.host.tool(tool_name)
            if program is None:
                failures.append(f"{tool_name} is not installed")
                continue
            self.tool_name, self._program = tool_name, program
            launched = await try_launch(self)
            if launched.usable:
                tool = Feature(tool_name, True, await version_of(program))
                return Support(self.name, True, launched.detail, "", [tool, *launched.features])
            failures.append(launched.detail)
        return Support(self.name, False, "; ".join(failures), INSTALL)

    def facts(self) -> list[str]:
        return [f"closed={self.host.closed_folder()}"]

    def recall(self, support: Support) -> None:
        for tool_name in TOOLS:
            if support.has(tool_name):
                self.tool_name, self._program = tool_name, self.host.tool(tool_name)
