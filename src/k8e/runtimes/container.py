"""The ``container`` runtime: namespaces, cgroups and seccomp by ``runc`` or ``crun``.

Weaker than gVisor, since the sandbox talks to the host's own kernel; every sandbox has a user
namespace with a uid range of its own, no capabilities for user code, and a system-call allow-list.

The kernel counts some resources of a user namespace (inotify instances and watches, among others)
against the uid that made it, up to a limit per uid. Namespaces that ``runc`` makes are all root's:
one sandbox could use up the whole host's share. So each is made by a uid of its sandbox's own
range.

Only for one in which no program of a user's has run. Even so nothing on the way may be a link: the
paths are looked up below the sandbox's own root, by a kernel call that refuses links.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import select
import struct
import subprocess
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from k8e import errors
from k8e.runtimes import bundle, locks, mounts
from k8e.runtimes.base import Feature, Support
from k8e.runtimes.bundle import MemoryFolder
from k8e.runtimes.host import Host, SandboxRecord
from k8e.runtimes.oci import OciRuntime
from k8e.runtimes.probe import try_launch, version_of
from k8e.system import start_time

SECONDS = 10.0
_HOLDER = ["unshare", "--user", "--", "cat"]
"""Makes the namespace and answers when it is there; it ends with its input."""


def make_user_namespace(path: Path, base: int, size: int) -> None:
    """A user namespace of ``size`` ids from ``base``, kept by a mount on ``path``."""
    path.touch()
    holder = subprocess.Popen(
        _HOLDER,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        user=base,
        group=base,
        extra_groups=[],
    )
    try:
        _keep(holder, path, f"0 {base} {size}\n")
    finally:
        holder.kill()
        holder.wait()
        for stream in (holder.stdin, holder.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _keep(holder: subprocess.Popen[bytes], path: Path, ids: str) -> None:
    if holder.stdin is None or holder.stdout is None:
        raise OSError("the maker of a user namespace has no pipes")
    os.write(holder.stdin.fileno(), b"x")
    waiting = select.poll()
    waiting.register(holder.stdout, select.POLLIN)
    if not waiting.poll(SECONDS * 1000) or os.read(holder.stdout.fileno(), 1) != b"x":
        raise PermissionError("this host lets no other user make a user namespace")
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{holder.pid}/{name}").write_text(ids, "ascii")
    mounts.mount(f"/proc/{holder.pid}/ns/user", path, "", mounts.MS_BIND)


# The numbers are the same on every architecture of Linux since 5.2.
_FSCONFIG, _FSPICK, _OPENAT2 = 431, 433, 437
_FSPICK_CLOEXEC, _FSPICK_EMPTY_PATH = 0x1, 0x8
_FSCONFIG_SET_STRING, _FSCONFIG_CMD_RECONFIGURE = 1, 7
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x2, 0x4, 0x8
_TMPFS = 0x01021994
_STATFS_BYTES = 512  # more than the structure has anywhere

_libc = ctypes.CDLL(None, use_errno=True)


def resize_folders(pid: int, started: int, folders: Iterable[MemoryFolder]) -> None:
    """Resize the memory folders of the sandbox whose first process is ``pid``."""
    with _closing(os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
        if start_time(pid) != started:  # the root is another one's, perhaps this host's own
            raise ProcessLookupError(f"process {pid} is not the sandbox's any more")
        for folder in folders:
            with _closing(_open_beneath(root, folder.path.lstrip("/"))) as place:
                _resize(place, folder)


def _open_beneath(root: int, path: str) -> int:
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    resolve = _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH
    how = struct.pack("=QQQ", flags, 0, resolve)
    return _call(path, _OPENAT2, root, path.encode(), how, ctypes.c_size_t(len(how)))


def _resize(place: int, folder: MemoryFolder) -> None:
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(place, found) or struct.unpack_from("=l", found)[0] != _TMPFS:
        raise OSError(f"{folder.path} of the sandbox is no folder in memory")
    flags = _FSPICK_CLOEXEC | _FSPICK_EMPTY_PATH
    with _closing(_call(folder.path, _FSPICK, place, b"", flags)) as picked:
        for option in folder.bounds:
            name, _, value = option.encode().partition(b"=")
            _call(folder.path, _FSCONFIG, picked, _FSCONFIG_SET_STRING, name, value, 0)
        _call(folder.path, _FSCONFIG, picked, _FSCONFIG_CMD_RECONFIGURE, None, None, 0)


def _call(path: str, number: int, *arguments: object) -> int:
    result: int = _libc.syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"resizing failed: {os.strerror(code)}", path)
    return result


@contextlib.contextmanager
def _closing(fd: int) -> Generator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


log = logging.getLogger(__name__)

CHILD_OOM_SCORE = 500
SHARED_COUNTS = (
    "a sandbox counts against root's share of inotify instances, which it could use up: its user "
    "namespace could not be made by a uid of its own (%s)"
)
TOOLS = ("runc", "crun")  # in order of preference
INSTALL = "run install.sh again; it installs runc"


class Container(OciRuntime):
    """Sandboxes of runc, or of crun where that works."""

    name = "container"
    title = "a container"
    aliases: Sequence[str] = ("runc",)
    strength = 10
    weakness = "programs talk to this host's kernel, so a kernel exploit would reach the host"

    tool_name = TOOLS[0]
    tool_names = TOOLS

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._program = host.tool(self.tool_name)

    def command(self, *arguments: str, network: str = "") -> list[str]:
        return [self._program or self.tool_name, "--root", str(self.state), *arguments]

    def assign(self, record: SandboxRecord) -> SandboxRecord:
        if record.workspace_of:
            # Files carry the uids of the range, so whoever shares the files shares the range.
            base = self.host.uids.share(record.sandbox_id, record.workspace_of)
        else:
            base = self.host.uids.take(record.sandbox_id)
        return replace(record, id_base=base)

    def user_namespace(self, record: SandboxRecord) -> str:
        if record.id_base is None:
            return ""
        path = self.host.folder(record.sandbox_id) / "userns"
        try:
            make_user_namespace(path, record.id_base, self.host.uids.size)
        except (OSError, subprocess.SubprocessError) as error:
            log.warning(SHARED_COUNTS, error)
            return ""
        return str(path)

    def hidden_files(self) -> list[str]:
        return bundle.hidden_here()

    def flavour(self, record: SandboxRecord) -> bundle.Flavour:
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

    def guest_limits(self, record: SandboxRecord) -> dict[str, Any]:
        return {**self.stand_in_limits(record), "oom_score_adj": CHILD_OOM_SCORE}

    async def switch(self, verb: str, sandbox_id: str, wanted: str) -> None:
        if not self.host.has_cgroups:
            raise errors.RuntimeUnusable(
                "a container cannot be paused here: the gateway has no control group for it",
                hint="use gvisor, or run k8e as root",
            )
        await super().switch(verb, sandbox_id, wanted)

    async def find_greedy(self, sandbox_ids: Iterable[str]) -> Mapping[str, str]:
        return await asyncio.to_thread(locks.find_greedy, sandbox_ids)

    def resize_folders(self, record: SandboxRecord) -> dict[str, Any]:
        resize_folders(record.pid, record.pid_started, bundle.memory_folders(record.limits))
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
        return [f"closed={self.host.closed_folder()}", *super().facts()]

    def recall(self, support: Support) -> None:
        for tool_name in TOOLS:
            if support.has(tool_name):
                self.tool_name, self._program = tool_name, self.host.tool(tool_name)
