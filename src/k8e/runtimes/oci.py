"""OCI sandboxes of ``runsc`` and ``runc``: launching, adopting, purging; and their guests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from k8e import errors, link
from k8e.guest.spawn import TOOLS, UID
from k8e.images.service import Content
from k8e.model import MIB, Limits, Rootfs, SandboxSpec
from k8e.runtimes import bundle, cgroups, machine, mounts, tools
from k8e.runtimes.base import Binding, Feature, Guest, NotRemoved, Support
from k8e.runtimes.host import Host, SandboxRecord, kill_mentioning
from k8e.runtimes.workspaces import round_up
from k8e.system import describe, start_time

HOLD_SECONDS = 5.0  # that a guest has to stop its clocks; one that does not is frozen all the same
CONNECT_SECONDS = 20.0
REDIAL_SECONDS = 5.0
SETTLE_SECONDS = 60.0

log = logging.getLogger(__name__)

T = TypeVar("T")


async def to_the_end(function: Callable[[SandboxRecord], T], record: SandboxRecord) -> T:
    """Run ``function`` in a thread; a caller that is cancelled still waits for its end.

    Otherwise whoever cleans up would race with a thread that still makes things.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, record))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        work.exception()  # whoever cancelled does not want to know
        raise


class OciGuest:
    """A sandbox made of an OCI bundle."""

    def __init__(self, runtime: OciRuntime, record: SandboxRecord, listener: link.Listener) -> None:
        self.sandbox_id = record.sandbox_id
        self.record = record
        self._runtime = runtime
        self._listener = listener
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._pidfd = -1
        self._patience = CONNECT_SECONDS
        self._frozen = False  # as far as we know: an adopted one may be
        listener.on_breach = self._on_breach

    def watch(self) -> None:
        """Notice the end of the sandbox's main process, without polling."""
        try:
            self._pidfd = os.pidfd_open(self.record.pid)
        except ProcessLookupError:
            self._on_exit()
            return
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)

    def _on_exit(self) -> None:
        self._stop_watching()
        if not self._gone.done():
            self._give_up(self._runtime.explain_end(self.record))

    def _on_breach(self, what: str) -> None:
        """Give up a guest that breaks the protocol: the task that waits for its end kills it.

        A new link would not make it honest, and it could go on for as long as its session lives.
        """
        if not self._gone.done():
            self._give_up(f"its guest broke the protocol: {what}")

    def _give_up(self, reason: str) -> None:
        self._gone.set_result(reason)
        self._listener.close(errors.SandboxDied(reason))

    def _stop_watching(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    @property
    def link(self) -> link.Link | None:
        return self._listener.link

    async def connect(self) -> link.Link:
        ready = await self._listener.ready(self._patience)
        self._patience = REDIAL_SECONDS
        return ready

    async def settle(self, warm: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        await self._mount_workspace()
        wanted = bundle.warm_languages(self.record.limits)
        call = {
            "op": "settle",
            "warm": {name: list(warm[name]) for name in wanted if name in warm},
            "env": self.record.env,  # an image's: interpreters start with it
            **self._runtime.guest_limits(self.record),
        }
        answer = await link.request(await self.connect(), call, seconds=SETTLE_SECONDS)
        too_large = [name for name in warm if name not in wanted and name in bundle.WARM]
        return (
            *(f"{name}: the limits leave no room for one that waits" for name in too_large),
            *(str(item) for item in answer.get("left_out") or ()),
        )

    async def bind(self, binding: Binding) -> None:
        before = self.record
        self.record = replace(before, limits=binding.limits or before.limits)
        changes: dict[str, Any] = {}
        if self.record.limits != before.limits:
            changes = await to_the_end(self._runtime.change_places(before), self.record)
        await self._mount_workspace()
        call = {
            "op": "bind",
            "env": {**self.record.env, **binding.env},
            "cwd": binding.cwd,
            "hidden": list(binding.hidden),
            "token": binding.token,
            "warm": self._warm_languages(binding.warm),
            "limits": dict(vars(self.record.limits)),
            "other_limits": self.record.limits != before.limits,
            **self._runtime.guest_limits(self.record),
            **changes,
        }
        try:
            await link.request(await self.connect(), call)
        except OSError as error:
            if not binding.cwd:
                raise
            raise errors.InvalidRequest(
                f"commands cannot start in {binding.cwd[:80]!r}: {error.strerror}"
            ) from None
        if self.record.limits != before.limits:
            # Not before: with less memory, interpreters that waited had to go first.
            await to_the_end(self._runtime.hold_limits, self.record)

    def _warm_languages(self, asked: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        """The languages whose interpreters may wait, each with its modules; none if none shall.

        Node.js need not be asked for by name: nobody's waits before the first use.
        """
        roomy = bundle.warm_languages(self.record.limits) if asked else []
        return {name: list(asked.get(name, ())) for name in roomy if name in {*asked, "node"}}

    async def _mount_workspace(self) -> None:
        if not self.record.settled:
            self.record = await to_the_end(self._runtime.mount_workspace, self.record)

    async def wait(self) -> str:
        return await asyncio.shield(self._gone)

    def limit_hits(self) -> Mapping[str, int]:
        return cgroups.limit_hits(self.sandbox_id)

    async def freeze(self) -> None:
        if self.link is not None and not self._frozen:
            with contextlib.suppress(errors.K8eError, OSError):  # it has no say in this
                await link.request(self.link, {"op": "hold"}, seconds=HOLD_SECONDS)
        await self._runtime.switch("pause", self.sandbox_id, "paused")
        self._frozen = True

    async def thaw(self) -> None:
        await self._runtime.switch("resume", self.sandbox_id, "running")
        self._frozen = False
        try:
            await link.request(await self.connect(), {"op": "release"})
        except (errors.K8eError, OSError) as error:
            # It runs, whatever it says; its time-outs may stand still, which is its own loss.
            log.warning("sandbox %s went on without a word: %s", self.sandbox_id, error)

    async def heal_workspace(self) -> bool:
        if not self._runtime.sees_new_mounts or self._frozen:
            return False
        self._note_healing(True)
        await self.freeze()
        try:
            await to_the_end(self._runtime.heal_workspace, self.record)
        except (errors.K8eError, OSError) as error:
            log.warning("the workspace of %s cannot be repaired: %s", self.sandbox_id, error)
            return False
        finally:
            await self.thaw()
            self._note_healing(False)
        return True

    async def finish_heal(self) -> None:
        """Go on where the gateway before us was killed while it repaired the workspace."""
        await to_the_end(self._runtime.finish_heal, self.record)
        await self.thaw()
        self._note_healing(False)

    def _note_healing(self, healing: bool) -> None:
        self.record = replace(self.record, healing=healing)
        self.record.save(self._runtime.host.folder(self.sandbox_id))

    async def kill(self) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._stop_watching()
        if not self._gone.done():
            self._gone.set_result("the session was destroyed")
        self._listener.close(errors.SandboxDied(self._gone.result()))
        await self._runtime.purge(self.sandbox_id)


RUN_SECONDS = 30.0
DELETE_SECONDS = 10.0  # for the runtime; what it leaves, we remove
AGAIN_SECONDS = 0.5  # for the processes of a sandbox that resisted before
FREEZE_SECONDS = 15.0
FREEZE_TRIES = 8
FREEZE_DELAY = 0.05  # seconds before the second try, doubled for each one after it


def _workspace_of(record: SandboxRecord) -> dict[str, int]:
    """What a workspace must be for a sandbox."""
    limits = record.limits
    return {"size": limits.disk, "inodes": limits.inodes, "owner": (record.id_base or 0) + UID}


def _with_tools(env: dict[str, str]) -> dict[str, str]:
    """The environment of an image, whose programs come before ours on its PATH."""
    return {**env, "PATH": f"{env['PATH']}:{TOOLS}"} if env.get("PATH") else env


def _limit_sockets(record: SandboxRecord) -> None:
    cgroups.limit_sockets(record.sandbox_id, record.limits.memory // bundle.SOCKET_SHARE)


class OciRuntime:
    """Base of the local runtimes; subclasses say how their program is called."""

    name = ""
    title = ""
    aliases: Sequence[str] = ()
    strength = 0
    weakness = ""
    tool_name = ""
    tool_names: tuple[str, ...] = ()
    """The programs that a probe tries, in order of preference."""
    networked = True
    sees_new_mounts = True
    """Whether a sandbox that runs sees what the host mounts in the place of its workspace."""
    group_is_ours = False
    """Whether we make a sandbox's control group, and not the runtime's program."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.state = host.settings.run_dir / self.name
        self.starter = tools.Starter()

    # What differs.

    def flavour(self, record: SandboxRecord) -> bundle.Flavour:
        raise NotImplementedError

    def command(self, *arguments: str, network: str = "") -> list[str]:
        """The argv of this runtime's program with its global flags."""
        raise NotImplementedError

    def guest_limits(self, record: SandboxRecord) -> dict[str, Any]:
        """Limits that the guest sets because the host cannot."""
        raise NotImplementedError

    def stand_in_limits(self, record: SandboxRecord) -> dict[str, Any]:
        """What a guest can do where no cgroup holds its sandbox: bound each of its programs."""
        if self.host.has_cgroups:
            return {}
        return {"nproc": record.limits.pids, "data": record.limits.memory}

    def resize_folders(self, record: SandboxRecord) -> dict[str, Any]:
        """Give the folders in memory the sizes of the limits; what the guest must do for it."""
        raise NotImplementedError

    def mount_point(self, sandbox_id: str) -> Path:
        """Where on the host a workspace is mounted for the sandbox to see it."""
        raise NotImplementedError

    async def probe(self) -> Support:
        raise NotImplementedError

    async def try_features(self, guest: Guest) -> list[Feature]:
        """Try what only this runtime can do, on a sandbox that ends afterwards."""
        return []

    def facts(self) -> list[str]:
        return [self.host.facts(self.tool_names)]

    def recall(self, support: Support) -> None:
        """Choose again what an earlier probe chose."""

    # What is the same.

    async def run(self, argv: list[str], log: Path, seconds: float) -> None:
        """Run this runtime's program to its end."""
        await tools.run_tool(argv, log=log, seconds=seconds, starter=self.starter)

    def can_change(self, launched: Limits, asked: Limits) -> bool:
        # Nobody in a sandbox may raise a hard limit again.
        return asked.open_files <= launched.open_files

    def excess(self, limits: Limits) -> str:
        return machine.excess(limits, self.host.settings.data_dir)

    async def fetch(self, rootfs: Rootfs) -> None:
        if rootfs.kind != "host":
            await self.host.images.provide(rootfs)

    async def launch(self, spec: SandboxSpec) -> Guest:
        record = SandboxRecord(
            sandbox_id=spec.sandbox_id,
            runtime=self.name,
            limits=spec.limits,
            id_base=None,
            workspace_of=spec.workspace_of,
        )
        folder = self.host.folder(spec.sandbox_id)
        listener = link.Listener(folder / "link")
        content = None
        if spec.rootfs.kind != "host":
            content = await self.host.images.provide(spec.rootfs)
        try:
            prepare = functools.partial(self._prepare, content=content, network=spec.network)
            record = await to_the_end(prepare, record)
            await listener.listen()
            arguments = ("--bundle", str(folder), "--pid-file", str(folder / "pid"))
            argv = self.command(
                "run", "--detach", *arguments, spec.sandbox_id, network=spec.network
            )
            if self.group_is_ours:
                argv = cgroups.within(spec.sandbox_id, argv)
            await self.run(argv, folder / "log", RUN_SECONDS)
            pid = int((folder / "pid").read_text("ascii"))
            record = replace(record, pid=pid, pid_started=start_time(pid))
            record.save(folder)
            _limit_sockets(record)
            guest = OciGuest(self, record, listener)
            guest.watch()
            await guest.connect()
        except BaseException:
            listener.close(errors.SandboxDied("its launch failed"))
            with contextlib.suppress(NotRemoved):  # somebody goes on with it
                await asyncio.shield(self.purge(spec.sandbox_id))
            raise
        return guest

    def _prepare(
        self, record: SandboxRecord, content: Content | None, network: str
    ) -> SandboxRecord:
        """Everything on disk that the sandbox needs before its first process."""
        folder = self.host.folder(record.sandbox_id)
        folder.mkdir()
        record = self.assign(record)
        if content is not None:
            root = self.host.roots.take(record.sandbox_id, content)
            record = replace(record, root=root, env=_with_tools(content.env))
        record.save(folder)
        link.Listener.prepare(folder / "link", owner=record.id_base or 0)
        slot = folder / "slot"
        slot.mkdir()
        slot.chmod(0o755)
        mounts.make_shared_mount(slot)
        self.mount_point(record.sandbox_id).mkdir(mode=0o755, exist_ok=True)
        self.state.mkdir(mode=0o700, exist_ok=True)
        config = bundle.make_config(
            record.sandbox_id,
            replace(self.host.layout(record), hidden=self.hidden_files()),
            self.flavour(record),
            record.limits,
            network,
            self.user_namespace(record),
        )
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        if self.host.has_cgroups:
            cgroups.weigh()
        if self.group_is_ours:
            resources = bundle.make_resources(self.flavour(record), record.limits)
            cgroups.make(record.sandbox_id, resources)
        return record

    def hidden_files(self) -> Sequence[str]:
        """Files and folders of the kernel that a sandbox is not to see."""
        return bundle.MASKED

    def user_namespace(self, record: SandboxRecord) -> str:
        """The path of a user namespace for the sandbox; empty for one that is made with it."""
        return ""

    def assign(self, record: SandboxRecord) -> SandboxRecord:
        """Give the sandbox what only it may have, such as a range of uids."""
        return record

    def mount_workspace(self, record: SandboxRecord) -> SandboxRecord:
        """Mount it, and write down that it is."""
        target = self.mount_point(record.sandbox_id)
        if record.workspace_of:
            # One file system, seen twice: what one writes, the other sees.
            mounts.bind(self.mount_point(record.workspace_of), target)
        else:
            self.host.workspaces.mount(record.sandbox_id, target, **_workspace_of(record))
        record = replace(record, settled=True)
        record.save(self.host.folder(record.sandbox_id))
        return record

    def heal_workspace(self, record: SandboxRecord) -> None:
        """Put a repaired copy of a workspace where programs will look for it."""
        self.host.workspaces.heal(record.sandbox_id, self.mount_point(record.sandbox_id))

    def finish_heal(self, record: SandboxRecord) -> None:
        """Mount the workspace that a killed gateway has perhaps unmounted to repair it."""
        self.host.workspaces.finish_heal(record.sandbox_id, self.mount_point(record.sandbox_id))

    def change_places(self, before: SandboxRecord) -> Callable[[SandboxRecord], dict[str, Any]]:
        """How a sandbox in which nothing has run yet gets the sizes of other limits.

        What comes back is what its guest must do for it.
        """

        def change(record: SandboxRecord) -> dict[str, Any]:
            found: dict[str, Any] = {}
            sizes = [(round_up(item.limits.disk), item.limits.inodes) for item in (before, record)]
            if record.settled and not record.workspace_of and sizes[0] != sizes[1]:
                target = self.mount_point(record.sandbox_id)
                self.host.workspaces.replace(record.sandbox_id, target, **_workspace_of(record))
                found["other_workspace"] = True
            if record.limits.memory != before.limits.memory:
                found |= self.resize_folders(record)
            return found

        return change

    def hold_limits(self, record: SandboxRecord) -> None:
        """Let the kernel hold a sandbox to the limits of its record, which is saved."""
        resources = bundle.make_resources(self.flavour(record), record.limits)
        cgroups.set_limits(record.sandbox_id, resources)
        _limit_sockets(record)
        record.save(self.host.folder(record.sandbox_id))

    async def adopt(self) -> list[Guest]:
        guests: list[Guest] = []
        for folder in sorted(self.host.sandboxes.glob("sb-*")):
            record = SandboxRecord.load(folder)
            if record is None or record.runtime != self.name or not record.is_running():
                continue
            if record.sandbox_id in self.host.leftovers:  # it is to end, and only resists
                continue
            listener = link.Listener(folder / "link")
            try:
                await listener.listen()
            except OSError:
                log.exception("sandbox %s cannot be adopted", record.sandbox_id)
                continue
            guest = OciGuest(self, record, listener)
            guest.watch()
            if record.healing:
                try:
                    await guest.finish_heal()
                except (errors.K8eError, OSError):
                    # What it held was saved as a snapshot before; it must not go on without.
                    log.exception("the workspace of %s cannot be mounted", record.sandbox_id)
                    with contextlib.suppress(NotRemoved):
                        await guest.kill()
                    continue
            guests.append(guest)
        return guests

    def remains(self) -> set[str]:
        return self.host.remains()

    async def find_greedy(self, sandbox_ids: Iterable[str]) -> Mapping[str, str]:
        return {}

    def explain_end(self, record: SandboxRecord) -> str:
        if cgroups.memory_limit_hits(record.sandbox_id):
            limit = record.limits.memory // MIB
            return (
                f"the sandbox ran out of memory (its limit is {limit} MiB; --memory and "
                "limits={'memory': …} give a new session more)"
            )
        said = tools.tail(self.host.folder(record.sandbox_id) / "log")
        return f"the sandbox ended unexpectedly ({said})"

    async def purge(self, sandbox_id: str) -> None:
        try:
            if sandbox_id in self.host.leftovers:  # without a program that would wait for it again
                await asyncio.to_thread(self._end_processes, sandbox_id, AGAIN_SECONDS)
            await self.delete(sandbox_id)
            await asyncio.to_thread(self._remove, sandbox_id)
        except NotRemoved as error:
            if sandbox_id not in self.host.leftovers:
                log.warning("sandbox %s is not gone yet: %s", sandbox_id, error.message)
            self.host.leftovers.note(sandbox_id, error.message)
            raise
        self.host.leftovers.forget(sandbox_id)
        self.host.roots.free(sandbox_id)
        self.host.uids.free(sandbox_id)  # only now: what is left would belong to the next one

    async def switch(self, verb: str, sandbox_id: str, wanted: str) -> None:
        """Have the runtime's program ``pause`` or ``resume``; no error if it is as ``wanted``.

        Several times: runc gives up where the kernel cannot stop all processes at once, which on a
        busy host may take it a second.
        """
        log = self.host.folder(sandbox_id) / "log"
        for left in reversed(range(FREEZE_TRIES)):
            try:
                await self.run(self.command(verb, sandbox_id), log, FREEZE_SECONDS)
                return
            except errors.ToolFailed:
                status = await self._status(sandbox_id)
                if status == wanted:
                    return
                if not left:
                    if status == "unknown":
                        raise
                    raise errors.TimedOut(
                        f"{verb} failed: some processes of the sandbox do not stop, or do not go "
                        "on, in time",
                        hint="they wait for the kernel; try again later, or destroy the session",
                    ) from None
                await asyncio.sleep(FREEZE_DELAY * 2 ** (FREEZE_TRIES - 1 - left))

    async def _status(self, sandbox_id: str) -> str:
        """What the runtime's program says of a sandbox: ``running``, ``paused`` or another word."""
        answer = self.host.folder(sandbox_id) / "state"
        answer.unlink(missing_ok=True)
        argv = self.command("state", sandbox_id)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, errors.ToolFailed):
            await self.run(argv, answer, FREEZE_SECONDS)
            return str(json.loads(answer.read_text("utf-8"))["status"])
        return "unknown"

    async def delete(self, sandbox_id: str) -> None:
        """Let the runtime's own program end what it knows of a sandbox."""
        cgroups.end_frozen(sandbox_id)
        if any(self.state.glob(f"{sandbox_id}*")):
            with contextlib.suppress(errors.ToolFailed):  # what it leaves, _remove removes
                argv = self.command("delete", "--force", sandbox_id)
                await self.run(argv, Path(os.devnull), DELETE_SECONDS)

    def _remove(self, sandbox_id: str) -> None:
        """Remove all that is left, in the order in which one thing uses the next.

        The folder is the last: as long as it is there, a gateway knows that there is something.
        """
        self.host.growth.forget(sandbox_id)
        self._end_processes(sandbox_id)
        self._remove_disk(sandbox_id)
        try:
            self._remove_state(sandbox_id)
            self._remove_folder(sandbox_id)
        except OSError as error:
            raise NotRemoved(f"a file of it is left: {error.strerror or error}") from error

    def _end_processes(self, sandbox_id: str, seconds: float = cgroups.REMOVE_SECONDS) -> None:
        """End all processes of a sandbox, with the cgroups that they are in."""
        try:
            cgroups.remove(sandbox_id, seconds)
        except OSError as error:
            processes, groups = cgroups.what_is_left(sandbox_id)
            if not groups:
                return  # the last one ended just now
            count = f"{groups} control group{'s' if groups > 1 else ''}"
            if not processes:
                raise NotRemoved(f"{count}: {error.strerror or error}") from error
            what = f"{describe(processes)} that did not end when killed, with {count}"
            raise NotRemoved(what) from error
        if not self.host.has_cgroups:  # they would have known what belongs to it
            left = {*kill_mentioning(sandbox_id), *self.host.uids.kill(sandbox_id)}
            if left:
                raise NotRemoved(f"{describe(left)} that did not end when killed")

    def _remove_disk(self, sandbox_id: str) -> None:
        """Unmount everything, then remove what the workspace was in."""
        try:
            for point in mounts.mounts_below(self.host.folder(sandbox_id)):
                mounts.unmount(point)
            self.host.workspaces.remove(sandbox_id)
        except OSError as error:
            raise NotRemoved(f"its disk: {error.strerror or error}") from error

    def _remove_folder(self, sandbox_id: str) -> None:
        folder = self.host.folder(sandbox_id)
        if folder.exists():
            shutil.rmtree(folder)

    def _remove_state(self, sandbox_id: str) -> None:
        for left in self.state.glob(f"*{sandbox_id}*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
