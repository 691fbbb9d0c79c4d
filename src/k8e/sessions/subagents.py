"""Sub-agents: sessions that share the workspace of another one, their parent, and end with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from k8e import errors
from k8e.egress.policy import Policy
from k8e.manifests import Manifest
from k8e.model import Principal, Session, SessionSpec, new_id
from k8e.sessions import live as sessions_live
from k8e.sessions import refusals
from k8e.sessions.conversations import OF_ONE_SANDBOX
from k8e.sessions.creation import Kinship, SessionMaker
from k8e.sessions.live import Live
from k8e.sessions.network import Network
from k8e.sessions.store import SessionStore

AGENT_TYPE = "agent_type"
"""The label that says what kind of agent a child is."""
MAX_AGENT_TYPE = 200  # characters
WORKSPACE = "/workspace"
MAX_PATH = 4000  # bytes; a system call takes 4096


class Make(Protocol):
    """Makes a session, within the limits of the gateway."""

    def __call__(
        self, key: str, principal: Principal, spec: SessionSpec, *, auto: bool, kin: Kinship
    ) -> Awaitable[Session]: ...


class Children:
    """Makes children, and applies to them what happens to their parents."""

    def __init__(
        self, store: SessionStore, network: Network, maker: SessionMaker, limit: int
    ) -> None:
        self._store = store
        self._network = network
        self._maker = maker
        self._limit = limit

    # Making.

    async def make(self, parent: Live, kind: str, path: str, make: Make) -> Session:
        """Make a child of ``parent``: an agent of this type that works in this folder."""
        self._check(parent)
        spec = child_spec(parent.session, kind)
        kin = Kinship(parent.session, check_path(path))
        key = _prefix(parent) + new_id("make")
        try:
            return await make(key, Principal(parent.session.owner), spec, auto=False, kin=kin)
        except (errors.K8eError, OSError, asyncio.CancelledError):
            task = asyncio.current_task()
            if parent.ending is None or (task is not None and task.cancelling()):
                raise
            # It was given up, or failed, because its parent ended.
            raise _gone(parent) from None

    def _check(self, parent: Live) -> None:
        if parent.ending is not None:
            raise _gone(parent)
        if parent.session.parent:
            raise errors.Denied(
                "a sub-agent cannot have sub-agents of its own",
                hint=f"start it from {parent.session.parent}, whose workspace they share",
            )
        if parent.paused:
            raise refusals.paused(parent.session.session_id)
        if len(parent.children) + self._maker.count(_prefix(parent)) >= self._limit:
            raise errors.LimitExceeded(
                f"session {parent.session.session_id} has {self._limit} sub-agents, the most that "
                "it may have (K8E_MAX_CHILDREN)",
                hint="destroy some: k8e sandbox sessions, k8e sandbox destroy ID",
            )

    # Following.

    async def catch_up(self, parent: Live, child: Live) -> None:
        """Apply to a new child what its parent got while it was being made."""
        await self.extend(parent, before=child.session.deadline)
        async with parent.policy:  # a change that is under way may not have seen this child
            words = parent.session.allowed_hosts
            if words != child.session.allowed_hosts:
                _, policy = await self._network.read(words)
                await self.allow(child, words, policy)

    async def allow(self, live: Live, words: tuple[str, ...], policy: Policy) -> None:
        """Let a session reach what ``policy`` says, and its children too."""
        failed: errors.K8eError | None = None
        family = (live, *live.children)
        # Before the kernel enforces it: otherwise a gateway after us would go back.
        for one in family:
            await self._store.allow(one.session, words, under_way=True)
        for one in family:
            try:
                await self._network.bind(one.session.sandbox_id, policy)
            except errors.K8eError as error:
                failed = failed or error  # a stricter policy must not stop half-way
                await self._store.allow(one.session, one.session.allowed_hosts)
                continue
            await self._store.allow(one.session, words)
            one.session = replace(one.session, allowed_hosts=words)
        if failed is not None:
            raise failed

    def check_extension(self, live: Live, deadline: float) -> None:
        """Refuse a lifetime beyond the parent's."""
        if live.parent is not None and deadline > live.parent.session.deadline:
            left = max(0, int(live.parent.session.deadline - sessions_live.boot_time()))
            raise errors.LimitExceeded(
                f"a sub-agent cannot outlive its parent, which lives another {left} s",
                hint=f"k8e sandbox extend {live.parent.session.session_id} first",
            )

    async def extend(self, parent: Live, before: float) -> None:
        """Extend children that would have lived as long as their parent."""
        expires_at, deadline = parent.session.expires_at, parent.session.deadline
        for child in list(parent.children):
            if child.session.deadline >= before or child.session.deadline > deadline:
                await self._store.extend(child.session.session_id, expires_at, deadline)
                child.session = replace(child.session, expires_at=expires_at, deadline=deadline)
                child.schedule()

    # Ending.

    async def end(
        self, parent: Live, reason: str, end: Callable[[Live, str], Awaitable[None]]
    ) -> None:
        """End the children of a session that ends, and give up those that are being made."""
        making = self._maker.tasks(_prefix(parent))
        for task in making:
            task.cancel()
        if making:
            await asyncio.wait(making)
        children = list(parent.children)
        if children:
            why = f"its parent ended: {reason}"
            await asyncio.gather(*(end(child, why) for child in children))


def child_spec(parent: Session, kind: str) -> SessionSpec:
    """The specification of a child: all that its parent has now."""
    if len(kind) > MAX_AGENT_TYPE or not kind.isprintable():
        raise errors.InvalidRequest(
            f"an agent type has at most {MAX_AGENT_TYPE} printable characters"
        )
    own = {name: text for name, text in parent.spec.labels.items() if name not in OF_ONE_SANDBOX}
    labels = {**own, **({AGENT_TYPE: kind} if kind else {})}
    return replace(
        parent.spec,
        runtime=parent.runtime,  # by name: a child never gets a weaker one
        session_id="",
        request_id="",
        snapshot="",  # the parent's first content is in the workspace that they share
        manifest=Manifest(),
        labels=labels,
        allowed_hosts=parent.allowed_hosts,
    )


def check_path(path: str) -> str:
    """``path`` without superfluous parts; it must be ``/workspace`` or below, as it is written.

    Only the guest follows it; nothing on the host does.
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    fits = path.startswith("/") and parts[:1] == ["workspace"] and ".." not in parts
    if path and (not fits or "\0" in path or len(path.encode("utf-8", "replace")) > MAX_PATH):
        raise errors.InvalidRequest(
            f"workspace path {path[:80]!r} is not a folder of the workspace",
            hint="use /workspace or a path below it, without '..'",
        )
    return "/" + "/".join(parts) if path else ""


def _prefix(parent: Live) -> str:
    """The prefix of the keys under which children of ``parent`` are being made."""
    return f"child {parent.session.session_id} "


def _gone(parent: Live) -> errors.SessionNotFound:
    return refusals.not_found(parent.session.session_id, "it ended")
