"""A runtime for tests alone: the guest as a process of this host, with nothing to isolate it.

It shows what the contract of ``runtimes/base.py`` takes: one file, and ``register``. Its own mounts
and process ids are not protection: the guest's paths are fixed, and it ends all that it can see.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from k8e import errors
from k8e.guest.spawn import GID, UID
from k8e.link import Link, Listener, request
from k8e.model import Limits, Rootfs, SandboxSpec
from k8e.runtimes import guest_package, rootfs
from k8e.runtimes.base import Binding, Guest, Support
from k8e.runtimes.host import GUEST_PYTHON, Host
from k8e.system import start_time

CONNECT_SECONDS = 30.0
OWN_NAMESPACES = ("--mount", "--pid", "--fork", "--kill-child", "--propagation", "private")
START = """
set -e
cd "$1"; shift
for lent in $LENT; do mount --rbind "$lent" ".$lent"; done
mount -t proc proc proc
mount --rbind /dev dev
for name in run tmp home workspace; do mount -t tmpfs -o mode=755 "$name" "$name"; done
mount --bind tmp var/tmp
mount --bind "$TOOLS" opt/k8e/tools
chmod 1777 tmp
chown "$OWNER" workspace
mkdir -p run/k8e/link run/k8e/guest
mount --bind "$LINK" run/k8e/link
mount --bind "$GUEST" run/k8e/guest
exec chroot . /usr/bin/env -i PATH=/usr/bin:/bin LANG=C.UTF-8 "$@"
"""
"""Puts the folders that the guest knows into place, and becomes the guest."""


class PlainGuest:
    """A guest in a process of its own."""

    def __init__(self, runtime: Plain, sandbox_id: str, pid: int, listener: Listener) -> None:
        self.sandbox_id = sandbox_id
        self._runtime = runtime
        self._pid = pid
        self._listener = listener
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._pidfd = os.pidfd_open(pid)
        listener.on_breach = lambda what: self._end(f"its guest broke the protocol: {what}")
        asyncio.get_running_loop().add_reader(self._pidfd, self._end, "the sandbox ended")

    def _end(self, reason: str) -> None:
        if not self._gone.done():
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._gone.set_result(reason)
            self._listener.close(errors.SandboxDied(reason))

    @property
    def link(self) -> Link | None:
        return self._listener.link

    async def connect(self) -> Link:
        return await self._listener.ready(CONNECT_SECONDS)

    async def settle(self, warm: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        call = {"op": "settle", "warm": {name: list(names) for name, names in warm.items()}}
        answer = await request(await self.connect(), call)
        return tuple(map(str, answer.get("left_out") or ()))

    async def bind(self, binding: Binding) -> None:
        call = {
            "op": "bind",
            "env": binding.env,
            "cwd": binding.cwd,
            "hidden": list(binding.hidden),
            "warm": {name: list(modules) for name, modules in binding.warm.items()},
            "limits": dict(vars(binding.limits or Limits())),
        }
        await request(await self.connect(), call)

    async def wait(self) -> str:
        return await asyncio.shield(self._gone)

    def limit_hits(self) -> Mapping[str, int]:
        return {}

    async def freeze(self) -> None:
        raise errors.RuntimeUnusable("a plain process cannot be frozen with all its children")

    async def thaw(self) -> None:
        """Nothing was frozen."""

    async def heal_workspace(self) -> bool:
        return False

    async def kill(self) -> None:
        self._end("the session was destroyed")
        await self._runtime.purge(self.sandbox_id)


class Plain:
    """Starts the guest with nothing around it."""

    name = "plain"
    title = "a plain process"
    aliases: Sequence[str] = ("process",)
    strength = 0
    weakness = "programs are processes of this host"
    networked = False

    def __init__(self, host: Host) -> None:
        self._folder = host.settings.run_dir / self.name
        self._data = host.settings.data_dir / self.name
        self._tools = host.settings.home / "tools"
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    async def probe(self) -> Support:
        return Support(self.name, usable=os.geteuid() == 0)

    def facts(self) -> Sequence[str]:
        return [f"uid={os.geteuid()}"]

    def recall(self, support: Support) -> None:
        """It has nothing to choose."""

    def can_change(self, launched: Limits, asked: Limits) -> bool:
        return True

    def excess(self, limits: Limits) -> str:
        return ""

    async def fetch(self, rootfs: Rootfs) -> None:
        if rootfs.kind != "host":
            raise errors.InvalidRequest("a plain process has the root file system of the host")

    async def launch(self, spec: SandboxSpec) -> Guest:
        folder = self._folder / spec.sandbox_id
        folder.mkdir(parents=True)
        Listener.prepare(folder / "link", owner=0)
        listener = Listener(folder / "link")
        starting = asyncio.create_task(self._start(folder, listener))
        try:
            pid = await asyncio.shield(starting)
            guest = PlainGuest(self, spec.sandbox_id, pid, listener)
            await guest.connect()
        except BaseException:
            await asyncio.wait([starting])  # so that nothing is made after it was removed
            listener.close(errors.SandboxDied("its launch failed"))
            await asyncio.shield(self.purge(spec.sandbox_id))
            raise
        return guest

    async def _start(self, folder: Path, listener: Listener) -> int:
        await listener.listen()
        return await asyncio.to_thread(self._start_process, folder)

    def _start_process(self, folder: Path) -> int:
        guest = guest_package.pack_guest(self._data / "guest", GUEST_PYTHON)
        root = rootfs.make_skeleton(self._data / "root")
        places = {
            "LENT": " ".join(rootfs.bound_folders()),
            "OWNER": f"{UID}:{GID}",
            "LINK": str(folder / "link"),
            "GUEST": str(guest.parent),
            "TOOLS": str(self._tools),
            "PATH": os.environ["PATH"],
        }
        program = [GUEST_PYTHON, "-I", "-S", "-B", f"/run/k8e/guest/{guest.name}"]
        started = self._started[folder.name] = subprocess.Popen(
            ["unshare", *OWN_NAMESPACES, "sh", "-c", START, folder.name, str(root), *program],
            env=places,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        record = {"pid": started.pid, "started": start_time(started.pid)}
        (folder / "process").write_text(json.dumps(record), "ascii")
        return started.pid

    async def adopt(self) -> list[Guest]:
        guests: list[Guest] = []
        for sandbox_id in sorted(self.remains()):
            pid = self._running(sandbox_id)
            if pid:
                listener = Listener(self._folder / sandbox_id / "link")
                await listener.listen()
                guests.append(PlainGuest(self, sandbox_id, pid, listener))
        return guests

    def remains(self) -> set[str]:
        return {path.name for path in self._folder.glob("sb-*")}

    async def find_greedy(self, sandbox_ids: Iterable[str]) -> Mapping[str, str]:
        return {}

    async def purge(self, sandbox_id: str) -> None:
        await asyncio.to_thread(self._remove, sandbox_id)

    def _remove(self, sandbox_id: str) -> None:
        pid = self._running(sandbox_id)
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        started = self._started.pop(sandbox_id, None)
        if started is not None:
            started.wait()
        shutil.rmtree(self._folder / sandbox_id, ignore_errors=True)

    def _running(self, sandbox_id: str) -> int:
        """The pid of a sandbox's process, if that still runs."""
        try:
            record = json.loads((self._folder / sandbox_id / "process").read_text("ascii"))
        except FileNotFoundError:
            return 0
        return int(record["pid"]) if start_time(record["pid"]) == record["started"] else 0
