"""First content of a session's workspace: a snapshot, files, folders and git repositories.

Everything is done in the sandbox, with the rights of its user and under the session's own egress
policy, before a client can use it. A failure fails the creation as a whole.
"""

from __future__ import annotations

import asyncio
import errno
import time
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from k8e import errors, link
from k8e.link import FrameSink
from k8e.manifests import DIR, FILE, HEAD, WORKSPACE, Entry, Manifest
from k8e.model import Session, SessionSpec
from k8e.runtimes.base import Guest
from k8e.sessions import exchange, operations
from k8e.sessions.exchange import GuestExchange
from k8e.sessions.network import Network
from k8e.sessions.operations import Course, Operation
from k8e.sessions.snapshots import Snapshots

WRITE_SECONDS = 60.0  # for one file
GIT_SECONDS = 120.0  # for one repository
GIT_ENV = {
    "GIT_ALLOW_PROTOCOL": "http:https",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
}
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Furnisher:
    """Fills new sandboxes with the content that their sessions asked for."""

    def __init__(self, network: Network, snapshots: Snapshots) -> None:
        self._network = network
        self._snapshots = snapshots

    def check(self, owner: str, spec: SessionSpec) -> None:
        """Refuse content that cannot be made, before anything is started for it."""
        if spec.snapshot:
            self._snapshots.get_content(owner, spec.snapshot)
        if spec.manifest and not spec.manifest.entries:
            raise errors.InvalidRequest("a manifest is a list of entries")

    async def furnish(self, session: Session, guest: Guest) -> Session:
        """Fill the workspace before the session starts; return the session to store."""
        room = _Room(guest, self._network)
        if session.spec.snapshot:
            await self._snapshots.unpack(session.owner, session.spec.snapshot, room.open)
        await _apply(session.spec.manifest, room)
        spec = replace(session.spec, manifest=Manifest(session.spec.manifest.digest))
        return replace(session, spec=spec)


class _FirstContent(Course):
    """Collects the refusals of a sandbox while it is being furnished."""

    def __init__(self, network: Network, sandbox_id: str) -> None:
        self._network = network
        self._sandbox_id = sandbox_id
        self._mark = network.mark(sandbox_id)

    def amend_exit(self, body: bytes) -> bytes:
        denials = self._network.denials_since(self._sandbox_id, self._mark)
        return self._network.add_denials(body, denials)


class _Room:
    """A sandbox that is not a session yet."""

    def __init__(self, guest: Guest, network: Network) -> None:
        self._guest = guest
        self._network = network

    async def open(self, call: dict[str, Any], on_frame: FrameSink) -> Operation:
        operations.check(call)
        connected = await self._guest.connect()
        course = _FirstContent(self._network, self._guest.sandbox_id)
        operation = Operation(call["op"], on_frame, course)
        lost = errors.GuestFailed("the link to the guest was lost")
        channel = connected.open(call, operation.receive, lambda: operation.fail(lost))
        operation.attach(channel)
        return operation

    async def ask(self, call: dict[str, Any]) -> None:
        await link.request(await self._guest.connect(), call)


async def _apply(manifest: Manifest, room: _Room) -> None:
    for number, entry in enumerate(manifest.entries, 1):
        where = f"manifest entry {number} ({entry.kind} {entry.path!r})"
        try:
            if entry.kind == FILE:
                await _write(room, entry)
            elif entry.kind == DIR:
                await room.ask({"op": "mkdir", "path": _path(entry)})
            else:
                await _clone(room, entry)
        except OSError as error:
            kind = errors.LimitExceeded if error.errno in _FULL else errors.InvalidRequest
            hint = "give it more disk: --disk" if error.errno in _FULL else ""
            raise kind(f"{where}: {error.strerror}", hint=hint) from None
        except errors.K8eError as error:
            raise type(error)(f"{where}: {error.message}", hint=error.hint) from None


def _path(entry: Entry) -> str:
    return WORKSPACE if entry.path == "." else f"{WORKSPACE}/{entry.path}"


async def _write(room: _Room, entry: Entry) -> None:
    call: dict[str, Any] = {"op": "write", "path": _path(entry)}
    if entry.mode is not None:
        call["mode"] = entry.mode
    try:
        async with asyncio.timeout(WRITE_SECONDS), GuestExchange(room.open, call) as upload:
            await upload.result()
            await upload.upload(entry.content)
    except TimeoutError:
        raise errors.GuestFailed("the guest did not write it in time") from None


# Git.


async def _clone(room: _Room, entry: Entry) -> None:
    """Fetch one commit of a repository: that of a branch, a tag or a commit id."""
    await room.ask({"op": "mkdir", "path": _path(entry)})
    git = _Git(room, entry)
    # With no templates there are no hooks, and less to write.
    await git.run("init", "--quiet", "--template=", "--initial-branch=main")
    await git.run("remote", "add", "--", "origin", entry.repo)
    await git.run("fetch", "--quiet", "--depth=1", "--no-tags", "origin", entry.ref or HEAD)
    await git.run("checkout", "--quiet", "--detach", "FETCH_HEAD")


class _Git:
    """Runs git in the folder of one entry, within a time limit."""

    def __init__(self, room: _Room, entry: Entry) -> None:
        self._room = room
        self._entry = entry
        self._until = time.monotonic() + GIT_SECONDS

    async def run(self, *arguments: str) -> None:
        tail = exchange.Tail()
        left = max(1.0, self._until - time.monotonic())
        try:
            ended = await exchange.run(
                self._room.open,
                ["git", *arguments],
                seconds=left,
                env=GIT_ENV,
                cwd=_path(self._entry),
                hear=tail.hear,
            )
        except exchange.NotStarted as error:
            if error.missing:
                raise errors.ToolFailed(
                    "the sandbox has no git: it is not installed on the gateway's host",
                    hint="install git there, or copy the files with k8e sandbox cp",
                ) from None
            raise errors.ToolFailed(f"git cannot be started in the sandbox: {error}") from None
        if ended.code or ended.timed_out:
            raise self._failure(ended, tail.text())

    def _failure(self, ended: exchange.ProgramEnd, said: str) -> errors.ToolFailed:
        parts = urlsplit(self._entry.repo)
        secret = parts.netloc.rpartition("@")[0]
        if secret:
            said = said.replace(f"{secret}@", "")
        what = f"ref {self._entry.ref} of {self._entry.repo.replace(f'{secret}@', '', 1)}"
        how = f"took longer than {GIT_SECONDS:g} s" if ended.timed_out else said
        text = f"{what} could not be fetched: {how or f'git ended with {ended.code}'}"
        if not ended.denials:
            return errors.ToolFailed(text, hint="check the address and the ref")
        return errors.ToolFailed(
            f"{text}; the session's egress policy refused {', '.join(ended.denials[:5])}",
            hint=f"allow it: --allowed-hosts {','.join(ended.denials[:5])}",
        )
