"""What one connection has: its own session, others that it made, and nobody else's.

A gateway knows who calls, not which agent. So each connection has a desk, and what is not on the
desk cannot be named. With a tenant, all of the tenant's sessions are on every desk of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

from k8e import errors
from k8e.client.results import SessionInfo
from k8e.mcp.clients import Client

T = TypeVar("T")
MAX_KNOWN = 10_000  # sessions of one desk; of more the oldest can no longer be named
LIVING = ("active", "paused", "creating")
MAX_UNNAMED = 16
"""Sessions for one request that are kept though nobody named them again."""
CLOSE_SECONDS = 10.0
IDLE_TIMEOUT = 600.0
"""Seconds that a session lives unused which was made for one request of a client without any."""
_note: ContextVar[str] = ContextVar("note", default="")
"""What a call should say about its session. Each call has a task, and so a note, of its own: what
is said to one agent must not be read by another."""


def take_note() -> str:
    """What there is to say about the session of this call, once."""
    note = _note.get()
    _note.set("")
    return note


class Desk:
    """The sessions of one connection."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.tenant = client.tenant_id
        self._own = ""
        self._known: dict[str, None] = {}  # in the order in which they came
        self._making = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()  # that make or destroy sessions
        self._closed = False

    @property
    def own(self) -> str:
        """The session of calls that name none; empty before the first one."""
        return self._own

    @property
    def known(self) -> list[str]:
        return list(self._known)

    def add(self, session_id: str) -> str:
        """A session that this connection made."""
        self._known[session_id] = None
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        return session_id

    async def made(self, making: Awaitable[str]) -> str:
        """A session that is being made: on the desk, even if nobody waits for it any more."""
        return await asyncio.shield(self._start(self._take(making)))

    async def _take(self, making: Awaitable[str]) -> str:
        session_id = await making
        if self._closed and not self.tenant:
            await self._destroy(session_id)
            raise errors.Conflict("the connection has ended", hint="connect again")
        return self.add(session_id)

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # who waited for it has it; others do not care

    async def _destroy(self, session_id: str) -> None:
        with contextlib.suppress(errors.K8eError, OSError):
            await self.client.destroy_session(session_id)

    def forget(self, session_id: str, note: str = "") -> None:
        self._known.pop(session_id, None)
        if self._own == session_id:
            self._own = ""
            _note.set(note)

    async def within(
        self, given: str, work: Callable[[str], Awaitable[T]], *, fresh: bool = True
    ) -> T:
        """Work in the named session, or in the connection's own, which is made if it is gone.

        Not ``fresh`` is what makes no sense in a session that nothing has been done in.
        """
        if given:
            return await work(await self.find(given))
        session_id = await self.default()
        try:
            return await work(session_id)
        except errors.SessionNotFound:
            self.forget(session_id, _anew(session_id))
        except errors.SandboxDied:
            self.forget(session_id, _anew(session_id))
            raise  # the program may have run
        return await work(await self.default())

    async def find(self, session_id: str) -> str:
        """The id, if this connection may use it."""
        if session_id in self._known:
            return session_id
        if self.tenant and (await self.client.get_session(session_id)).tenant_id == self.tenant:
            return self.add(session_id)
        raise unknown(session_id)

    async def default(self) -> str:
        """The connection's own session."""
        if self._own:
            return self._own
        async with self._making:
            if not self._own:
                self._own = await self.made(self._make())
        return self._own

    async def _make(self) -> str:
        if not self.tenant:
            return await self.client.create_session()
        for session in await self.client.list_sessions(self.tenant):
            if session.auto and session.phase in LIVING:
                return session.session_id
        # The gateway makes the standing session of a tenant when something runs in it.
        return (await self.client.run(":")).session_id

    async def listing(self) -> list[SessionInfo]:
        """What this connection can use."""
        found = await self.client.list_sessions(self.tenant)
        return [item for item in found if self.tenant or item.session_id in self._known]

    async def close(self) -> None:
        """Destroy what the connection made; a tenant's sessions stay."""
        self._closed = True
        left, self._known, self._own = list(self._known), {}, ""
        for session_id in () if self.tenant else left:
            await self._destroy(session_id)
        await self.settled()

    async def settled(self) -> None:
        """Wait, but not for ever, until sessions that come or go have come or gone."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)


class LooseDesk(Desk):
    """For clients without a connection: each request is by itself, and a session id is the key.

    A call that names no session gets a new one, which ends soon if nobody comes back to it: all
    these clients share one quota, and none of them says when it leaves.
    """

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._unnamed: dict[str, None] = {}  # in the order in which they were used

    async def default(self) -> str:
        if self.tenant:
            return await super().default()
        made = await self._fresh()
        self._remember(made)
        return made

    async def within(
        self, given: str, work: Callable[[str], Awaitable[T]], *, fresh: bool = True
    ) -> T:
        if given or self.tenant:
            return await super().within(given, work)
        if not fresh:
            raise errors.InvalidRequest(
                "this needs session_id: a client without a connection has no session of its own",
                hint="give the session_id that an earlier call told",
            )
        session_id = await self._fresh()
        try:
            return await work(session_id)
        finally:
            self._remember(session_id)  # not before: what is in use is not destroyed

    async def find(self, session_id: str) -> str:
        self._unnamed.pop(session_id, None)
        return await super().find(session_id)

    async def _fresh(self) -> str:
        made = await self.made(self.client.create_session(idle_timeout=IDLE_TIMEOUT))
        _note.set(f"to go on with these files, give session_id {made} in the next call")
        return made

    def _remember(self, session_id: str) -> None:
        self._unnamed[session_id] = None
        while len(self._unnamed) > MAX_UNNAMED:
            oldest = next(iter(self._unnamed))
            del self._unnamed[oldest]
            self.forget(oldest)
            self._start(self._destroy(oldest))

    async def listing(self) -> list[SessionInfo]:
        """Nothing: whose these are is known only to who was told their ids."""
        return await super().listing() if self.tenant else []


def unknown(session_id: str) -> errors.SessionNotFound:
    return errors.SessionNotFound(
        f"session {session_id[:80]} not found",
        hint="sandbox_list_sessions lists yours; leave session_id out to use this connection's own",
    )


def _anew(session_id: str) -> str:
    return f"session {session_id} has ended, and its files with it; this is a new, empty one"
